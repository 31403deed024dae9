"""A volunteer's way into a swarm: what it is told, what it keeps, and what its machine makes of the run."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from diloco.admission.invitation import issue
from diloco.admission.keys import RunKey
from diloco.cli.join import _Arrival, _called
from diloco.cli.main import main
from diloco.cli.stages import Stages
from diloco.cli.table import LiveView, invitation
from diloco.cli.volunteers import _command as start_of
from diloco.config import WIRE_VERSION, compose
from diloco.config.address import Address
from diloco.errors import ConfigError, SwarmError
from diloco.fit.volunteer import (
    fit_to_machine,
    known_addresses,
    lock_peer_directory,
    move_aside,
    remember_addresses,
    volunteer_config,
    with_settings,
)
from diloco.fit.whole import Layout
from diloco.protocol.messages import Message, Refusal
from diloco.protocol.messages.watching import DialBack, DialBackReply, Probe, ProbeReply
from diloco.rundir.reporting import Happened, to_wire
from diloco.swarm.conversations.probe import ProbeServer, _callable
from diloco.swarm.visit.look import check_clock, parse_manifest
from diloco.swarm.wire.dialing import best_first
from diloco.train.devices import Accelerator
from diloco.train.loop import Trainer
from diloco.train.machine import GIB, Machine, inspect_machine
from diloco.train.memory import MemoryNeed, Split, fit_micro_batch, memory_need, sequence_bytes
from tests.support.joining import OTHER, found

pytestmark = pytest.mark.usefixtures("own_home")

ID = "12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"
PLACE = f"/ip4/203.0.113.7/tcp/4100/p2p/{ID}"


# -- what is typed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "join needs the ADDRESS of a peer"),
        (["run.dir=x"], "join needs the ADDRESS of a peer"),
        (["203.0.113.7:4100"], "it is HOST:PORT"),
        ([PLACE, "outer.lr=1"], "outer.lr belongs to the run and comes from the swarm"),
        ([PLACE, "model=150m"], "model belongs to the run"),
        ([PLACE, "model.config.hidden_size=8"], "model.config.hidden_size belongs to the run"),
        ([PLACE, "run.id=mine"], "run.id belongs to the run"),
        ([PLACE, "train.devise=cpu"], "train.devise is not a setting; did you mean train.device?"),
    ],
)
def test_what_a_volunteer_cannot_type_is_refused_before_anything_is_called(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["join", *arguments])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_two_joins_at_once_have_two_identities_and_the_next_one_has_the_first_again(own_home: Path) -> None:
    with lock_peer_directory() as first:
        with lock_peer_directory() as second:
            assert (first.number, second.number) == (0, 1)
            assert first.peer_id != second.peer_id
            assert second.name == second.peer_id[-6:]
        with lock_peer_directory() as third:
            assert third.peer_id == second.peer_id
    with lock_peer_directory() as again:
        assert (again.identity, again.peer_id) == (own_home / "peer-0" / "identity.key", first.peer_id)


def test_a_key_that_is_named_is_used_by_one_process_only(tmp_path: Path) -> None:
    key = tmp_path / "mine.key"
    with lock_peer_directory(str(key)) as directory:
        assert directory.identity == key
        with pytest.raises(ConfigError):
            lock_peer_directory(str(key)).__enter__()


def test_peers_of_a_run_are_remembered_for_the_time_when_the_first_is_gone(own_home: Path) -> None:
    others = [f"/ip4/203.0.113.8/tcp/{port}/p2p/{OTHER}" for port in (1, 2)]
    assert known_addresses([PLACE]) == []
    mine = compose(["run.id=mine"]).manifest()
    remember_addresses(mine, [PLACE, others[0]])
    remember_addresses(mine, [others[1]])
    remember_addresses(compose(["run.id=mine", "run.seed=1"]).manifest(), [others[0][:-5] + "wrong"])
    assert known_addresses([PLACE]) == [others[1], others[0]]
    assert known_addresses([PLACE.replace(ID, OTHER[:-1] + "W")]) == []
    (own_home / "peers.json").write_text('{"mine": ["nonsense"]}')
    assert known_addresses([PLACE]) == []


def test_a_volunteer_takes_the_runs_half_from_the_swarm_and_keeps_its_own() -> None:
    theirs = compose(["experiment=quickstart", "outer.lr=0.5"]).manifest()
    mine = compose(["train.threads=1", "eval.every=3"])
    with lock_peer_directory() as directory:
        config = volunteer_config(mine, theirs, {"train.threads", "eval.every"}, directory, [PLACE])
    assert config.manifest() == theirs
    assert (config.train.threads, config.eval.every) == (1, 3)
    assert config.swarm.initial_peers == (PLACE,)
    assert config.swarm.listen == ("/ip4/0.0.0.0/tcp/0",)
    assert config.run.dir == directory.path / "runs" / "quickstart"
    assert config.run.name == directory.name


def test_a_volunteer_of_a_swarm_on_this_machine_is_not_open_to_others() -> None:
    with lock_peer_directory() as directory:
        local = f"/ip4/127.0.0.1/tcp/4100/p2p/{ID}"
        config = volunteer_config(compose(), compose().manifest(), {"swarm.listen"}, directory, [local])
    assert config.swarm.listen == ("/ip4/127.0.0.1/tcp/0",)
    assert config.eval.every == 0


def test_checkpoints_of_an_earlier_visit_are_moved_aside(tmp_path: Path) -> None:
    config = compose([f"run.dir={tmp_path}", "run.name=me"])
    move_aside(config)
    for content in ("old", "new"):
        (tmp_path / "checkpoints" / "me").mkdir(parents=True)
        (tmp_path / "checkpoints" / "me" / "state").write_text(content)
        move_aside(config)
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["me.before"]
    assert (tmp_path / "checkpoints" / "me.before" / "state").read_text() == "new"


# -- what the swarm says ----------------------------------------------------------------------------------------------


def test_a_clock_that_is_right_by_most_peers_is_not_spoken_of() -> None:
    assert check_clock(found()) is None
    assert check_clock(found(0.2, 0.1, -3600.0)) is None


def test_a_clock_that_is_a_little_wrong_is_a_warning_and_one_that_is_very_wrong_is_refused_with_the_figure() -> None:
    assert check_clock(found(-2.0, -2.2)) == "this machine's clock is 2.1 s behind the swarm's (median of 2)"
    with pytest.raises(SwarmError, match=r"is 3600\.0 s ahead of the swarm's \(median of 1\), and 3 s is the limit"):
        check_clock(found(3600.0))


@pytest.mark.parametrize(("version", "side"), [(WIRE_VERSION + 1, "newer"), (WIRE_VERSION - 1, "older")])
def test_another_wire_version_is_told_from_a_broken_manifest(version: int, side: str) -> None:
    manifest = compose().manifest()
    content = {**json.loads(manifest.to_json()), "wire_version": version}
    with pytest.raises(SwarmError, match=f"speaks wire version {version}, which is {side} than this diloco's"):
        parse_manifest(json.dumps(content))
    with pytest.raises(ConfigError):
        parse_manifest("[]")
    assert parse_manifest(manifest.to_json()) == manifest


# -- the answering side of probes and calls back ----------------------------------------------------------------------


class Network:
    """A transport that has no network: whom it was asked to call, and where the asker is."""

    def __init__(self, observed: str, answers: Callable[[str], str] = lambda address: "") -> None:
        self.addresses = [PLACE]
        self.called: list[str] = []
        self._observed, self._answers = observed, answers

    async def observed(self, peer: str) -> str:
        return self._observed

    async def call_anew(self, peer: str, addresses: Sequence[str]) -> dict[str, str]:
        self.called += [f"{address} {peer}" for address in addresses]
        return {address: self._answers(address) for address in addresses}


class Asker:
    """Stands for the stream of one who asks."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.heard: list[Message] = []

    async def send(self, message: Message) -> None:
        self.heard.append(message)

    async def refuse(self, reason: str) -> None:
        self.heard.append(Refusal(reason=reason))

    async def send_payload(self, payload: torch.Tensor) -> None: ...
    async def receive_payload(self, out: torch.Tensor) -> None: ...


