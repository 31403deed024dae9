"""Questions of peers, both sides: who gives what, how much of it, and what the asker believes."""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from diloco.errors import PayloadError
from diloco.messages import codec
from diloco.messages.snapshot import MAX_PIECE_BYTES, pack_snapshot
from diloco.protocol import WIRE_VERSION
from diloco.swarm.context import FilePart
from diloco.swarm.rpc import probe as probes
from diloco.swarm.rpc import watch
from diloco.swarm.rpc.inner_state import (
    InnerLayout,
    InnerState,
    InnerStateServer,
    fetch_inner,
)
from diloco.swarm.rpc.probe import Probe, ProbeServer, _callable, ask_to_be_called, probe
from diloco.swarm.wire.streams import PeerStream, Traffic, open_bulk
from tests.support.core import core, join
from tests.support.stub_wire import Transport
from tests.unit.messages.test_snapshot import SEEN

CONTENT = bytes(range(256)) * 4096 + b"the end"  # two whole pieces, and some more
DIGEST, GONE = sha256(CONTENT).hexdigest(), "ab" * 32
PART = sha256(CONTENT[2**19 - 4 :][:9]).hexdigest()


# -- manifest, snapshot, files ---------------------------------------------------------------------


def info(tmp_path: Path) -> Any:
    (tmp_path / "file").write_bytes(CONTENT)
    gate = SimpleNamespace(memory=SimpleNamespace(seal="a" * 128))
    context: Any = SimpleNamespace(gate=gate, traffic=Traffic(), now=lambda: 0.0)
    context.manifest = '{"ä": 1}'
    context.files = {DIGEST: FilePart(tmp_path / "file"), GONE: FilePart(tmp_path / "gone")}
    context.files[PART] = FilePart(tmp_path / "file", 2**19 - 4, 9)
    context.packed_snapshot = lambda now: pack_snapshot(SEEN)
    return Transport(watch.InfoServer(context).answer)


async def test_who_asks_gets_manifest_snapshot_and_files_of_the_run_and_no_others(
    tmp_path: Path,
) -> None:
    there = info(tmp_path)
    assert await watch.request_manifest(there, "p") == ('{"ä": 1}', "a" * 128)
    assert await watch.request_snapshot(there, "p") == SEEN
    assert await watch.request_file(there, "p", DIGEST, len(CONTENT)) == CONTENT
    assert await watch.request_file(there, "p", PART, 9) == CONTENT[2**19 - 4 :][:9]
    for digest in (sha256(b"secret").hexdigest(), GONE):
        with pytest.raises(PayloadError, match="refused: no file with that digest is here; ask"):
            await watch.request_file(there, "p", digest, 9)


async def test_an_asker_gets_a_base_twice_and_only_so_many_bytes_of_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "FILE_BYTES", 0)
    there = info(tmp_path)
    for _ in range(2):
        await watch.request_file(there, "p", PART, 9)
    with pytest.raises(PayloadError, match="enough files were sent for a while"):
        await watch.request_file(there, "p", PART, 9)
    monkeypatch.setattr(watch, "FILE_BYTES", 2 * len(CONTENT))
    there = info(tmp_path)
    for _ in range(2):
        await watch.request_file(there, "p", DIGEST, len(CONTENT))
    with pytest.raises(PayloadError, match="enough files were sent for a while"):
        await watch.request_file(there, "p", DIGEST, len(CONTENT))


def saying(*pieces: bytes, version: int = WIRE_VERSION) -> Any:
    async def answer(stream: PeerStream, request: watch.InfoRequest) -> None:
        for piece in pieces:
            await stream.send(watch.Piece(version, piece, more=True))
        await stream.send(watch.Piece(version, b""))

    return Transport(answer)


async def test_only_what_was_asked_for_is_believed() -> None:
    with pytest.raises(PayloadError, match="is another one than the manifest names"):
        await watch.request_file(saying(CONTENT[:9]), "p", DIGEST, len(CONTENT))
    with pytest.raises(PayloadError, match=f"has more than {len(CONTENT)} bytes"):
        await watch.request_file(saying(*[b"x" * MAX_PIECE_BYTES] * 9), "p", DIGEST, len(CONTENT))
    with pytest.raises(PayloadError, match=f"manifest has more than {MAX_PIECE_BYTES} bytes"):
        await watch.request_manifest(saying(*[b"x" * MAX_PIECE_BYTES] * 2), "p")
    with pytest.raises(PayloadError, match="that is no snapshot"):
        await watch.request_snapshot(saying(b"nonsense"), "p")
    with pytest.raises(
        PayloadError, match=f"wire version 11 there does not fit {WIRE_VERSION} here"
    ):
        await watch.request_snapshot(saying(b"", version=11), "p")
    assert (await watch.request_manifest(saying(b"\xff"), "p"))[0] == "\ufffd", "which is no JSON"


