"""A network in memory and in virtual time: links, streams that share them, and failures.

    write -> uplink (pieces, streams take turns) -> latency -> downlink (the same) -> reader

A piece may enter the downlink while its end still leaves the uplink: n bytes alone on a link take
n / min(up, down) + latency seconds, and equal streams get equal parts of a link. Opening a stream
takes a round trip.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from diloco.errors import SwarmError
from diloco.sim.link import PeerLink, piece_bytes
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.wire.gate import GREETING, Gate
from diloco.swarm.wire.streams import CONTROL
from diloco.swarm.wire.transport import ByteReader, ByteWriter, Handler

BACKLOG_BYTES = 256 * 1024  # what a stream holds before its writer has to wait
UNANSWERED_S = 30.0  # how long a call across a cut lasts
HEAD_BYTES = 4  # of a frame: its length
# which write of both sides breaks a doomed stream; the second is an answer, or begins a payload
DOOMED_WRITES = (1, 5)


@dataclass
class _Piece:
    data: memoryview | None  # None: the stream ends here
    whole_at: float = 0.0  # when its last byte reaches the downlink

    @property
    def nbytes(self) -> int:
        return 0 if self.data is None else len(self.data)


class _Pipe:
    """One direction of a stream. `fate` tells for each write, either way, if the stream breaks."""

    def __init__(self, network: Network, source: str, target: str, fate: Iterator[bool]) -> None:
        self.source, self.target = source, target
        self.reader = asyncio.StreamReader(loop=network.loop)
        self.waiting: deque[_Piece] = deque()  # for the uplink
        self.flying: deque[_Piece] = deque()
        self.arrived: deque[_Piece] = deque()  # at the downlink
        self.landing: deque[_Piece] = deque()
        self.backlog = 0
        self.ended = self.broken = self.reader_ended = False
        self.reverse: _Pipe = self
        self._network, self._fate, self._drained = network, fate, asyncio.Event()

    def write(self, data: bytes | memoryview) -> None:
        if self.ended or self.broken:
            return
        if next(self._fate, False):
            self._network.break_stream(self)
            return
        network, view = self._network, memoryview(data).cast("B")
        size = piece_bytes(network.links[self.source].up, network.links[self.target].down)
        if self.source in network.garbling:
            network.garbling.discard(self.source)
            view = memoryview(bytes(view[:HEAD_BYTES]) + b"\xff" * (len(view) - HEAD_BYTES))
        for start in range(0, len(view), size):
            self.waiting.append(_Piece(view[start : start + size]))
        self.backlog += len(view)
        network.uplinks[self.source].serve(self)

    async def drain(self) -> None:
        while self.backlog > BACKLOG_BYTES and not self.broken:
            self._drained.clear()
            await self._drained.wait()
        if self.broken:
            raise ConnectionResetError(f"{self.target} has ended the stream")

    def close(self) -> None:
        """End both directions: what was written still arrives, replies are dropped."""
        if not self.ended and not self.broken:
            self.ended = True
            self.waiting.append(_Piece(None))
            self._network.uplinks[self.source].serve(self)
        self.reverse.end_reader()

    def sent(self, piece: _Piece) -> None:
        self.backlog -= piece.nbytes
        if self.backlog <= BACKLOG_BYTES:
            self._drained.set()

    def land(self) -> None:
        """Hand the first piece on the downlink to the reader."""
        piece = self.landing.popleft()
        if piece.data is None:
            self.end_reader()
            self.reverse.reset()
        elif not self.reader_ended:
            self.reader.feed_data(piece.data)

    def end_reader(self) -> None:
        if not self.reader_ended:
            self.reader_ended = True
            self.reader.feed_eof()

    def reset(self) -> None:
        """Drop what was to be sent, and let the writer know: there is no reader any more."""
        self.broken = True
        self.waiting.clear()
        self.backlog = 0
        self._drained.set()
        self._network.pipes.pop(self, None)


class _Direction:
    """An uplink or a downlink: serves one piece at a time, of each stream in turn."""

    def __init__(
        self,
        network: Network,
        bytes_per_s: float | None,
        queue: Callable[[_Pipe], deque[_Piece]],
        served: Callable[[_Pipe, _Piece, float], None],
        held: Callable[[_Pipe], bool] = lambda pipe: False,
    ) -> None:
        self._loop, self._bytes_per_s = network.loop, bytes_per_s
        self._queue, self._served, self._held = queue, served, held
        self._turns: dict[_Pipe, None] = {}
        self._busy = False

    def serve(self, pipe: _Pipe) -> None:
        """Queue a stream that has data to send; without a limit, serve it at once."""
        if self._bytes_per_s is None:
            while self._queue(pipe) and not self._held(pipe):
                self._served(pipe, self._queue(pipe).popleft(), 0.0)
            return
        self._turns.setdefault(pipe)
        self._go_on()

    def _go_on(self) -> None:
        while self._turns and not self._busy:
            pipe = next(iter(self._turns))
            del self._turns[pipe]
            queue = self._queue(pipe)
            if not queue or self._held(pipe):
                continue
            piece = queue.popleft()
            seconds = piece.nbytes / self._bytes_per_s  # type: ignore[operator]
            if queue:
                self._turns[pipe] = None
            if seconds > 0.0:
                self._busy = True
                self._loop.at(self._loop.seconds + seconds, self._free)
            self._served(pipe, piece, seconds)

    def _free(self) -> None:
        self._busy = False
        self._go_on()


Ends = tuple[asyncio.StreamReader, _Pipe]  # of a stream: what comes in, and what goes out


class Network:
    """Peers, their links, the streams between them, and the records of the DHT.

    loss: the probability, for streams of the protocols `lossy`, that one of its messages or chunks
    breaks the stream instead of arriving. `seed` decides on these; nothing else is random.

    `crash` ends a peer and all its streams at once; `cut` is silence between two peers until
    `mend`. A handler that fails is a bug: the transport of its peer fails with it.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int = 0,
        loss: float = 0.0,
        lossy: Collection[str] = frozenset(),
    ) -> None:
        self.loop = loop
        self.uplinks: dict[str, _Direction] = {}
        self.announced: dict[str, tuple[list[str], float]] = {}
        self._random, self._secret = random.Random(seed), str(seed).encode()
        self._loss, self._lossy = loss, lossy
        self._downlinks: dict[str, _Direction] = {}
        self.links: dict[str, PeerLink] = {}
        self._transports: dict[str, SimTransport] = {}
        self.pipes: dict[_Pipe, None] = {}
        self._landings: dict[float, list[_Pipe]] = {}  # by the second of each
        self._cuts: dict[tuple[str, str], asyncio.Event] = {}  # from, to, and when it is mended
        self.garbling: set[str] = set()  # peers whose next message is noise behind its length

    def join(
        self, peer: str, seeds: list[str], link: PeerLink | None = None, gate: Gate | None = None
    ) -> SimTransport:
        """Return a peer's access to the network; its gate decides who may open streams."""
        self.links[peer] = link = link or PeerLink()

        def is_cut(pipe: _Pipe) -> bool:
            return (pipe.source, pipe.target) in self._cuts

        self.uplinks[peer] = _Direction(self, link.up, lambda p: p.waiting, self._fly, is_cut)
        self._downlinks[peer] = _Direction(self, link.down, lambda p: p.arrived, self._land)
        self._transports[peer] = transport = SimTransport(self, peer, seeds, gate or Gate())
        return transport

    def crash(self, peer: str) -> None:
        """Remove a peer: what it was sending is lost, and others read the end of its streams."""
        self._transports.pop(peer, None)
        for pipe in [pipe for pipe in self.pipes if pipe.source == peer]:
            self.break_stream(pipe)

    def leave(self, transport: SimTransport) -> None:
        """Remove a closed transport: what was written arrives. Others of the same peer stay."""
        if self._transports.get(transport.me) is transport:
            del self._transports[transport.me]
            for pipe in [pipe for pipe in self.pipes if pipe.source == transport.me]:
                pipe.close()

    def cut(self, source: str, target: str, one_way: bool = False) -> None:
        """Hold back all data between two peers, or from one to the other; neither is told."""
        mended = asyncio.Event()
        for pair in [(source, target)] if one_way else [(source, target), (target, source)]:
            self._cuts.setdefault(pair, mended)

    def mend(self, source: str, target: str) -> None:
        """Undo `cut`, and send what waited on both sides."""
        for pair in (source, target), (target, source):
            self._cuts.pop(pair, asyncio.Event()).set()
        for pipe in list(self.pipes):
            if {pipe.source, pipe.target} == {source, target}:
                self.uplinks[pipe.source].serve(pipe)

    def reset(self, source: str, target: str) -> None:
        """Break every stream between two peers; new ones can be opened."""
        for pipe in [pipe for pipe in self.pipes if (pipe.source, pipe.target) == (source, target)]:
            self.break_stream(pipe)

    def latency_s(self, source: str, target: str) -> float:
        """Return the seconds that a byte takes from one peer to the other."""
        return (self.links[source].latency_s + self.links[target].latency_s) / 2

    async def open(self, source: str, target: str, protocol: str) -> Ends:
        """Open a stream. Across a cut, either way, the call waits for `mend`, or times out."""
        if cut := self._cuts.get((source, target)) or self._cuts.get((target, source)):
            try:
                async with asyncio.timeout(UNANSWERED_S):
                    await cut.wait()
            except TimeoutError:
                raise TimeoutError(f"{target} does not answer") from None
        trip_s = self.latency_s(source, target) if target in self.links else 0.0
        await asyncio.sleep(trip_s)
        transport = self._transports.get(target)
        handler = None if transport is None else transport.handlers.get(protocol)
        if source not in self._transports or transport is None or handler is None:
            await asyncio.sleep(trip_s)
            raise ConnectionRefusedError(f"{target} cannot be reached")
        fate = self._fate(protocol)
        there, back = _Pipe(self, source, target, fate), _Pipe(self, target, source, fate)
        there.reverse, back.reverse = back, there
        self.pipes |= {there: None, back: None}
        with self.loop.owned_by(transport.owner):
            serving = asyncio.ensure_future(handler(source, there.reader, back))
        serving.add_done_callback(transport.served)
        try:
            await asyncio.sleep(trip_s)
        except asyncio.CancelledError:
            there.close()
            raise
        return back.reader, there

    def signature(self, peer: str, content: bytes) -> bytes:
        """Return a stand-in for a peer's signature; only its own transport asks for it."""
        return hashlib.sha256(b"\0".join((self._secret, peer.encode(), content))).digest()

    def break_stream(self, pipe: _Pipe) -> None:
        """End both directions: here now, at the other end after the latency."""
        pipe.reset()
        pipe.reverse.end_reader()

        def hear() -> None:
            pipe.end_reader()
            pipe.reverse.reset()

        self.loop.at(self.loop.seconds + self.latency_s(pipe.source, pipe.target), hear)

    def _fate(self, protocol: str) -> Iterator[bool]:
        if not self._loss or protocol not in self._lossy or self._random.random() >= self._loss:
            return iter(())
        return iter([False] * (self._random.randint(*DOOMED_WRITES) - 1) + [True])

    def _fly(self, pipe: _Pipe, piece: _Piece, seconds: float) -> None:
        pipe.sent(piece)
        now, trip_s = self.loop.seconds, self.latency_s(pipe.source, pipe.target)
        piece.whole_at = now + seconds + trip_s
        if self.links[pipe.target].down is None:  # nothing to wait for there
            self._land_at(piece.whole_at, pipe, piece)
            return
        pipe.flying.append(piece)
        self.loop.at(now + trip_s, self._arrive, pipe)

    def _arrive(self, pipe: _Pipe) -> None:
        pipe.arrived.append(pipe.flying.popleft())
        self._downlinks[pipe.target].serve(pipe)

    def _land(self, pipe: _Pipe, piece: _Piece, seconds: float) -> None:
        self._land_at(max(self.loop.seconds + seconds, piece.whole_at), pipe, piece)

    def _land_at(self, second: float, pipe: _Pipe, piece: _Piece) -> None:
        """Let a piece arrive at a second; pieces of one second (a broadcast) share a timer."""
        pipe.landing.append(piece)
        if second in self._landings:
            self._landings[second].append(pipe)
        else:
            self._landings[second] = [pipe]
            self.loop.at(second, self._landed, second)

    def _landed(self, second: float) -> None:
        for pipe in self._landings.pop(second):
            pipe.land()


