"""The attacker: production nodes that are bent at named places, and streams on which anything can be said.

What it bends is its own side only. It knows the code, its own tensors and what everybody says; for payloads it may also
know what the honest peers have learned, which is more than a real attacker knows.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.digest import digest_of
from diloco.outer.held import Held
from diloco.outer.merkle import payload_root
from diloco.outer.replica import Replica
from diloco.protocol.fragment import CONTROL_FRAGMENT, Fragment, Lease
from diloco.protocol.heads import lines_digest, shares_digest, sign_head, sign_line
from diloco.protocol.messages import Message
from diloco.protocol.messages.bulk import Contribution, StateRequest
from diloco.protocol.messages.control import Claim, Status
from diloco.protocol.messages.heads import Head, Line, Record
from diloco.protocol.shares import Share, Shares
from diloco.swarm.conversations import contribution, framing
from diloco.swarm.conversations.framing import FragmentState, UpdateRecord
from diloco.swarm.conversations.parts import copy_state
from diloco.swarm.node.node import Node
from diloco.swarm.wire.streams import BULK, Stream, Traffic
from diloco.testing.attacks.arena import Arena

__all__ = ["Attacker", "bend"]

Handler = Callable[[Stream, Any], Awaitable[None]]


def bend(thing: object, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of a method in its place."""
    setattr(thing, name, make(getattr(thing, name)))


def pseudo_gradient(replica: Replica, fragment: int, chunk: int) -> Tensor:
    """One chunk of what a peer has learned since its anchor."""
    [delta] = (each.clone() for each in replica._deltas(replica._local[fragment], [replica.chunks[fragment][chunk]]))
    return delta