class Answering:
    """A `ProbeServer` with a clock that the test sets."""

    def __init__(self, network: Network) -> None:
        self.now = 1000.0
        protocol: Any = type("Nobody", (), {"run_id": "r", "name": "n"})()
        protocol.members = type("None_", (), {"all": staticmethod(list)})()
        self._server = ProbeServer(network, protocol, lambda: self.now)  # type: ignore[arg-type]

    def ask(self, peer: str, request: Probe | DialBack) -> Message:
        asker = Asker(peer)
        answer: Any = self._server.measure if isinstance(request, Probe) else self._server.call_back
        asyncio.run(answer(asker, request))
        [answer] = asker.heard
        return answer


def test_only_the_address_that_an_asker_comes_from_is_called() -> None:
    network = Network("/ip4/198.51.100.7/tcp/51000")
    wanted = ["/ip4/10.0.0.9/tcp/22", "/ip4/203.0.113.99/tcp/80", "/dns/victim.example/tcp/443", "/ip4/1.1.1.1/tcp/0"]
    answer = Answering(network).ask("asker", DialBack(addresses=wanted))
    assert network.called == ["/ip4/198.51.100.7/tcp/22 asker", "/ip4/198.51.100.7/tcp/80 asker"]
    assert isinstance(answer, DialBackReply) and answer.observed == "/ip4/198.51.100.7/tcp/51000"


