"""Who contributed how much: counting, bounds, and what of it a peer shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol import shares as module
from diloco.protocol.messages.control import Claim, Published
from diloco.protocol.peer import Peer
from diloco.protocol.shares import MAX_NAME_BYTES, OTHERS, Contributor, Share, Shares, credited, short_name
from tests.support.certificates import MANIFEST, Nobody
from tests.support.core import hello_of, status_of

D = "0" * 64


def newcomer(fragments: int = 1, **settings: object) -> Peer:
    return Peer("me", "mine", "run", MANIFEST, [D] * fragments, Nobody(), newcomer=True, **settings)  # type: ignore[arg-type]


def test_shares_add_up_version_by_version() -> None:
    shares = credited({}, 1, {"a": 10, "b": 20}, {"a": "anna"})
    shares = credited(shares, 2, {"b": 5}, {"b": "bert"})
    assert shares == {"a": Share(1, 10, 1, 1, "anna"), "b": Share(2, 25, 1, 2, "bert")}
    assert credited(shares, 3, {"a": 1, "b": 1}, {})["a"] == Share(2, 11, 1, 3, "anna"), "names stay"


@given(st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9), min_size=1), max_size=12))
def test_what_is_too_much_is_summed_up_and_nothing_is_lost(versions: list[dict[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SHARES", 4)
        shares: Shares = {}
        for version, tokens in enumerate(versions, 1):
            shares = credited(shares, version, tokens, {})
        assert len(shares) <= 4
    assert sum(share.tokens for share in shares.values()) == sum(sum(tokens.values()) for tokens in versions)
    assert sum(share.contributions for share in shares.values()) == sum(map(len, versions))
    if OTHERS in shares:
        oldest_kept = min(share.last_version for peer, share in shares.items() if peer != OTHERS)
        assert shares[OTHERS].last_version <= oldest_kept


@given(st.text(), st.text(max_size=3))
def test_a_name_in_a_share_is_short_and_can_be_printed(name: str, more: str) -> None:
    short = short_name(name)
    assert len(short.encode()) <= MAX_NAME_BYTES and short.isprintable() and short_name(short) == short
    assert short_name("plain") == "plain"


def test_a_peer_shows_counts_of_the_control_fragment() -> None:
    """Steps and tokens are those of the control fragment, and bytes of all."""
    peer = newcomer(3, payload_bytes=[100, 10, 1])
    peer.connected("other", hello_of(status_of(versions=[0] * 3), name="theirs\n" + "x" * 99), 0.0)
    peer.adopted(0, 1, D, 0.0, contributors={"me": 10, "other": 20})
    peer.adopted(0, 2, D, 0.0, contributors={"other": 20})
    peer.adopted(1, 1, D, 0.0, contributors={"me": 10, "other": 20, "late": 1})
    name = "theirs" + "x" * 18
    assert peer.fragments[0].shares["other"].name == name
    rows = [Contributor("other", name, 2, 40, 210, 1, 2), Contributor("me", "mine", 1, 10, 110, 1, 1)]
    assert peer.accounts.contributions() == rows
    peer.lost("other", 1.0, "gone")
    assert [row.name for row in peer.accounts.contributions()] == [name, "mine"], "it is known by name when it is gone"
    assert peer.fragments[0].merged() == {"me": 0, "other": 1}


@pytest.mark.parametrize("successor", ["other", "me"])
def test_the_clock_goes_back_when_versions_die_with_their_syncer(successor: str) -> None:
    peer, hello = newcomer(), hello_of(status_of(versions=[0]))
    peer.connected("syncer", hello, 0.0)
    peer.heard("syncer", Claim(fragment=0, term=1, version=0, digest=D), 0.0)
    peer.adopted(0, 1, D, 0.0, contributors={"me": 10})
    for version, clock in ((1, 10), (2, 30), (3, 50)):  # the last two nobody else has got
        said = Published(fragment=0, term=1, version=version, digest=D, contributors=["syncer"], applied_tokens=clock)
        peer.heard("syncer", said, 1.0)
    assert peer.swarm_clock() == (3, 50)
    peer.lost("syncer", 2.0, "killed")
    peer.catch_up_failed(0)
    if successor == "other":
        peer.connected("other", hello, 3.0)
        peer.heard("other", Claim(fragment=0, term=2, version=1, digest=D, applied_tokens=10), 3.0)
    else:
        peer.discovered(3.0)
        peer.tick(20.0)
    assert peer.swarm_clock() == (1, 10)


def test_the_clock_of_a_checkpoint_without_shares_stays() -> None:
    """Its tokens are those of others: the clock is the sum of the shares, and must not go back by a restart."""
    peer = newcomer(versions=[4], applied_tokens=70)
    assert peer.applied_tokens == 70 and peer.fragments[0].merged() == {}
    peer.accounts.restore_shares([{"other": Share(2, 50, 1, 4)}])
    assert peer.applied_tokens == 70 and peer.fragments[0].merged() == {"other": 3}
    assert [(row.peer_id, row.tokens) for row in peer.accounts.contributions()] == [("other", 50), ("", 20)]
    peer.adopted(0, 5, D, 0.0, contributors={"me": 10})
    assert peer.applied_tokens == 80 and len(peer.fragments[0].contributors()) == 1
