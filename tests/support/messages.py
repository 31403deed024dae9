"""One valid message of each type."""

from __future__ import annotations

from diloco.config import WIRE_VERSION
from diloco.protocol.messages import Message, Refusal, bulk, control, watching
from diloco.protocol.numbers import MAX_TOKENS
from diloco.protocol.shares import Share
from tests.support.certificates import record_of

D = "0123456789abcdef" * 4

STATUS = control.Status(
    state="training", versions=[3, 4], inner_step=5, target_steps=6, steps_per_s=0.5, tokens=7, units=[[8, 9]],
    figures=control.Figures(loss=2.5, bytes_sent=1, bytes_received=2, rounds=3, seconds=[1.0, 0.5, 0.25, 0.0]),
)  # fmt: skip
CLAIM = control.Claim(fragment=1, term=2, version=3, digest=D, cursor=9, open=[[0, 4], [6, 9]])
HELLO = control.Hello(
    wire_version=WIRE_VERSION, run_id="run", manifest_hash=D, name="me", trains=True, holds=False, device="cpu",
    addresses={"a": ["/ip4/127.0.0.1/tcp/4100/p2p/a"]}, peers=["a"], status=STATUS, claims=[CLAIM],
)  # fmt: skip
RECORD = record_of(2, D, D, {"a": 4}, fragment=1, term=2)
CONTRIBUTION = bulk.Contribution(
    base_digest="0" * 64, manifest_hash=D, fragment=1, term=2, base_version=3, steps=4, tokens=5,
    units=[[0, MAX_TOKENS]],
)  # fmt: skip

EXAMPLES: list[Message] = [
    STATUS,
    CLAIM,
    HELLO,
    control.Published(
        fragment=1, term=2, version=3, digest=D, contributors=["a", "b"], applied_tokens=4, cursor=9, open=[[6, 9]]
    ),
    CONTRIBUTION,
    bulk.Verdict(accepted=False, first_chunk=1, record_follows=True, reason="why", version=2, term=3),
    bulk.Receipt(),
    bulk.Signed(line=RECORD.lines[0]),
    RECORD,
    control.Vote(fragment=1, term=2, holder="a"),
    bulk.StateRequest(manifest_hash=D, fragment=1, have_version=2, in_parts=False),
    bulk.PartList(fragment=1, digest=D, record=RECORD, parts=[D, D]),
    bulk.PartRequest(manifest_hash=D, fragment=1, digest=D, part=bulk.MAX_PARTS - 1),
    bulk.StateHeader(fragment=1, digest=D, record=RECORD, shares={"a": Share(2, 3, 1, 2, "b")}),
    bulk.InnerRequest(manifest_hash=D),
    bulk.InnerHeader(names=["0.0.exp_avg"], numels=[4], steps=[2]),
    bulk.UnitRequest(manifest_hash=D, wanted=2**20, has=[[0, 1]]),
    bulk.UnitGrant(units=[[0, 1]]),
    watching.ManifestRequest(),
    watching.Probe(sends=1, wants=2),
    watching.ProbeReply(wire_version=1, run_id="r", name="n", unix_s=3.0, addresses=["/a"], known=["p"], observed="/o"),
    watching.DialBack(addresses=["/ip4/127.0.0.1/tcp/4100"]),
    watching.DialBackReply(reached=["/ip4/127.0.0.1/tcp/4100"], why="no answer", observed="/ip4/127.0.0.1/tcp/9"),
    watching.ManifestReply(text="{}"),
    watching.FileRequest(digest="ab" * 32),
    watching.FileReply(data=b"piece", more=True),
    watching.SnapshotRequest(),
    watching.SnapshotReply(wire_version=WIRE_VERSION, data=b"packed", more=True),
    Refusal(reason="no"),
    control.Revocations(number=1, token_ids=[D[:16]], peer_ids=["a"], signature=2 * D),
    control.Greeting(credential="abc", revoked=1),
]