class SimTransport:
    """One peer's access to a `Network`; implements `diloco.swarm.wire.transport.Transport`."""

    def __init__(self, network: Network, me: str, seeds: list[str], gate: Gate) -> None:
        self.me = gate.me = me
        self.seeds, self.addresses = seeds, [f"/sim/{me}"]
        self.may_call: Callable[[str], bool] = lambda address: True
        self.way: Callable[[str], str] = lambda peer: ""
        self.reachable, self.advice = True, ""
        self.store: Any = None
        self.addresses_of: Callable[[str], Sequence[str]] = lambda peer: ()
        self.handlers: dict[str, Handler] = (
            {} if gate.admission is None else {GREETING: gate.welcome}
        )
        self.owner = network.loop.owner  # what others begin here is this peer's
        self._gate = gate
        self._network = network
        self._failure: asyncio.Future[None] = network.loop.create_future()

    async def handle(self, protocol: str, handler: Handler) -> None:
        async def guarded(peer: str, reader: ByteReader, writer: ByteWriter) -> None:
            await self._gate.serve(peer, reader, writer, handler)

        self.handlers[protocol] = handler if self._gate.admission is None else guarded

    async def open(self, peer: str, protocol: str) -> Ends:
        if self._gate.admission is not None:
            greeting = partial(self._network.open, self.me, peer, GREETING)
            await self._gate.greet(peer, greeting, protocol == CONTROL)
        return await self._network.open(self.me, peer, protocol)

    def sign(self, content: bytes) -> bytes:
        return self._network.signature(self.me, content)

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        return signature == self._network.signature(peer, content)

    async def announce(self, life_s: float, met: Sequence[str]) -> None:
        """Announce this peer: all find it after a round trip of its own latency."""
        await asyncio.sleep(2 * self._network.latency_s(self.me, self.me))
        self._network.announced[self.me] = (self.addresses, self._network.loop.seconds + life_s)

    async def announced(self) -> dict[str, list[str]]:
        await asyncio.sleep(2 * self._network.latency_s(self.me, self.me))
        now, records = self._network.loop.seconds, self._network.announced
        return {peer: addresses for peer, (addresses, ends) in records.items() if ends > now}

    async def observed(self, peer: str) -> str:
        return ""  # a simulated peer has no address: nobody is ever called anew

    async def call_anew(self, peer: str, addresses: Sequence[str]) -> dict[str, str]:
        return {}

    async def hang_up(self, peer: str) -> None: ...

    async def failed(self) -> None:
        await asyncio.shield(self._failure)

    async def close(self) -> None:
        self._network.leave(self)

    def served(self, task: asyncio.Future[None]) -> None:
        """Check a handler that returned; one that raises is a bug, not a peer that vanished."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(SwarmError(f"a handler of {self.me} failed: {error!r}"))
            self._failure.exception()  # seen, should nobody wait for it
