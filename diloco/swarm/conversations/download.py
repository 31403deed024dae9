"""How a peer that is too far behind gets a fragment's anchor: in parts, from several donors at a time.

1. One donor is asked for the record that is missing here. It has it, or the anchor is a single part: that is all.
2. Else it sends the digests of the anchor's parts. They are believed if together they give the digest that the syncer
   published. Parts of a download that broke off, or of an anchor here that is merely wrong, are kept if they fit.
3. Up to MAX_DONORS peers that announce this version are asked for a part each, then for the next; each part is checked
   as it arrives. `PartPlan` decides who is asked for what.
4. A donor that vanishes gives its part back; one that sends anything else is noted, and asked for nothing more.
5. When no donor is left (the swarm has moved on), what has arrived is kept for the next attempt, which begins at 1.
   What was published meanwhile is fetched as the record that is missing, once the anchor is adopted.

Memory: one fp32 vector of the fragment, into which the parts are received.
"""

from __future__ import annotations

import asyncio
import traceback

import torch

from diloco.errors import PayloadError
from diloco.outer.digest import fragment_digest, part_digest, part_digests, part_ranges
from diloco.protocol.download import PartPlan
from diloco.protocol.messages.bulk import PartList, StateHeader
from diloco.protocol.rendezvous import score
from diloco.swarm.conversations.answer import Host
from diloco.swarm.conversations.bulk import BulkClient, FetchedRecord, FetchedState, Offer, Unfinished
from diloco.swarm.wire.streams import BROKEN, Stream

__all__ = ["fetch", "further_donors"]

RECRUIT_S = 1.0  # a newcomer hears of its first donor before it hears of the others
KEEP_S = 60.0  # many heartbeats: who still wants the fragment has begun the next attempt by then


def further_donors(host: Host, fragment: int) -> list[str]:
    """Peers that announce the version that the fragment's syncer published last, should it not answer."""
    lease = host.protocol.leases.get(fragment)
    return [] if lease is None or lease.holder == host.protocol.me else _announcing(host, fragment, lease.version)


async def fetch(
    host: Host, client: BulkClient, donor: str, fragment: int, have: int, outer: bool, liars: set[str]
) -> FetchedRecord | FetchedState:
    """Get the record that is missing after version `have` from a donor, else the state, checked.

    With `outer` the donor's master and momentum come too, and all of it from this donor alone. Donors that lie are
    noted as `lying_donor` and added to `liars`, of whom nobody is asked for parts.

    Raises:
        PayloadError, or what is in `BROKEN`: nothing came of it. What has arrived is kept for the next attempt.
    """
    fetched = await client.fetch(donor, fragment, have, outer)
    if isinstance(fetched, FetchedRecord):
        return fetched
    if isinstance(fetched, FetchedState):
        _check_published(host, donor, fetched.header)
        digest = await asyncio.to_thread(host.replica.digest_of, fetched.anchor)
        if digest != fetched.header.digest:
            liars.add(donor)
            host.note("lying_donor", peer=donor, fragment=fragment)
            raise PayloadError(f"the state of fragment {fragment} has another digest than its header")
        return FetchedState(fetched.header, fetched.anchor, fetched.master, fetched.momentum, verified=True)
    try:
        _check_list(host, donor, fragment, fetched.list)
        if fragment_digest(fetched.list.parts) != fetched.list.digest:
            liars.add(donor)
            host.note("lying_donor", peer=donor, fragment=fragment)
            raise PayloadError(f"the parts of fragment {fragment} have another digest than the whole")
        download = _Download(host, client, donor, fetched, await _begin(host, client, fetched.list), liars)
    except BaseException:
        fetched.stream.close()
        raise
    return await download.run()


def _check_published(host: Host, donor: str, header: StateHeader | PartList) -> None:
    """Only the syncer says what an anchor is. Where there is no other than this peer, the donor is believed."""
    lease = host.protocol.leases.get(header.fragment)
    if lease is None or lease.holder in (donor, host.protocol.me):
        return
    if (header.version, header.digest) != (lease.version, lease.digest):
        raise PayloadError(
            f"version {header.version} of fragment {header.fragment} is not as its syncer published version "
            f"{lease.version} last"
        )


def _check_list(host: Host, donor: str, fragment: int, listed: PartList) -> None:
    count = len(part_ranges(host.replica.fragments[fragment].numel))
    if (listed.fragment, len(listed.parts)) != (fragment, count):
        raise PayloadError(
            f"asked for the {count} parts of fragment {fragment}, got {len(listed.parts)} of fragment {listed.fragment}"
        )
    _check_published(host, donor, listed)