@pytest.mark.parametrize("observed", ["", "/p2p-circuit", "/dns/x.example/tcp/1", "nonsense"])
def test_nobody_is_called_whose_address_is_not_known(observed: str) -> None:
    assert _callable(["/ip4/203.0.113.9/tcp/4100"], observed) == []


def test_calls_back_are_few_per_asker_and_in_all() -> None:
    server = Answering(Network("/ip4/198.51.100.7/tcp/1"))
    request = DialBack(addresses=["/ip4/198.51.100.7/tcp/4100"])
    assert isinstance(server.ask("one", request), DialBackReply)
    assert isinstance(server.ask("one", request), Refusal)
    server.now += 11
    assert isinstance(server.ask("one", request), DialBackReply)
    answers = [server.ask(f"peer {number}", request) for number in range(40)]
    assert sum(isinstance(answer, DialBackReply) for answer in answers) == 18
    server.now += 61
    assert isinstance(server.ask("another", request), DialBackReply)


def test_measuring_is_limited_per_asker_and_minute_but_asking_is_not() -> None:
    server = Answering(Network(""))
    large = Probe(sends=2**22, wants=2**22)
    answers = [server.ask("one", large) for _ in range(10)]
    assert [isinstance(answer, ProbeReply) for answer in answers] == [True] * 4 + [False] * 6
    others = [server.ask(f"other {number}", large) for number in range(6)]
    assert [isinstance(answer, ProbeReply) for answer in others] == [True] * 4 + [False] * 2, "all together"
    assert isinstance(server.ask("one", Probe()), ProbeReply)
    server.now += 61
    assert isinstance(server.ask("one", large), ProbeReply)


# -- what the machine can do ------------------------------------------------------------------------------------------

ROOMY = Machine(torch.device("cpu"), "CPU", 2, 2, 8 * GIB, 8 * GIB, "fp32")


def test_a_machine_that_is_too_small_is_told_by_how_much() -> None:
    config = compose(["model=1b"])
    small = replace(ROOMY, device_bytes=8 * GIB, main_bytes=8 * GIB)
    with pytest.raises(ConfigError, match=r"1100M parameters: it needs \d+\.\d GiB of main memory, and 8\.0 GiB are"):
        fit_micro_batch(memory_need(config, small), small, 8)


def test_a_batch_is_cut_into_the_fewest_equal_parts_that_fit() -> None:
    need = replace(memory_need(compose(), ROOMY), device_bytes=GIB, main_bytes=GIB, sequence_bytes=GIB)
    for free, micro_batch in {1: 1, 2: 2, 3: 3, 4: 4, 7: 4, 8: 8, 100: 8}.items():
        assert fit_micro_batch(need, replace(ROOMY, main_bytes=(2 + free) * GIB), 8) == micro_batch
    accelerator = replace(ROOMY, device=torch.device("cuda"), device_bytes=4 * GIB, main_bytes=GIB)
    assert fit_micro_batch(need, accelerator, 8) == 3
    with pytest.raises(ConfigError, match=r"it needs 1\.0 GiB of main memory, and 0\.5 GiB are free, 0\.5 GiB too"):
        fit_micro_batch(need, replace(accelerator, main_bytes=GIB / 2), 8)


def test_activations_are_counted_without_computing_and_grow_with_the_sequence() -> None:
    short, long = (sequence_bytes(compose([f"data.sequence_length={n}"])) for n in (64, 128))
    assert 1e5 < short < 1e8
    assert 1.9 * short < long < 4.1 * short
    rough = memory_need(compose(), ROOMY)
    assert rough.sequence_bytes > sequence_bytes(compose())


