"""No anchor moves farther than what was contributed allows: each version is checked before it is adopted.

    update -> how far it moves -> as far as its certificate allows?    (`outer.bounds`, by every peer alone)
       no  -> the anchor stays; its author is lost and penalised; the next peer in order takes the fragment (`beyond`)

An update may come from another donor than the author of its certificate. The author answers for it only if it leads to
the digest that the author has signed.
"""

from __future__ import annotations

from typing import NamedTuple

from diloco.errors import PayloadError
from diloco.outer.bounds import Moved, distance, measure
from diloco.outer.digest import digest_of
from diloco.outer.optimizer import OuterStep
from diloco.protocol.actions import Disconnect
from diloco.protocol.beyond import forgive, refuse, refused
from diloco.protocol.fragment import Fragment
from diloco.protocol.messages.heads import Record
from diloco.swarm.conversations.certificates import Unbelieved
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import FragmentState, UpdateRecord
from diloco.swarm.conversations.tasks import in_thread

__all__ = ["Bounds", "Checked", "step_of"]


class Checked(NamedTuple):
    """How far an update moves what it is applied to. `digest` is that after an update that is not to be applied."""

    moved: Moved
    digest: str = ""


def step_of(record: Record) -> OuterStep:
    """The outer step that made a version."""
    return OuterStep(record.version - 1, len(record.lines), record.head.pushes, record.head.delay)


def _lengths(record: Record | None) -> dict[str, float]:
    return {} if record is None else {line.peer: line.norm for line in record.lines}


class Bounds:
    """The bounds of a node's fragments, which are in its replica, and what becomes of whoever goes beyond one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._replica = context.replica
        for fragment in context.protocol.fragments:
            self._begin(fragment.index, fragment.version, fragment.record)

    def _begin(self, fragment: int, version: int, record: Record | None) -> None:
        term = None if record is None else record.head.term
        self._replica.bounds[fragment].restart(version, _lengths(record), term)

    def follow(self, record: Record, moved: Moved) -> None:
        """The fragment is at this version, which moved it so far."""
        self._replica.bounds[record.fragment].follow(step_of(record), _lengths(record), moved, record.head.term)

    async def check(self, update: UpdateRecord) -> Checked:
        """Check an update before the anchor, whose lock is held, moves by it.

        Raises `Unbelieved` for a version that is beyond its bound, and `PayloadError` for an update that is none.
        """
        record = update.header
        if not record.lines:
            raise PayloadError(f"version {record.version} of fragment {record.fragment} moves without a contribution")
        erred = self._erred(record)
        checked, why = await in_thread(self._check, update)
        if erred:
            return Checked(checked.moved)
        if why is not None and checked.digest == record.digest:
            self._refuse(record, why)
        return checked

    def _check(self, update: UpdateRecord) -> tuple[Checked, str | None]:
        record, replica, step = update.header, self._replica, step_of(update.header)
        anchor = replica.anchors[record.fragment]
        moved = measure(replica.settings, update.update, anchor)
        why = replica.bounds[record.fragment].wrong(step, _lengths(record), moved, record.head.term)
        return Checked(moved, "" if why is None else self._digest_after(update)), why

    def _digest_after(self, update: UpdateRecord) -> str:
        """Where an update leads, without moving anything. Takes a copy of the fragment."""
        fragment, down = update.header.fragment, self._replica.down
        after = self._replica.anchors[fragment].clone()
        offsets = down.offsets(len(after))
        for chunk, (start, stop) in enumerate(self._replica.chunks[fragment]):
            down.apply_update_(after[start:stop], update.update[offsets[chunk] : offsets[chunk + 1]])
        return digest_of(after)

    async def adopt(self, state: FragmentState, here: Fragment) -> None:
        """Follow an anchor that is fetched, before it takes the place of the one here, whose lock is held.

        That of the next version is checked by its distance; raises `Unbelieved` as `check` does. The bound of any other
        one begins anew.
        """
        record, replica = state.header.record, self._replica
        if (state.header.version, state.header.digest) == (here.version, here.digest):
            return  # what comes with it is the outer state
        follows = record is not None and (record.version, record.digest_before) == (here.version + 1, here.digest)
        if record is None or self._erred(record) or not follows or not record.lines:
            return self._begin(here.index, state.header.version, record)
        moved = await in_thread(distance, replica.settings, replica.anchors[here.index], state.anchor)
        why = replica.bounds[here.index].wrong(step_of(record), _lengths(record), moved, record.head.term)
        if why is not None:
            self._refuse(record, why)
        self.follow(record, moved)

    def _erred(self, record: Record) -> bool:
        """Whether this peer refused a version that most peers have; its bound begins anew, because it was wrong.

        Raises `Unbelieved` for one that was refused since it was fetched.
        """
        protocol = self._context.protocol
        if (why := refused(protocol, record)) is not None:
            raise Unbelieved(why, 0)
        if not forgive(protocol, record):
            return False
        self._begin(record.fragment, record.version, record)
        return True

    def _refuse(self, record: Record, why: str) -> None:
        """The author of a version that is beyond its bound is an offender, and the fragment is vacant."""
        context, author = self._context, record.head.author
        self._note(record, why)
        refuse(context.protocol, record)
        context.do([Disconnect(author), *context.protocol.lost(author, context.now(), why)])
        context.do(context.protocol.offence(author, why, context.now()))
        raise Unbelieved(why, 0)

    def _note(self, record: Record, why: str) -> None:
        named = {"fragment": record.fragment, "version": record.version, "peer": record.head.author}
        self._context.note("beyond_bounds", **named, why=why)