# -- probes ----------------------------------------------------------------------------------------


class Network(Transport):
    """An asker that comes from `observed`, and answers calls at port 22 only."""

    addresses = ("/ip4/198.51.100.7/tcp/22/p2p/asker", "/ip4/10.0.0.9/tcp/80/p2p/asker")

    def __init__(self, observed: str = "/ip4/198.51.100.7/tcp/51000", asker: str = "asker") -> None:
        self.now, self.called, self.place = 1000.0, list[str](), observed
        context: Any = SimpleNamespace(transport=self, core=core(), now=lambda: self.now)
        join(context.core)
        super().__init__(ProbeServer(context).answer, asker)

    async def observed(self, peer: str) -> str:
        return self.place

    async def call_anew(self, peer: str, addresses: list[str]) -> dict[str, str]:
        self.called += [f"{address} {peer}" for address in addresses]
        return {address: "" if "/22" in address else "timeout" for address in addresses}

    async def obeys(self, *asked: tuple[str, Probe]) -> list[bool]:
        found = []
        for self._asker, request in asked:
            async with open_bulk(self, "p", Traffic()) as stream:  # type: ignore[arg-type]
                await stream.send(request)
                found.append(not isinstance(await stream.receive(), codec.Refusal))
        return found


async def test_a_probe_finds_clock_and_names() -> None:
    network: Any = Network()
    found = await probe(network, "p")
    assert (found.reply.run_id, found.reply.name, found.reply.known) == ("run", "me", ["b" * 46])
    assert abs(found.ahead_s) < 1


async def test_only_the_address_that_an_asker_comes_from_is_called() -> None:
    network: Any = Network()
    assert await ask_to_be_called(network) == (True, "")
    assert network.called == ["/ip4/198.51.100.7/tcp/22 asker", "/ip4/198.51.100.7/tcp/80 asker"]
    for unknown in ("", "/p2p-circuit", "/dns/x.example/tcp/1", "nonsense"):
        assert _callable(["/ip4/203.0.113.9/tcp/4100"], unknown) == []
    other = "/ip4/198.51.100.9/tcp/1"
    network = Network(other)
    reachable, advice = await ask_to_be_called(network)
    assert not reachable and advice.endswith(f"; add 'swarm.announce=[{other[:-1]}22]'")
    lan = [f"/ip4/10.0.0.{number}/tcp/22/p2p/asker" for number in range(5)]
    network.addresses = (*lan, "/ip4/198.51.100.9/tcp/22/p2p/asker")
    assert await ask_to_be_called(network) == (True, ""), "four are named, and it is the sixth"
    network.addresses = ("/ip4/10.0.0.9/tcp/80/p2p/asker",)
    reachable, advice = await ask_to_be_called(network)
    assert not reachable and "/ip4/198.51.100.9/tcp/80]" in advice
    assert "timeout); open TCP port 80 of this machine" in advice


async def test_calls_back_are_few_per_asker_and_in_all() -> None:
    network = Network()
    request = Probe(call=["/ip4/198.51.100.7/tcp/4100"])
    assert await network.obeys(*[("one", request)] * 7) == [True] * 6 + [False]
    others = [(f"peer {number}", request) for number in range(40)]
    assert (await network.obeys(*others)).count(True) == 14, "together"
    assert await network.obeys(("one", Probe())) == [True], "asking is free"
    network.now += 61
    assert await network.obeys(("another", request)) == [True]