def test_the_machine_is_looked_at_and_what_was_typed_wins() -> None:
    machine = inspect_machine("cpu")
    assert 1 <= machine.threads <= machine.cores and machine.main_bytes > 0
    config = compose(["train.threads=7"])
    chosen, need = fit_to_machine(config, replace(machine, threads=2, precision="bf16"), {"train.threads"})
    assert (chosen.train.threads, chosen.train.precision, chosen.train.micro_batch) == (7, "bf16", None)
    least = need.device_bytes + need.main_bytes
    small = replace(machine, precision="bf16", main_bytes=least + 3.5 * sequence_bytes(chosen))
    assert fit_to_machine(config, small)[0].train.micro_batch == 3
    config = compose(["train.threads=7", "train.micro_batch=2"])
    assert fit_to_machine(config, small, {"train.micro_batch"})[0].train.micro_batch == 2


def test_the_micro_batch_is_found_with_the_precision_that_will_be_used() -> None:
    config = compose(["model=60m", "data.sequence_length=1024"])
    fp32, bf16 = (sequence_bytes(with_settings(config, {"train.precision": one})) for one in ("fp32", "bf16"))
    assert 0.4 * fp32 < bf16 < 0.9 * fp32
    machine = replace(ROOMY, device=torch.device("cuda"), precision="bf16")
    need = memory_need(with_settings(config, {"train.precision": "bf16"}), machine)
    machine = replace(machine, device_bytes=need.device_bytes + 8.2 * bf16)
    assert fit_to_machine(config, machine)[0].train.micro_batch is None
    assert fit_to_machine(config, replace(machine, precision="fp32"))[0].train.micro_batch == 4


