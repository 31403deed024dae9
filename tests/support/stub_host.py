"""A node's conversations with a stub in place of the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.config import WIRE_VERSION, OuterConfig
from diloco.outer.digest import digest_of
from diloco.outer.fragments import partition
from diloco.outer.local import Local
from diloco.outer.replica import Replica
from diloco.protocol.actions import Action, Hold, Merge, Release, Renumber
from diloco.protocol.messages.bulk import StateHeader
from diloco.protocol.messages.control import Claim, Hello, Status
from diloco.protocol.peer import Peer
from diloco.protocol.shares import Share
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import FragmentState, UpdateRecord
from diloco.swarm.conversations.units import UnitSupply
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.node.merging import Merging
from diloco.swarm.node.own_tokens import OwnTokens
from diloco.swarm.node.rounds import Rounds
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.gate import Gate
from tests.support.certificates import MANIFEST, Keys, line_of, record_of
from tests.support.coroutines import PATIENCE_S
from tests.support.stub_device import LazyDevice

ME, OTHER = "me", "other"
Answers = dict[int, Sequence[UpdateRecord] | FragmentState | Exception]


class StubFetcher:
    """Answers each fetch with what the test put there, by the version that the asker has."""

    def __init__(self) -> None:
        self.answers: Answers = {}
        self.asked: list[int] = []
        self.donors: list[str] = []

    async def fetch(
        self, donor: str, fragment: int, have: int, dishonest: set[str]
    ) -> Sequence[UpdateRecord] | FragmentState:
        self.asked.append(have)
        self.donors.append(donor)
        answer = self.answers[have]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def further_donors(self, fragment: int) -> list[str]:
        return []


class NoNetwork:
    """A transport by which nobody can be reached; says who was called."""

    def __init__(self) -> None:
        self.me, self.seeds, self.called = ME, list[str](), list[str]()

    async def open(self, peer: str, protocol: str) -> Any:
        self.called.append(peer)
        raise ConnectionError(f"{peer} cannot be reached")


class StubHost:
    """The components of a node without a network. `me` or `other` holds its fragments, one if nothing else is said.

    With a device the parameters are as if they were there.
    """

    def __init__(
        self, holder: str, numel: int = 6, saved: Saved | None = None, device: LazyDevice | None = None, **outer: Any
    ) -> None:
        self.parameters = {"w": torch.arange(float(numel))}
        fragments = partition({"w": numel}, outer.get("fragments", 1))
        exact = {"lr": 1.0, "momentum": 0.0, "momentum_warmup": 0, "codec_up": "fp32", "codec_down": "fp32"}
        settings = OuterConfig.parse({"method": "diloco", "sync_every": 1, **exact, **outer})
        local = Local(self.parameters) if device is None else device.local(self.parameters)
        self.replica = Replica(local, fragments, settings)
        self.protocol = Peer(ME, ME, "run", MANIFEST, self.replica.digests(), outer=settings, signer=Keys(ME))
        self.notes: list[str] = []
        self.context = Context(
            self.protocol, self.replica, NoNetwork(), "{}", Gate(),  # type: ignore[arg-type]
            on_event=lambda kind, fields: self.notes.append(kind),
        )  # fmt: skip
        self.own_tokens = OwnTokens(saved.applied if saved else None)
        self.anchors = Anchors(self.context, self.own_tokens)
        self.client = self.anchors.fetcher = StubFetcher()  # type: ignore[assignment]
        self.rounds = Rounds(self.context, self.anchors, UnitSupply(self.context))
        self.merging = Merging(self.context, self.anchors)
        self.context.carry_out = self.carry_out
        self.context.now = self.now  # type: ignore[method-assign]
        if holder == OTHER:
            self.join(claims=True)
        else:
            self.do(self.protocol.tick(self.now()))

    def hello(self, claims: bool) -> Hello:
        digests = self.protocol.digests
        every = [Claim(fragment=one, term=1, version=0, digest=digest) for one, digest in enumerate(digests)]
        status = Status(state="training", versions=[0] * len(every), target_steps=1, steps_per_s=1.0)
        return Hello(
            wire_version=WIRE_VERSION, run_id="run", manifest_hash=MANIFEST, name=OTHER, trains=True, holds=True,
            peers=[], status=status, claims=every if claims else [],
        )  # fmt: skip

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Hold():
                    self.replica.hold(action.fragment)
                case Release():
                    self.replica.release(action.fragment)
                case Merge():
                    self.context.tasks.spawn(self.merging.merge(action.close))
                case Renumber():
                    self.context.tasks.spawn(self.anchors.renumber(action.fragment, action.above))

    def do(self, actions: list[Action]) -> None:
        self.context.do(actions)

    def join(self, peer: str = OTHER, claims: bool = False) -> None:
        """A member that trains, and that is the syncer if it `claims` to be."""
        self.do(self.protocol.connected(peer, self.hello(claims), self.now()))

    def claimed(self, version: int, anchor: Tensor) -> None:
        """The other peer is syncer under a newer term, at this anchor: it was cut off until now."""
        claim = Claim(fragment=0, term=2, version=version, digest=digest_of(anchor))
        self.do(self.protocol.heard(OTHER, claim, self.now()))

    async def catch_up(self, answers: Answers) -> None:
        """Fetch what is newer from the other peer, which answers so."""
        self.client.answers = answers
        await self.anchors.catch_up(0, [OTHER])

    async def learn(self) -> None:
        """Load the anchors, and take a step from them that takes 1 from each parameter."""
        await self.anchors.load()
        self.parameters["w"].sub_(1.0)

    async def exchange(self) -> tuple[int, int]:
        """Discarded tokens of an exchange, and the version that it led to."""
        await self.rounds.send({0: (1, 10)})
        await self.context.tasks.until(lambda: self.rounds.arrived([0]))
        discarded, _ = self.rounds.take([0])
        return discarded, self.protocol.versions[0]

    def state(self, version: int, anchor: Tensor, skipped: int = 0, **shares: Share) -> FragmentState:
        """The anchor as a donor would send it, made of contributions of the other peer if nothing else is said."""
        digest = digest_of(anchor)
        shares = shares or ({OTHER: Share(version, 10 * version, 1, version)} if version else {})
        said = {"shares": shares, "author": OTHER, "skipped": skipped}
        record = record_of(version, "f" * 64, digest, {}, **said) if version else None
        lines = [line_of(peer, share.last_version - 1, "f" * 64, share.tokens) for peer, share in shares.items()]
        header = StateHeader(fragment=0, digest=digest, record=record, shares=shares, lines=lines)
        return FragmentState(header, anchor, donor=OTHER)

    def record(self, version: int, anchor: Tensor, before: str | None = None) -> UpdateRecord:
        """An update to an anchor; with the float codecs it carries the values themselves."""
        update = torch.empty(self.replica.update_nbytes(0), dtype=torch.uint8)
        self.replica.down.encode_update(anchor, self.replica.anchors[0], update)
        before = before or self.protocol.digests[0]
        given = version - self.protocol.versions[0] - 1  # in the versions between
        shares = {OTHER: Share(given, 10 * given, 1, version - 1)} if given > 0 else self.protocol.fragments[0].shares
        header = record_of(version, before, digest_of(anchor), {OTHER: 10}, shares=shares, author=OTHER)
        return UpdateRecord(header, update)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
