"""One valid message of each type."""

from __future__ import annotations

from diloco.config import WIRE_VERSION
from diloco.protocol.messages import Message, Refusal
from diloco.protocol.messages.audits import Accusation, AuditRequest, Opening, ProofStep, Wanted
from diloco.protocol.messages.bulk import (
    MAX_PARTS,
    Contribution,
    InnerHeader,
    InnerRequest,
    PartList,
    PartRequest,
    Receipt,
    Signed,
    StateHeader,
    StateRequest,
    UnitGrant,
    UnitRequest,
    Verdict,
)
from diloco.protocol.messages.control import (
    Claim,
    Figures,
    Greeting,
    Hello,
    Published,
    Revocations,
    Status,
    Vote,
)
from diloco.protocol.messages.heads import Proof
from diloco.protocol.messages.watching import (
    DialBack,
    DialBackReply,
    FileReply,
    FileRequest,
    ManifestReply,
    ManifestRequest,
    Probe,
    ProbeReply,
    SnapshotReply,
    SnapshotRequest,
)
from diloco.protocol.numbers import MAX_TOKENS
from diloco.protocol.shares import Share
from tests.support.certificates import record_of

D = "0123456789abcdef" * 4


STATUS = Status(
    state="training", versions=[3, 4], inner_step=5, target_steps=6, steps_per_s=0.5, tokens=7, units=[[8, 9]],
    figures=Figures(loss=2.5, bytes_sent=1, bytes_received=2, rounds=3, seconds=[1.0, 0.5, 0.25, 0.0]),
)  # fmt: skip


CLAIM = Claim(fragment=1, term=2, version=3, digest=D, cursor=9, open=[[0, 4], [6, 9]])


REVOCATIONS = Revocations(number=1, token_ids=[D[:16]], peer_ids=["a"], signature=2 * D)


HELLO = Hello(
    wire_version=WIRE_VERSION,
    run_id="run",
    manifest_hash=D,
    name="me",
    trains=True,
    holds=False,
    device="cpu",
    addresses={"a": ["/ip4/127.0.0.1/tcp/4100/p2p/a"]},
    peers=["a"],
    status=STATUS,
    claims=[CLAIM],
)


RECORD = record_of(2, D, D, {"a": 4}, fragment=1, term=2)


EXAMPLES: list[Message] = [
    STATUS,
    CLAIM,
    HELLO,
    Published(
        fragment=1, term=2, version=3, digest=D, contributors=["a", "b"], applied_tokens=4, cursor=9, open=[[6, 9]]
    ),
    Contribution(
        base_digest="0" * 64,
        manifest_hash=D,
        fragment=1,
        term=2,
        base_version=3,
        steps=4,
        tokens=5,
        units=[[0, MAX_TOKENS]],
    ),
    Verdict(accepted=False, first_chunk=1, record_follows=True, reason="why", version=2, term=3),
    Receipt(),
    Signed(line=RECORD.lines[0]),
    RECORD.head,
    Proof(one=RECORD.head, other=RECORD.head),
    RECORD,
    Vote(fragment=1, term=2, holder="a"),
    StateRequest(manifest_hash=D, fragment=1, have_version=2, outer=True, in_parts=False),
    PartList(fragment=1, digest=D, record=RECORD, parts=[D, D]),
    PartRequest(manifest_hash=D, fragment=1, digest=D, part=MAX_PARTS - 1),
    StateHeader(fragment=1, digest=D, record=RECORD, outer=True, shares={"a": Share(2, 3, 1, 2, "b")}),
    InnerRequest(manifest_hash=D),
    InnerHeader(names=["0.0.exp_avg"], numels=[4], steps=[2]),
    AuditRequest(manifest_hash=D, fragment=1, version=2, numbers=[3]),
    Opening(paths=[bytes(64), b""]),
    Accusation(manifest_hash=D, fragment=1, author="a", part=3, steps=2),
    Wanted(),
    ProofStep(head=RECORD.head, paths=[bytes(32)]),
    UnitRequest(manifest_hash=D, wanted=2**20, has=[[0, 1]]),
    UnitGrant(units=[[0, 1]]),
    ManifestRequest(),
    Probe(sends=1, wants=2),
    ProbeReply(wire_version=1, run_id="r", name="n", unix_s=3.0, addresses=["/a"], known=["p"], observed="/o"),
    DialBack(addresses=["/ip4/127.0.0.1/tcp/4100"]),
    DialBackReply(reached=["/ip4/127.0.0.1/tcp/4100"], why="no answer", observed="/ip4/127.0.0.1/tcp/9"),
    ManifestReply(text="{}"),
    FileRequest(digest="ab" * 32),
    FileReply(data=b"piece", more=True),
    SnapshotRequest(),
    SnapshotReply(wire_version=WIRE_VERSION, data=b"packed", more=True),
    Refusal(reason="no"),
    REVOCATIONS,
    Greeting(credential="abc", revoked=1),
]
