"""This peer as backup: it follows the momentum of the fragments that would come to it if their syncers died."""

from __future__ import annotations

import logging

from diloco.errors import PayloadError
from diloco.swarm.conversations.anchor import AnchorFetcher
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import FragmentState
from diloco.swarm.wire.streams import BROKEN

__all__ = ["Backups"]

logger = logging.getLogger(__name__)

STALE_VERSIONS = 4  # a momentum as old as that is fetched anew: it costs three times the fragment in fp32


class Backups:
    """The momentum is fetched once and then follows from the updates. A fetch that fails is tried again later."""

    def __init__(self, context: Context, fetcher: AnchorFetcher) -> None:
        self._context = context
        self._fetcher = fetcher
        self._fetching: set[int] = set()

    def follow(self) -> None:
        """Become backup of what would come to this peer now, and of nothing else."""
        protocol, replica = self._context.protocol, self._context.replica
        if not replica.can_stand_by or protocol.state == "starting":
            return  # a newcomer's link is busy with what it needs to begin
        wanted = protocol.backs_up()
        for fragment in sorted(replica.standby.keys() - wanted):
            del replica.standby[fragment]
        for fragment in sorted(wanted - self._fetching):
            standby = replica.standby.get(fragment)
            if standby is None or protocol.fragments[fragment].version - standby.version >= STALE_VERSIONS:
                self._fetching.add(fragment)
                self._context.tasks.spawn(self._begin(fragment))

    async def _begin(self, fragment: int) -> None:
        protocol, replica = self._context.protocol, self._context.replica
        here, lock = protocol.fragments[fragment], self._context.locks[fragment]
        try:
            async with lock.writing():
                if here.version == 0 and here.syncer is None:
                    replica.stand_by(fragment)
                    return
            lease = protocol.leases.get(fragment)
            if lease is None or lease.holder == protocol.me:
                return
            state = await self._fetcher.fetch(lease.holder, fragment, -1, True, set())
            async with lock.writing():
                if isinstance(state, FragmentState) and state.momentum is not None and here.syncer is None:
                    replica.stand_by(fragment, state.header.version, state.momentum)
        except (*BROKEN, PayloadError) as error:
            logger.debug("fragment %d has no backup here yet: %r", fragment, error)
        finally:
            self._fetching.discard(fragment)