async def test_who_refuses_to_call_back_does_not_know_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer whose reachability nobody can tell makes no versions: it was taken for reachable, and
    each round of all others took twenty seconds."""
    network: Any = Network()
    turns = list[float]()

    async def paused(seconds: float) -> None:
        turns.append(seconds)
        network.now += 61 if len(turns) == 3 else 0  # in time for the last question

    monkeypatch.setattr(probes.asyncio, "sleep", paused)
    spent = [(f"peer {number}", Probe(call=["/ip4/198.51.100.7/tcp/22"])) for number in range(20)]
    await network.obeys(*spent)
    network._asker = "asker"
    assert await ask_to_be_called(network) == (True, "") and len(turns) == 3
    turns += [0.0]
    await network.obeys(*spent)
    network._asker = "asker"
    assert await ask_to_be_called(network) == (False, probes.UNKNOWN)


async def test_two_who_join_at_once_are_called_back_one_after_the_other() -> None:
    network: Any = Network()
    server = ProbeServer(SimpleNamespace(transport=network, now=lambda: 0.0))  # type: ignore[arg-type]
    calls, ends = list[str](), asyncio.Event()

    async def call_anew(peer: str, addresses: list[str]) -> dict[str, str]:
        calls.append(peer)
        await ends.wait()
        return dict.fromkeys(addresses, "")

    network.call_anew = call_anew
    place = "/ip4/198.51.100.7/tcp/22"
    first, second = (
        asyncio.ensure_future(server._call(peer, [place], place)) for peer in ("one", "two")
    )
    while not calls:
        await asyncio.sleep(0)
    assert calls == ["one"]
    ends.set()
    assert [await first, await second] == [{place: ""}, {place: ""}] and calls == ["one", "two"]


# -- the inner optimizer's state -------------------------------------------------------------------

LAYOUT = InnerLayout(("0.w.exp_avg", "0.w.exp_avg_sq"), (2, 2), 1)
LONGER = InnerLayout(LAYOUT.names, (2, 3), 1)
STATE = InnerState(LAYOUT, (6,), torch.tensor([-1.0, 2.0, 3.0, 4.0]))


class Asker:
    """A joiner among peers that train; donors answer with `give`."""

    def __init__(self, give: Callable[[], InnerState | None]) -> None:
        self.notes, self.asked = list[tuple[str, dict[str, object]]](), list[str]()
        self.core, self.inner_state, context = core(), give, cast(Any, self)
        self._give = InnerStateServer(context)

    def now(self) -> float:
        return 0.0

    def note(self, kind: str, **fields: object) -> None:
        self.notes.append((kind, fields))

    def open(self, peer: str) -> Any:
        self.asked.append(peer)
        transport: Any = Transport(self._give.answer)
        return open_bulk(transport, peer, Traffic())

    async def fetch(self, layout: InnerLayout = LAYOUT, seed: int = 0) -> InnerState | None:
        self.asked.clear()
        self.notes.clear()
        return await fetch_inner(self, layout, random.Random(seed))


async def test_donors_are_drawn_among_those_that_train_and_resumed_ones_come_last() -> None:
    asker = Asker(lambda: None)
    paces = {"slow": 0.5, "fast": 3.0, "other": 1.0, "liar": 1e6, "resumed": 0.0}
    for name, pace in paces.items():
        join(asker.core, name, steps_per_s=pace)
    join(asker.core, "host", trains=False)
    join(asker.core, "gone", leaves=True, steps_per_s=9.0)
    first = set()
    for seed in range(8):
        assert await asker.fetch(seed=seed) is None
        assert len(asker.asked) == 3 and set(asker.asked) <= {"slow", "fast", "other", "liar"}
        why = "refused: no inner optimizer state is here"
        assert asker.notes[0] == ("inner_state_failed", {"donor": asker.asked[0], "why": why})
        first.add(asker.asked[0])
    assert len(first) > 2, "the draw decides"


def spoiled(at: int, value: float) -> InnerState:
    values = STATE.values.clone()
    values[at] = value
    return replace(STATE, values=values)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spoiled(0, math.nan), "0.w.exp_avg holds nan to nan"),
        (spoiled(3, -1e-6), "0.w.exp_avg_sq holds -1e-06 to 3"),
        (replace(STATE, steps=(1, 2)), "in another order or number than here"),
        (InnerState(LONGER, (6,), torch.zeros(5)), "the inner state there has 5 elements"),
    ],
)
async def test_a_state_that_cannot_be_is_refused_by_both_sides(given: InnerState, why: str) -> None:
    for donor_checks in (True, False):
        asker = Asker(lambda: given)
        join(asker.core, "p", steps_per_s=1.0)
        if not donor_checks:
            asker._give._kept = lambda: given  # type: ignore[assignment]
        assert await asker.fetch() is None
        [(kind, fields)] = asker.notes
        assert kind == "inner_state_failed" and why in str(fields["why"])
        assert str(fields["why"]).startswith("refused") == (donor_checks and "holds" in why)
