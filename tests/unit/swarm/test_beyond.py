"""A version that moves farther than its contributions allow: no peer adopts it, and another peer goes on."""

from __future__ import annotations

import pytest
import torch

from diloco.outer.digest import digest_of
from diloco.protocol.beyond import refuse, refused
from diloco.protocol.messages.control import Status, mark
from diloco.protocol.proofs import disagreements
from diloco.swarm.conversations.certificates import Unbelieved
from diloco.swarm.conversations.framing import FragmentState, UpdateRecord
from tests.support.certificates import record_of
from tests.support.stub_host import ME, OTHER, StubHost

FAR, NEAR = torch.full((6,), 50.0), torch.arange(6.0) + 0.3


def state_of(host: StubHost, record: UpdateRecord, anchor: torch.Tensor) -> FragmentState:
    """What a donor sends that has made the version of a record."""
    state = host.state(1, anchor)
    return FragmentState(state.header.model_copy(update={"record": record.header}), anchor, donor=OTHER)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_a_version_that_is_too_long_moves_nothing(codec: str) -> None:
    """Its author is gone."""
    host = StubHost(OTHER, codec_down=codec)
    before, digest = host.replica.anchors[0].clone(), host.protocol.digests[0]
    after = before.clone()
    record = host.record(1, FAR, norm=1.0)
    host.replica.down.apply_update_(after, record.update)
    record = UpdateRecord(record_of(1, digest, digest_of(after), {OTHER: 10}, author=OTHER), record.update)
    await host.catch_up({0: [record], -1: state_of(host, record, after)})
    assert "beyond_bounds" in host.notes and host.client.asked == [0], "nor is it asked for the anchor"
    assert torch.equal(host.replica.anchors[0], before) and host.protocol.digests == [digest]
    assert host.protocol.penalties.refusal(OTHER, host.now()) and OTHER not in host.protocol.members
    lease = host.protocol.leases.get(0)
    assert lease is not None and (lease.holder, lease.term) == (ME, 2), "it goes on from the last good anchor"


async def test_an_author_answers_for_no_update_that_it_did_not_sign() -> None:
    """A donor puts another update behind the certificate of an honest version."""
    host = StubHost(OTHER)
    honest, other = host.record(1, NEAR, norm=1.0), host.record(1, FAR)
    host.client.answers = {-1: state_of(host, honest, NEAR)}
    await host.anchors.adopt_record(UpdateRecord(honest.header, other.update))
    assert "digest_mismatch" in host.notes and "beyond_bounds" not in host.notes
    assert host.protocol.penalties.refusal(OTHER, host.now()) is None
    assert torch.equal(host.replica.anchors[0], NEAR)


async def test_the_anchor_of_a_version_that_is_too_long_is_refused() -> None:
    host = StubHost(OTHER)
    before = host.replica.anchors[0].clone()
    with pytest.raises(Unbelieved, match="what was contributed allows"):
        await host.anchors.adopt_state(state_of(host, host.record(1, FAR, norm=1.0), FAR))
    assert torch.equal(host.replica.anchors[0], before) and "beyond_bounds" in host.notes
    assert OTHER not in host.protocol.members


@pytest.mark.parametrize("whole", [False, True], ids=["record", "anchor"])
async def test_an_honest_version_is_adopted(whole: bool) -> None:
    host = StubHost(OTHER)
    record, anchors = host.record(1, NEAR, norm=1.0), host.anchors
    await (anchors.adopt_state(state_of(host, record, NEAR)) if whole else anchors.adopt_record(record))
    assert torch.equal(host.replica.anchors[0], NEAR) and "beyond_bounds" not in host.notes


async def test_a_record_without_contributions_is_refused() -> None:
    host = StubHost(OTHER)
    update = host.record(1, FAR).update
    header = record_of(1, host.protocol.digests[0], digest_of(FAR), {}, author=OTHER)
    await host.catch_up({0: [UpdateRecord(header, update)], -1: ConnectionError("gone")})
    assert host.protocol.versions == [0] and "fetch_failed" in host.notes


async def test_a_syncer_knows_the_bound_of_its_own_versions() -> None:
    """As every other peer knows it, should another one make the next version."""
    host = StubHost(ME, momentum=0.9, codec_up="int8")
    for _ in range(3):
        await host.learn()
        await host.exchange()
    await host.anchors.load()
    known = host.replica.bounds[0]
    assert known._momentum == pytest.approx(6**0.5 * (1 + 0.9 + 0.81), rel=1e-2)


def status(version: int, digest: str) -> Status:
    """Of a peer that has that version."""
    return Status(state="training", versions=[version], marks=mark(digest), target_steps=1, steps_per_s=1.0)


def says(host: StubHost, peer: str, version: int, digest: str) -> None:
    host.join(peer)
    host.protocol.members.hear(peer, status(version, digest), host.now())


def refused_at(host: StubHost) -> tuple[UpdateRecord, str]:
    record = host.record(1, FAR)
    refuse(host.protocol, record.header)
    return record, digest_of(FAR)


async def test_what_most_have_is_believed_even_if_refused_here() -> None:
    host = StubHost(OTHER)
    record, digest = refused_at(host)
    says(host, OTHER, 1, digest)
    assert refused(host.protocol, record.header), "one of two"
    says(host, "x", 0, host.protocol.digests[0])
    assert refused(host.protocol, record.header)
    says(host, "x", 1, digest)
    assert refused(host.protocol, record.header) is None, "two of three"
    later = record_of(2, digest, "e" * 64, {OTHER: 10}, author=OTHER)
    assert refused(host.protocol, later), "as what its author made of it, until most have that"
    assert refused(host.protocol, record_of(1, "d" * 64, digest, {OTHER: 10}, author="x")) is None


async def test_a_peer_that_erred_goes_on_with_the_others() -> None:
    """It knows another momentum, for example, and most peers have what it refused."""
    host = StubHost(OTHER)
    record = host.record(1, FAR, norm=1.0)
    for _ in range(2):
        with pytest.raises(Unbelieved):
            await host.anchors.adopt_record(record)
    assert host.notes.count("beyond_bounds") == 1, "another stream had brought it meanwhile"
    for peer in ("x", "y"):
        says(host, peer, 1, digest_of(FAR))
    host.protocol.fragments[0].syncer = None
    await host.anchors.adopt_record(record)
    assert torch.equal(host.replica.anchors[0], FAR) and not host.protocol.beyond
    assert host.notes.count("beyond_bounds") == 1


async def test_who_refused_a_version_shows_its_head_to_others() -> None:
    host = StubHost(OTHER)
    record, digest = refused_at(host)
    assert disagreements(host.protocol, "x", status(1, digest)) == []
    [told] = disagreements(host.protocol, "x", status(1, "a" * 64))
    assert told.message == record.header.head  # type: ignore[union-attr]
    assert disagreements(host.protocol, "x", status(1, "a" * 64)) == [], "once"