def trainer(micro_batch: int | None) -> Trainer:
    from diloco import model as models
    from diloco.train.island import Island

    config = compose(["experiment=smoke", *([] if micro_batch is None else [f"train.micro_batch={micro_batch}"])])
    model = models.build(config.model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    nothing: Any = None
    island = Island(torch.device("cpu"))
    log: Any = SimpleNamespace(event=lambda kind, **fields: None)
    return Trainer(config, island, model, model, optimizer, nothing, nothing, nothing, nothing, nothing, log, nothing)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(micro_batch: int) -> None:
    rows = torch.randint(256, (7, 32), generator=torch.Generator().manual_seed(0))
    whole, parts = trainer(None), trainer(micro_batch)
    losses = [float(one._gradients(rows)) for one in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)


def test_a_part_that_does_not_fit_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(0))
    one, tried = trainer(None), []
    accumulate = one._accumulate

    def full(rows: torch.Tensor, micro_batch: int) -> torch.Tensor:
        tried.append(micro_batch)
        if micro_batch > 2:
            raise torch.OutOfMemoryError("full")
        return accumulate(rows, micro_batch)

    monkeypatch.setattr(one, "_accumulate", full)
    one._gradients(rows)
    one._gradients(rows)
    assert tried == [8, 4, 2, 2]

    def never(rows: torch.Tensor, micro_batch: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(one, "_accumulate", never)
    with pytest.raises(ConfigError, match="not even one sequence fits"):
        one._gradients(rows)


# -- several accelerators ---------------------------------------------------------------------------------------------


def several(peers: int, split: Split) -> Layout:
    devices = tuple(Accelerator("cuda", index, "A100", 8.0 * GIB) for index in range(max(peers, split.ranks)))
    return Layout(devices, peers, split, MemoryNeed(10, 1.0, 1.0, 1.0), "of a test")


def test_each_peer_of_a_machine_is_started_on_a_device_of_its_own(tmp_path: Path) -> None:
    token = issue(RunKey.create(tmp_path / "run.key"), "mine", "worker", 2**33).to_text()
    config = compose([f"run.dir={tmp_path}", "run.name=me", f"swarm.token={token}", "train.threads=2"])
    commands = [start_of(config, several(2, Split()), number) for number in range(2)]
    settings = [compose(arguments[4:], base=tmp_path / "config.yaml") for arguments, _ in commands]
    assert settings[1].train.device == "cuda:1" and settings[1].run.report and settings[1].train.threads == 2
    for arguments, environment in commands:
        assert arguments[:3] == ["-m", "diloco.train", "--config"] and environment == {}
        assert not any(token in argument for argument in arguments), "anybody on this machine could read it"
    assert (tmp_path / "token").stat().st_mode & 0o77 == 0 and (tmp_path / "token").read_text() == f"{token}\n"


def test_an_island_of_a_machine_is_started_by_torchrun_on_the_devices_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = compose([f"run.dir={tmp_path}", "run.name=me", "train.parallel=fsdp"])
    arguments, environment = start_of(config, several(1, Split(2, sharded=True)), 0)
    assert arguments[:3] == ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    assert "--max-restarts=3" in arguments and environment == {"CUDA_VISIBLE_DEVICES": "0,1"}
    started = compose([], base=tmp_path / "config.yaml")
    assert (started.train.device, started.train.parallel) == ("cuda", "fsdp")


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_an_address_is_printed_as_the_whole_command_and_the_best_interface_comes_first() -> None:
    addresses = [f"/ip4/{ip}/tcp/4100/p2p/{ID}" for ip in ("127.0.0.1", "192.168.1.7", "8.8.8.8")]
    ordered = best_first(addresses)
    assert ordered == addresses[::-1]
    assert invitation(ordered) == [
        "others join with this (public: from anywhere):",
        f"diloco join {addresses[2]}",
        f"or, LAN: diloco join {addresses[1]}",
        f"or, loopback: diloco join {addresses[0]}",
    ]
    assert "swarm.announce=" in invitation(addresses[1:2])[0]
    assert "swarm=network lets others in" in invitation(addresses[:1])[0]


def test_in_a_closed_run_what_is_printed_makes_an_invitation(tmp_path: Path) -> None:
    RunKey.create(tmp_path / "run key")  # a path that has to be quoted
    closed = compose([f"swarm.key_path='{tmp_path / 'run key'}'", "run.id=mine"])
    command = f"diloco invite --key '{tmp_path / 'run key'}' --run mine"
    assert closed.joining_command == command and compose([]).joining_command == "diloco join"
    first, line = invitation([f"/ip4/8.8.8.8/tcp/4100/p2p/{ID}"], command)
    assert "link by which one volunteer joins" in first and line.startswith(f"{command} /ip4/8.8.8.8/")


def test_stages_are_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    times = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    with (tmp_path / "out").open("w") as file:
        stages = Stages(Console(file=file), ["connect", "manifest", "data"], lambda: next(times))
        with stages:
            stages.go_to("connect")
            stages.show("a peer\x1b answers")
            stages.go_to("manifest")
            stages.go_to("data")
            assert stages.name == "data"
    assert (tmp_path / "out").read_text() == "[  2.0s] connect: a peer  answers\n[  3.0s] manifest\n"


def test_stages_on_a_terminal_show_a_bar_for_what_is_under_way() -> None:
    console = Console(force_terminal=True, width=80, record=True, legacy_windows=False)
    stages = Stages(console, ["connect", "state"])
    stages.go_to("state")
    stages.show("1 of 2 MB", 0.5)
    console.print(stages.render())
    shown = console.export_text()
    assert "✓ connect" in shown and "state" in shown and "1 of 2 MB" in shown and "━" in shown
    stages.__exit__(SwarmError, SwarmError("gone"), None)
    console.print(stages.render())
    assert "✗ state" in console.export_text()


@pytest.mark.parametrize(
    ("kind", "live", "said"),
    [
        ("lost", 3, "n1, the peer that was called, vanished (silent); training goes on with 2 other peers"),
        ("lost", 2, "n1, the peer that was called, vanished (silent); training goes on with 1 other peer"),
        ("leave", 1, "n1, the peer that was called, left; training goes on here alone"),
    ],
)
def test_a_volunteer_is_told_when_the_peer_that_it_called_goes(kind: str, live: int, said: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    view, stages = LiveView(console, ["me"], 16, "run"), Stages(console, ["connect"])
    arrival = _Arrival(stages, view, ExitStack(), _called(Address.parse(f"{PLACE},/ip4/203.0.113.9/tcp/1/p2p/{OTHER}")))
    for subject in (OTHER, "QmSomebodyElse"):
        arrival(to_wire(Happened(kind=kind, subject=subject, name="n1", why="silent", live=live)))
    arrival(Happened(kind=kind, subject=OTHER, name="peer", why="silent", live=live))
    assert console.file.getvalue() == f"[  0.0s] {said}\n[  0.0s] {said.replace('n1', OTHER[-6:])}\n"


# -- real peers -------------------------------------------------------------------------------------------------------


def test_a_joiner_imports_no_more_of_hivemind_than_it_needs() -> None:
    code = (
        "import sys; from diloco.swarm.visit.visitor import light_hivemind; light_hivemind(['hivemind']); "
        "import diloco.swarm.visit.look, diloco.swarm.wire.dht_records, hivemind.dht.node; "
        "print(sorted({'scipy', 'hivemind.optim', 'hivemind.averaging', 'hivemind.moe'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
