"""A fragment's anchor, from a peer that has it to one that is behind.

1. Newcomer: state request, with the version that it has. Donor: the update records that are missing, if it has them
   and they are smaller than the state; otherwise the state, which is the anchor (`parts.AnchorDonor`).
2. An anchor of more than one part is only listed, and comes in parts from several donors at a time (see `parts`).
3. What was published meanwhile is fetched as the records that are missing, once the anchor is adopted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from diloco.errors import PayloadError
from diloco.outer.digest import fragment_digest, part_digests, part_ranges
from diloco.protocol.messages import expect
from diloco.protocol.messages.bulk import MAX_PARTS, PartList, StateHeader, StateRequest
from diloco.protocol.messages.heads import Record
from diloco.swarm.conversations import framing
from diloco.swarm.conversations.certificates import check_anchor, check_record
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.parts import Download, PartialAnchor, announcing
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.wire.streams import Stream

__all__ = ["AnchorFetcher"]

KEEP_S = 60.0  # many heartbeats: a peer that still wants the fragment has begun the next attempt by then


class AnchorFetcher:
    """The newcomer's side. What arrived in an attempt that broke off is kept for the next one, for a while."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.unfinished: dict[int, PartialAnchor] = {}  # by fragment

    def further_donors(self, fragment: int) -> list[str]:
        """Peers that announce the version that the fragment's syncer published last, should it not answer itself."""
        protocol = self._context.protocol
        lease = protocol.leases.get(fragment)
        if lease is None or lease.holder == protocol.me:
            return []
        return announcing(self._context, fragment, lease.version)

    async def fetch(
        self, donor: str, fragment: int, have: int, dishonest_donors: set[str]
    ) -> Sequence[framing.UpdateRecord] | framing.FragmentState:
        """Get the records that are missing after version `have` from a donor, otherwise the state.

        Raises `PayloadError` or what is in `BROKEN` when nothing came of it.

        Args:
            have: -1 asks for the state.
            dishonest_donors: peers that are asked for no parts. A donor that sends what its header or the list of
                parts does not name is added, and becomes the event `lying_donor`.
        """
        context, replica = self._context, self._context.replica
        in_parts = 1 < len(part_ranges(replica.fragments[fragment].numel)) <= MAX_PARTS
        request = StateRequest(
            manifest_hash=context.protocol.manifest_hash,
            fragment=fragment,
            have_version=have,
            in_parts=in_parts,
        )
        async with context.open(donor) as stream:
            await stream.send(request)
            answer = await stream.receive()
            if isinstance(answer, Record):
                return await framing.receive_records(
                    stream, replica, fragment, answer, lambda record: check_record(context.protocol, record, donor)
                )
            try:
                if isinstance(answer, PartList) and in_parts:
                    return await self._download(donor, stream, fragment, answer, dishonest_donors)
                return await framing.receive_state(
                    stream, replica, fragment, expect(answer, StateHeader),
                    lambda header: check_anchor(context.protocol, header, donor),
                )  # fmt: skip
            except framing.WrongDigestError:
                dishonest_donors.add(donor)
                context.note("lying_donor", peer=donor, fragment=fragment)
                raise

    async def _download(
        self, donor: str, stream: Stream, fragment: int, listed: PartList, dishonest_donors: set[str]
    ) -> framing.FragmentState:
        count = len(part_ranges(self._context.replica.fragments[fragment].numel))
        if (listed.fragment, len(listed.parts)) != (fragment, count):
            raise PayloadError(
                f"asked for the {count} parts of fragment {fragment}, got {len(listed.parts)} of fragment "
                f"{listed.fragment}"
            )
        check_anchor(self._context.protocol, listed, donor)
        if fragment_digest(listed.parts) != listed.digest:
            raise framing.WrongDigestError(f"the parts of fragment {fragment} have another digest than the whole")
        download = Download(self._context, donor, stream, listed, await self._here_already(listed), dishonest_donors)
        try:
            return await download.run()
        except BaseException:
            self._keep(fragment, download.partial)
            raise

    async def _here_already(self, listed: PartList) -> PartialAnchor:
        """What an earlier attempt left; otherwise a copy of the anchor here if it is of that version, for most of it is
        right then, or if it is that anchor under another number.

        An update leaves hardly any part as it was, so an anchor of another version is not worth its digests.
        """
        context, fragment = self._context, listed.fragment
        unfinished = self.unfinished.pop(fragment, None)
        if unfinished is not None:
            return unfinished
        here = context.protocol.fragments[fragment]
        if here.version != listed.version and here.digest != listed.digest:
            return PartialAnchor(torch.empty(context.replica.fragments[fragment].numel, dtype=torch.float32), [])
        async with context.locks[fragment].reading():
            anchor = await in_thread(context.replica.anchors[fragment].clone)
        return PartialAnchor(anchor, list(await in_thread(part_digests, anchor)))

    def _keep(self, fragment: int, partial: PartialAnchor) -> None:
        self.unfinished[fragment] = partial

        def forget() -> None:
            if self.unfinished.get(fragment) is partial:
                del self.unfinished[fragment]

        asyncio.get_running_loop().call_later(KEEP_S, forget)