def _announcing(host: Host, fragment: int, version: int) -> list[str]:
    """Peers with this version that stay, in an order that is another one for every peer that asks."""
    able = [
        member.peer
        for member in host.protocol.members.all()
        if member.status.versions[fragment] == version and member.status.state != "leaving"
    ]
    return sorted(able, key=lambda peer: score(f"{host.protocol.me} {peer}", fragment))


async def _begin(host: Host, client: BulkClient, listed: PartList) -> Unfinished:
    """What an earlier attempt left, else a copy of the anchor here if it is of that version: most of it is right then.

    An update leaves hardly any part as it was, so that of another version is not worth its digests.
    """
    fragment = listed.fragment
    unfinished = client.unfinished.pop(fragment, None)
    if unfinished is not None:
        return unfinished
    if host.protocol.versions[fragment] != listed.version:
        return Unfinished(torch.empty(host.replica.fragments[fragment].numel), [])
    async with host.rounds.moving(fragment):
        anchor = await asyncio.to_thread(host.replica.anchors[fragment].clone)
    return Unfinished(anchor, list(await asyncio.to_thread(part_digests, anchor)))


class _Download:
    """One anchor on its way, in tasks of one donor each.

    A donor that fails is an event (`fetch_failed`, `refused`, `lying_donor`); `run` raises only when none is left.
    """

    def __init__(
        self, host: Host, client: BulkClient, donor: str, offer: Offer, unfinished: Unfinished, liars: set[str]
    ) -> None:
        self._host, self._client, self._first, self._liars = host, client, donor, liars
        self._list = offer.list
        self._streams = {donor: offer.stream}
        self._anchor = unfinished.anchor  # (numel,)
        self._plan = PartPlan(offer.list.parts, unfinished.held)
        self._ranges = part_ranges(self._anchor.numel())

    async def run(self) -> FetchedState:
        """Returns the whole anchor; raises `ConnectionError` when no donor is left that has this version of it."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while not self._plan.complete:
                for donor in self._plan.recruit(self._donors()):
                    tasks.add(asyncio.create_task(self._draw(donor)))
                if not tasks:
                    raise ConnectionError(f"nobody has version {self._list.version} any more")
                await self._host.pause(RECRUIT_S)
                for task in [task for task in tasks if task.done()]:
                    tasks.remove(task)
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            for stream in self._streams.values():
                stream.close()
            if not self._plan.complete:
                self._keep()
        named = self._list.model_dump(exclude={"kind", "parts"})
        return FetchedState(StateHeader(**named, outer=False), self._anchor, None, None, verified=True)

    def _donors(self) -> list[str]:
        able = [self._first, *_announcing(self._host, self._list.fragment, self._list.version)]
        return [donor for donor in able if donor not in self._liars]

    async def _draw(self, donor: str) -> None:
        """Part after part from one donor, until every part is here or the donor fails."""
        plan, stream = self._plan, self._streams.pop(donor, None)
        part: int | None = None
        try:
            stream = stream or await self._client.open(donor)
            while not plan.complete:
                part = plan.next_part(donor)
                if part is None:
                    await self._host.pause(RECRUIT_S)  # another donor may give its part back
                    continue
                digest = await self._receive(stream, part)
                if not plan.arrived(donor, digest):
                    plan.exclude(donor)
                    self._liars.add(donor)
                    self._host.note("lying_donor", peer=donor, fragment=self._list.fragment, part=part)
                    return
                self._host.notify()
        except PayloadError as error:
            plan.exclude(donor)
            self._host.note("refused", peer=donor, fragment=self._list.fragment, part=part, why=str(error))
        except BROKEN as error:
            plan.lost(donor)
            why = str(error) or type(error).__name__
            self._host.note("fetch_failed", fragment=self._list.fragment, donor=donor, why=why)
            traceback.clear_frames(error.__traceback__)  # else it keeps the anchor until the collector comes by
        finally:
            if stream is not None:
                stream.close()
            self._host.notify()

    async def _receive(self, stream: Stream, part: int) -> str:
        start, stop = self._ranges[part]
        values = self._anchor[start:stop]
        await self._client.fetch_part(stream, self._list, part, values)
        return await asyncio.to_thread(part_digest, values)

    def _keep(self) -> None:
        """Leave what is right to the next attempt."""
        kept, fragment = self._client.unfinished, self._list.fragment
        unfinished = kept[fragment] = Unfinished(self._anchor, self._plan.held())

        def forget() -> None:
            if kept.get(fragment) is unfinished:
                del kept[fragment]

        asyncio.get_running_loop().call_later(KEEP_S, forget)
