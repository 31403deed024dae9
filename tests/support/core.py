"""One protocol core, and the messages that it is given."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st

from diloco.config import WIRE_VERSION
from diloco.protocol.actions import Action, Broadcast, Note
from diloco.protocol.fragment import LEAP
from diloco.protocol.messages import Message
from diloco.protocol.messages.bulk import Contribution
from diloco.protocol.messages.control import Claim, Hello, Status
from diloco.protocol.numbers import MAX_COUNT
from diloco.protocol.peer import Peer
from diloco.protocol.rendezvous import order
from diloco.protocol.states import State
from tests.support.certificates import MANIFEST, Nobody, digest_of

FRAGMENTS = 2
ME, OTHER = order("ab", 0)  # fragment 0 is mine by rendezvous order
DIGESTS = [digest_of(fragment) for fragment in range(FRAGMENTS)]

A = TypeVar("A", bound=Action)
M = TypeVar("M", bound=Message)

small = st.integers(0, 3)
versions = st.one_of(small, st.sampled_from([2**31, MAX_COUNT // 2, MAX_COUNT]))
terms = st.one_of(st.integers(1, 3), st.sampled_from([LEAP, LEAP + 3, MAX_COUNT]))
digests = st.sampled_from([*DIGESTS, digest_of("x")])
claims = st.builds(Claim, fragment=small, term=terms, version=versions, digest=digests)


def make(me: str = ME, **settings: object) -> Peer:
    return Peer(me, me, "run", MANIFEST, **{"digests": DIGESTS, "signer": Nobody(), **settings})  # type: ignore[arg-type]


def hello_of(status: Status | None = None, claims: list[Claim] | None = None, **fields: object) -> Hello:
    known: dict[str, object] = {"wire_version": WIRE_VERSION, "run_id": "run", "manifest_hash": MANIFEST}
    known |= {"name": "other", "trains": True, "holds": True, "peers": []}
    return Hello(status=status or status_of(), claims=claims or [], **(known | fields))  # type: ignore[arg-type]


def status_of(state: State = "ready", versions: list[int] | None = None, inner_step: int = 0) -> Status:
    return Status(state=state, versions=versions or [0] * FRAGMENTS, inner_step=inner_step)


def claim_of(
    fragment: int, term: int = 1, version: int = 0, digest: str | None = None, applied_tokens: int = 0
) -> Claim:
    known = digest or DIGESTS[fragment]
    return Claim(fragment=fragment, term=term, version=version, digest=known, applied_tokens=applied_tokens)


def contribution_of(base_version: int = 0, **fields: object) -> Contribution:
    known = {"base_digest": "0" * 64, "manifest_hash": MANIFEST, "fragment": 0, "term": 1, "steps": 1, "tokens": 10}
    return Contribution(base_version=base_version, **(known | fields))  # type: ignore[arg-type]


def of_type(kind: type[A], actions: list[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def said(kind: type[M], actions: list[Action]) -> list[M]:
    return [action.message for action in of_type(Broadcast, actions) if isinstance(action.message, kind)]


def notes(actions: list[Action]) -> list[str]:
    return [note.kind for note in of_type(Note, actions)]