class Attacker:
    """One or more of the peers of an arena, of which the first one acts.

    Attributes:
        me: its id. others: ids of its accomplices. index: the fragment that is attacked.
    """

    def __init__(self, arena: Arena, names: list[str], index: int = 0) -> None:
        self.arena, self.loop, self.index = arena, arena.loop, index
        self.me, self.others = (names[0], names[1:]) if names else ("", [])
        self.traffic = Traffic()
        self._merged = 0  # tokens of what was contributed by `contribute`

    @property
    def node(self) -> Node:
        """Its node; a stranger and nobody have none."""
        node = self.arena.lives[self.me].node
        assert node is not None
        return node

    @property
    def fragment(self) -> Fragment:
        """The fragment that is attacked, as its node knows it."""
        return self.node.protocol.fragments[self.index]

    @property
    def anchor(self) -> Tensor:
        """Its own anchor of that fragment, which is right as long as it attacks otherwise."""
        return self.node.replica.anchors[self.index]

    @property
    def lease(self) -> Lease:
        """Who holds the fragment, as its node believes."""
        lease = self.node.protocol.leases.get(self.index)
        assert lease is not None
        return lease

    def honest(self) -> list[str]:
        """Ids of the honest peers that live."""
        return [life.name for life in self.arena.honest() if not life.ended]

    def accomplice(self, number: int) -> Attacker:
        """The attacker as another of its peers."""
        return Attacker(self.arena, [self.others[number]])

    def measure(self, **figures: float) -> None:
        """Note figures for the verdict."""
        self.arena.measured |= figures

    # -- control streams ----------------------------------------------------------------------------------------------

    def say(self, message: Message) -> None:
        """Say something to everybody, as if it were true."""
        self.node._mesh.broadcast(message)

    def tell(self, peer: str, message: Message) -> None:
        """Say something to one peer."""
        self.node._mesh._outgoing[peer].say(message)

    def status(self, bent: Callable[[Status], dict[str, Any]]) -> None:
        """From now on every status has these fields."""

        def lie(status: Callable[..., Status]) -> Callable[..., Status]:
            def said(figures: bool = False) -> Status:
                true = status(figures)
                return true.model_copy(update=bent(true))

            return said

        bend(self.node.protocol, "status", lie)
        self.say(self.node.protocol.status())

    def says_version(self, version: Callable[[], int]) -> None:
        """From now on every status says that it has this version of the fragment."""
        at = self.index
        self.status(lambda true: {"versions": [*true.versions[:at], version(), *true.versions[at + 1 :]]})

    def claim(self, **fields: Any) -> Claim:
        """A claim on the fragment with the next term, and what else is wanted."""
        lease = self.lease
        claim = self.node.protocol.claim_of(replace(lease, term=lease.term + 1))
        return claim.model_copy(update={"version": lease.version, "digest": lease.digest, **fields})

    def takes(self) -> None:
        """Take the fragment from whoever holds it, and be its syncer from now on."""
        protocol = self.node.protocol
        protocol.leases.vacate(self.index)
        self.node.context.do(protocol._take(self.fragment, self.node.context.now()))

    # -- bulk streams -------------------------------------------------------------------------------------------------

    def answers(self, kind: type[Message], handler: Handler) -> Handler:
        """Answer these requests in another way; returns the honest way."""
        answers = self.node._server._answers
        honest = answers[kind]
        answers[kind] = handler
        return honest

    @asynccontextmanager
    async def stream(self, peer: str, protocol: str = BULK) -> AsyncIterator[Stream]:
        """A stream to a peer, for the length of an `async with`. A stranger has a transport of its own."""
        network = self.arena.network
        if self.me not in self.arena.lives and self.me not in network._transports:
            network.join(self.me, [])
        reader, writer = await network.open(self.me, peer, protocol)
        stream = Stream(peer, reader, writer, self.traffic)
        try:
            yield stream
        finally:
            stream.close()

    def certificate(self, version: int, digest: str, before: str, shares: Shares, tokens: int = 1) -> Record:
        """A certificate of a version that the attacker makes alone, signed as it should be."""
        protocol = self.node.protocol
        sign, run, control = protocol.signer, protocol.run_id, self.index == CONTROL_FRAGMENT
        total = shares[self.me].tokens if self.me in shares else tokens
        line = Line(self.me, version - 1, bytes.fromhex(before), 1, tokens, max(total, tokens), 1.0, bytes(32))
        lines = [sign_line(sign, run, self.index, line)]
        head = Head(
            fragment=self.index, term=self.lease.term, version=1, author=self.me, digest_before=before, digest=digest,
            lines=lines_digest(lines), shares=shares_digest(shares), state=bytes(32),
        )  # fmt: skip
        clock = sum(share.tokens for share in shares.values()) if control else 0
        head = head.model_copy(update={"version": version, "applied_tokens": clock})
        return Record(head=sign_head(sign, run, head), lines=[]).model_copy(update={"lines": lines})

    def serves(self, anchor: Tensor, version: int, shares: Shares | None = None) -> None:
        """Give this anchor to whoever asks for the fragment, as that version, with a certificate of the attacker's."""

        async def serve(stream: Stream, request: StateRequest) -> None:
            if request.fragment != self.index:
                return await honest(stream, request)
            state = await copy_state(self.node.context, request.fragment)
            said = state.header.shares if shares is None else shares
            record = self.certificate(version, digest_of(anchor), self.fragment.digest, said)
            named = {"digest": digest_of(anchor), "record": record, "shares": said}
            header = state.header.model_copy(update=named)
            await framing.send_state(stream, FragmentState(header, anchor), self.node.replica)

        honest = self.answers(StateRequest, serve)

    def shares(self, tokens: int, version: int) -> dict[str, Share]:
        """Shares that give it so many tokens."""
        return {**self.node.protocol.accounts.shares(self.index), self.me: Share(1, tokens, 1, version)}

    # -- as contributor -----------------------------------------------------------------------------------------------

    def sends(
        self, lie: Callable[[Tensor, int, int], Tensor], garble: Callable[[Tensor], object] | None = None
    ) -> None:
        """Contribute what `lie` makes of each chunk (values, fragment, chunk), and spoil its bytes in place."""
        replica = self.node.replica

        def encode(fragment: int, chunk: int) -> Tensor:
            honest = pseudo_gradient(replica, fragment, chunk)
            payload = torch.empty(replica.payload_nbytes(fragment, chunk), dtype=torch.uint8)
            replica.up.encode(lie(honest, fragment, chunk), payload)
            if garble is not None:
                garble(payload)
            return payload

        def values(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def any_values(payload: Tensor, numel: int) -> Tensor:
                try:
                    return honest(payload, numel)
                except PayloadError:
                    return torch.ones(numel)  # what it signs about them is no matter

            return any_values

        bend(replica, "encode", lambda _: encode)
        replica.up = copy.copy(replica.up)
        bend(replica.up, "values", values)

    def learned(self, fragment: int, chunk: int) -> list[Tensor]:
        """The same chunk of what each honest peer that trains has learned since its anchor."""
        lives = [life for life in self.arena.trainers() if life.node is not None and not life.ended]
        replicas = [life.node.replica for life in lives if life.node is not None]
        return [pseudo_gradient(each, fragment, chunk) for each in replicas]

    def counts(self, steps: int, tokens: int) -> None:
        """Claim so many times the inner steps and tokens of each round."""

        def scaled(send: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
            return lambda counts: send({one: (s * steps, t * tokens) for one, (s, t) in counts.items()})

        bend(self.node.rounds, "send", scaled)

    async def contribute(self, **fields: Any) -> contribution.Answered:
        """Contribute to the next version of the fragment, whatever was learned."""
        lease, steps = self.lease, self.node.replica.settings.sync_every
        header = Contribution(
            manifest_hash=self.node.protocol.manifest_hash,
            fragment=self.index,
            term=lease.term,
            base_version=lease.version,
            base_digest=lease.digest,
            steps=steps,
            tokens=8 * steps,
        )
        header = header.model_copy(update=fields)
        had = self.fragment.shares.get(self.me)
        self._merged = max(self._merged, 0 if had is None else had.tokens)
        header = header.model_copy(update={"total": self._merged + header.tokens})
        answered = await contribution.contribute(self.node.context, lease, header)
        self._merged += header.tokens * answered.verdict.accepted
        return answered

    # -- as syncer ----------------------------------------------------------------------------------------------------

    def publishes(self, add: Callable[[Tensor], object]) -> None:
        """Change the master of the fragment before each version is made of it."""

        def merges(held: Held) -> None:
            def bent(merge_: Callable[..., str]) -> Callable[..., str]:
                def merge(*arguments: Any) -> str:
                    add(held.master)
                    return merge_(*arguments)

                return merge

            bend(held, "merge_", bent)

        merges(self.node.replica.held[self.index])

    def has_two_faces(self, peers: list[str], add: float) -> None:
        """Publish one history of the fragment to these peers and another one to the rest.

        The other one differs by `add` at every value, and each version of it follows from the one before.
        """
        context, protocol = self.node.context, self.node.protocol
        face = self.anchor.clone()
        records: list[UpdateRecord] = []
        names: dict[str, str] = {}  # digest of a version -> that of its other face

        def keep(keep_record: Callable[[UpdateRecord], None]) -> Callable[[UpdateRecord], None]:
            def kept(record: UpdateRecord) -> None:
                if record.header.fragment != self.index:
                    return keep_record(record)
                before, update = digest_of(face), record.update
                if not records:
                    update = torch.empty_like(record.update)
                    self.encode(self.anchor + add, face, update)
                self.apply(face, update)
                said = {"digest_before": before, "digest": digest_of(face), "update": self.root(update)}
                head = record.header.head.model_copy(update=said)
                head = sign_head(protocol.signer, protocol.run_id, head)
                header = record.header.model_copy(update={"head": head})
                records.append(UpdateRecord(header, update))
                names[record.header.digest] = header.digest
                keep_record(record)

            return kept

        bend(context, "keep_record", keep)
        other = copy.copy(context)
        other.records_since = (  # type: ignore[method-assign]
            lambda fragment, version: [record for record in records if record.header.version > version]
        )

        async def answer(stream: Stream, request: Contribution) -> None:
            there = stream.peer in peers and request.fragment == self.index
            if there and names:
                request = request.model_copy(update={"base_digest": self.fragment.digest})
            await contribution.answer(other if there else context, stream, request, self.node._server.anchors.freeze)

        self.answers(Contribution, answer)

        def broadcast(_: Callable[[Message], None]) -> Callable[[Message], None]:
            def says(message: Message) -> None:
                digest = getattr(message, "digest", "")
                for peer in list(self.node._mesh._outgoing):
                    bent = peer in peers and digest in names
                    self.tell(peer, message.model_copy(update={"digest": names[digest]}) if bent else message)

            return says

        bend(self.node._mesh, "broadcast", broadcast)

    def encode(self, master: Tensor, anchor: Tensor, update: Tensor) -> None:
        """Fill the update that moves an anchor towards a master."""
        replica, local = self.node.replica, self.node.replica._local[self.index]
        for (start, stop), (at, end) in zip(replica.chunks[self.index], pairwise(local.update_at), strict=True):
            replica.down.encode_update(master[start:stop].clone(), anchor[start:stop].clone(), update[at:end])

    def apply(self, anchor: Tensor, update: Tensor) -> None:
        """Move an anchor by an update."""
        replica, local = self.node.replica, self.node.replica._local[self.index]
        for (start, stop), (at, end) in zip(replica.chunks[self.index], pairwise(local.update_at), strict=True):
            replica.down.apply_update_(anchor[start:stop], update[at:end])

    def root(self, update: Tensor) -> bytes:
        """What a head has to name for this update."""
        replica, local = self.node.replica, self.node.replica._local[self.index]
        cut = [update[at:end] for at, end in pairwise(local.update_at)]
        return payload_root(cut, replica.down, self.anchor.numel())

    # -- the network --------------------------------------------------------------------------------------------------

    def cut(self, one: str, others: list[str]) -> None:
        """Silence between one peer and these."""
        for other in others:
            self.arena.network.cut(one, other)

    def mend(self, one: str, others: list[str]) -> None:
        """What was cut goes on."""
        for other in others:
            self.arena.network.mend(one, other)

    async def until(self, condition: Callable[[], bool], patience_s: float = 120.0) -> None:
        """Wait for something."""
        deadline = self.loop.seconds + patience_s
        while not condition() and self.loop.seconds < deadline:
            await asyncio.sleep(0.1)
