"""Work units: ranges of the run's sequences, which the control fragment's syncer leases to the peers that train.

1. Peer: request, with how many sequences it wants and which ones it still has. Syncer: grant, or a refusal.
2. The training loop takes sequences out of `LeasedData`, trains on them, and names them in its contribution.
"""

from __future__ import annotations

import logging
import threading

from diloco.errors import PayloadError
from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.protocol.ledger import Units, count, difference, first, union
from diloco.protocol.messages import expect
from diloco.protocol.messages.base import MAX_RANGES, MAX_UNIT_RANGES
from diloco.protocol.messages.bulk import MAX_UNITS_WANTED, UnitGrant, UnitRequest
from diloco.swarm.conversations.context import Context
from diloco.swarm.wire.streams import BROKEN, Stream

__all__ = ["LeasedData", "UnitSupply", "answer"]

logger = logging.getLogger(__name__)

ROUNDS_AHEAD = 2  # the data must last until a successor answers when a syncer dies


async def answer(context: Context, stream: Stream, request: UnitRequest) -> None:
    """Lease units to a member of this run."""
    granted = None
    if request.manifest_hash == context.protocol.manifest_hash:
        granted = context.protocol.accounts.lease_units(stream.peer, request.wanted, request.has)
    if granted is None:  # no event: right after a takeover, peers ask the wrong one once
        await stream.refuse("no units for this peer here")
        return
    await stream.send(UnitGrant(units=[list(unit) for unit in granted[:MAX_RANGES]]))


class UnitSupply:
    """Keeps a node's `LeasedData` filled. There is one request at a time; one that fails is made again later."""

    def __init__(self, context: Context) -> None:
        self.data = LeasedData()
        self.asking = False
        self._context = context

    def refill(self) -> None:
        """Ask for more when the data runs short."""
        if self.data.missing and not self.asking and not self._context.tasks.closed:
            self.asking = True
            self._context.tasks.spawn(self._refill())

    def settled(self, units: Units) -> None:
        """The contribution from these units is in the model, or discarded: either way they are this peer's no more."""
        self.data.drop(units)
        self._tell()

    def _tell(self) -> None:
        context = self._context
        context.do(context.protocol.has_units(self.data.all, context.now()))

    async def _refill(self) -> None:
        context, protocol = self._context, self._context.protocol
        lease = protocol.leases.get(CONTROL_FRAGMENT)
        wanted, has = min(self.data.missing, MAX_UNITS_WANTED), self.data.all[:MAX_UNIT_RANGES]
        try:
            if lease is None or not wanted:
                return
            if lease.holder == protocol.me:
                granted = protocol.accounts.lease_units(protocol.me, wanted, has) or []
            else:
                async with context.open(lease.holder) as stream:
                    units = [list(unit) for unit in has]
                    await stream.send(UnitRequest(manifest_hash=protocol.manifest_hash, wanted=wanted, has=units))
                    granted = union(expect(await stream.receive(), UnitGrant).units)
                if count(granted) > wanted:
                    raise PayloadError(f"asked for {wanted} sequences, got {count(granted)}")
            self.data.add(granted)
            self._tell()
        except (*BROKEN, PayloadError) as error:
            logger.debug("no units were leased to this peer: %r", error)
        finally:
            self.asking = False
            context.tasks.notify()


class LeasedData:
    """Leased sequences in three heaps: not trained on yet, trained on, and sent in a contribution.

    Called from the training loop and from the node beside it. When nothing is left, `take` returns None and the
    training loop takes data of its own order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead: Units = []
        self._used: Units = []
        self._sent: Units = []
        self._wanted = 0

    @property
    def all(self) -> Units:
        """Everything that this peer has and that is not in the model yet."""
        with self._lock:
            return union(self._ahead, self._used, self._sent)

    @property
    def missing(self) -> int:
        """Sequences to ask for; 0 where the training loop takes none, or enough are there."""
        with self._lock:
            ahead = count(self._ahead)
            return self._wanted - ahead if 2 * ahead <= self._wanted else 0

    def expect(self, sequences_per_round: int) -> None:
        """The training loop is going to take that many in a round."""
        with self._lock:
            self._wanted = ROUNDS_AHEAD * sequences_per_round

    def add(self, granted: Units) -> None:
        """Take in what the syncer leased, as far as it can be listed in a status; the rest goes to other peers."""
        with self._lock:
            has = union(self._ahead, self._used, self._sent)
            for unit in granted:
                has = union(has, [unit])
                if len(has) > MAX_UNIT_RANGES:
                    return
                self._ahead = union(self._ahead, [unit])

    def take(self, number: int) -> Units | None:
        """The next sequences to train on; None when there are not enough."""
        with self._lock:
            taken = first(self._ahead, number)
            if count(taken) < number:
                return None
            self._ahead = difference(self._ahead, taken)
            self._used = union(self._used, taken)
            return taken

    def ahead(self, number: int) -> Units:
        """Up to `number` sequences that would be taken next, as it looks now."""
        with self._lock:
            return first(self._ahead, number)

    def send(self) -> Units:
        """What a contribution that is made now was learned from: everything trained on and not settled yet."""
        with self._lock:
            self._sent, self._used = union(self._sent, self._used), []
            return list(self._sent)

    def drop(self, units: Units) -> None:
        """These were sent, and are not this peer's any more."""
        with self._lock:
            self._sent = difference(self._sent, units)
