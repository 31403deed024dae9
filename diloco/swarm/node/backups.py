"""This peer as backup: it follows momentum and window of the fragments that would come to it if their syncers died."""

from __future__ import annotations

import logging
from dataclasses import replace

from diloco.errors import PayloadError
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import FragmentState, intact
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.wire.streams import BROKEN

__all__ = ["Backups"]

logger = logging.getLogger(__name__)

STALE_VERSIONS = 4  # an outer state as old as that is fetched anew: it costs 3 to 4 times the fragment in fp32


class Backups:
    """The outer state is fetched once and then follows from the updates. A fetch that fails is tried again later.

    Where versions do not wait for this peer, it fetches them as they are published: an update that it misses would be
    missing from the outer state. Its anchor then moves while it trains.
    """

    def __init__(self, context: Context, anchors: Anchors) -> None:
        self._context = context
        self._anchors = anchors
        self._keeps_up = context.protocol.trains and context.replica.settings.staleness_limit > 0
        self._fetching: set[int] = set()

    def follow(self) -> None:
        """Become backup of what would come to this peer now, and of nothing else."""
        protocol, replica = self._context.protocol, self._context.replica
        if not replica.can_stand_by or protocol.state == "starting":
            return  # a newcomer's link is busy with what it needs to begin
        wanted = protocol.backs_up()
        for fragment in sorted(replica.standby.keys() - wanted):
            del replica.standby[fragment]
        protocol.followed = set(replica.standby) if self._keeps_up else set()
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
            state = await self._anchors.fetcher.fetch(lease.holder, fragment, -1, True, set())
            if not isinstance(state, FragmentState) or state.outer is None or not await in_thread(intact, state):
                return
            if self._keeps_up and state.header.version > here.version:  # from here on the updates are fetched
                await self._anchors.adopt_state(replace(state, outer=None))
            async with lock.writing():
                if here.syncer is None:
                    replica.stand_by(fragment, state.outer[1])
        except (*BROKEN, PayloadError) as error:
            logger.debug("fragment %d has no backup here yet: %r", fragment, error)
        finally:
            self._fetching.discard(fragment)
