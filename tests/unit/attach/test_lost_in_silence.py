"""What a loop does beside the hook of its optimizer is an error, a line, or kept."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from diloco.attach.optimizer import layout_of, load_moments_, snapshot
from diloco.attach.saved import flatten_optimizer, restore_optimizer
from diloco.attach.swarm import Attachment, Swarm
from diloco.errors import CheckpointError, ConfigError
from diloco.process import LastingStream
from scripts.families._alone import Peer, play_peers
from tests.support.loops import Direct, LastFlight, attached, made


def opened() -> tuple[Attachment, nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return made(runtime=Direct(LastFlight())).attach(model, optimizer), model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_before_the_attachment_is_entered_is_refused() -> None:
    sync, model, optimizer = opened()
    with pytest.raises(ConfigError, match=r"^attach: a step before .* call open\(\)"):
        step(model, optimizer)
    with sync:
        step(model, optimizer)
        assert sync.steps == 1
    step(model, optimizer)
    sync, model, optimizer = opened()
    sync.close()
    step(model, optimizer)


class Sharp(torch.optim.SGD):
    """Sharpness-aware minimisation: another optimizer moves the parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def second_step(self) -> None:
        self.base.step()

    def step(self, closure: Any = None) -> None:
        self.second_step()


def test_a_step_that_nobody_counts_is_refused_and_one_that_is_counted_is_not() -> None:
    sync, model, attached_one = opened()
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    strange = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    with sync:
        strange.step()
        step(model, attached_one)
        step(model, other)  # beside a step that is counted
        said = "optimizer=SGD is attached and takes no steps, while AdamW moves its parameters"
        with pytest.raises(ConfigError, match=f"^{said}; attach that AdamW"):
            step(model, other)
    step(model, other)

    model = nn.Linear(4, 1)
    sharp = Sharp(model.parameters())
    with made(runtime=Direct(LastFlight())).attach(model, sharp) as sync:
        for _ in range(3):
            step(model, sharp)
        assert sync.steps == 3
        with pytest.raises(ConfigError, match=r"^optimizer=Sharp is attached and takes no steps"):
            sharp.second_step()


@pytest.mark.parametrize("clips", [False, True], ids=["an average", "clipped each time"])
def test_what_is_written_after_the_last_step_stays_unless_the_loop_always_does(clips: bool) -> None:
    model = nn.Linear(4, 1)
    kinds: list[str] = []

    def work(peer: Peer) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        swarm = peer.swarm()
        with swarm, swarm.attach(model, optimizer) as sync:
            for _ in range(10):
                peer.step()
                step(model, optimizer)
                if clips:
                    with torch.no_grad():
                        model.weight.data.clamp_(-0.3, 0.3)
            if not clips:
                model.weight.data.fill_(7.0)
        kinds.extend(kind for kind, _ in peer.events)
        with sync.anchored():
            anchor = model.weight.detach().clone()  # also where the model is another
        assert float(anchor.abs().max()) < 7 and torch.equal(anchor, model.weight) == clips

    play_peers(work)
    assert ("model_kept" in kinds) == (not clips)
    assert torch.all(model.weight == 7.0) == (not clips)


@pytest.mark.parametrize("steps", [8, 10])
def test_a_step_without_gradients_after_an_average_does_not_make_it_usual(steps: int) -> None:
    """Lightning takes one behind its StochasticWeightAveraging."""
    model = nn.Linear(4, 1)

    def work(peer: Peer) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        swarm = peer.swarm()
        with swarm, swarm.attach(model, optimizer):
            for _ in range(steps):
                peer.step()
                step(model, optimizer)
            model.weight.data.fill_(7.0)
            optimizer.step()

    play_peers(work)
    assert torch.all(model.weight == 7.0)


def layers(other_order: bool) -> tuple[nn.Module, torch.optim.AdamW]:
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    parameters = list(model.parameters())
    order = [2, 0, 1] if other_order else [0, 1, 2]
    return model, torch.optim.AdamW([{"params": [parameters[index]]} for index in order])


def trained() -> tuple[nn.Module, torch.optim.AdamW]:
    model, optimizer = layers(False)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 10.0**number)
    optimizer.param_groups[2]["lr"] = 0.5
    optimizer.step()
    return model, optimizer


def test_moments_go_by_the_names_of_parameters() -> None:
    model, optimizer = trained()
    here = dict(model.named_parameters())
    for way in ("donor", "checkpoint"):
        other, theirs = layers(True)
        there = dict(other.named_parameters())
        if way == "donor":
            state = snapshot(optimizer, here)
            assert state is not None and state.layout == layout_of(theirs, there)
            load_moments_(theirs, state, there)
        else:
            tensors, saved = flatten_optimizer(optimizer, here)
            restore_optimizer(theirs, tensors, saved, parameters=there)
            assert theirs.param_groups[0]["lr"] == 0.5
        for name, parameter in there.items():
            kept, own = theirs.state[parameter], optimizer.state[here[name]]
            assert torch.equal(kept["exp_avg"], own["exp_avg"]), (way, name)
    with pytest.raises(CheckpointError, match="other shapes, order or groups"):
        regrouped = torch.optim.AdamW(model.parameters())
        restore_optimizer(regrouped, *flatten_optimizer(optimizer, here), parameters=here)


class Counting(nn.Linear):
    seen: Any = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "scale": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"] + int(state["scale"][0])


def in_sessions(folder: Path, build: Callable[[], nn.Module], *works: Callable[..., None]) -> None:
    for work in works:

        def session(peer: Peer, work: Callable[..., None] = work) -> None:
            model, swarm = build(), peer.swarm()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with swarm, swarm.attach(model, optimizer, checkpoints=folder):
                work(swarm, model)

        play_peers(session)


class Signs(torch.optim.Optimizer):
    """An optimizer that keeps nothing for a parameter, or what no checkpoint can hold."""

    def __init__(self, parameters: Any, keeps: Any = None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.keeps = keeps

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(0.1 * parameter.grad.sign())
            if self.keeps is not None:
                self.state[parameter]["kept"] = self.keeps


def signed_steps(peer: Peer, folder: Path, keeps: Any = None) -> int:
    model, swarm = nn.Linear(1, 1), peer.swarm()
    optimizer = Signs(model.parameters(), keeps)
    with swarm, swarm.attach(model, optimizer, checkpoints=folder) as sync:
        for _ in range(8):
            peer.step()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        swarm.save()
        return sync.version


def test_a_restart_of_an_optimizer_without_state_loses_no_round(tmp_path: Path) -> None:
    """It was taken for one that has not begun: its first round was a warm-up, and was left out."""
    versions, kinds = list[int](), list[str]()
    for _ in range(2):
        [peer] = play_peers(lambda peer: versions.append(signed_steps(peer, tmp_path)))
        kinds += [kind for kind, _ in peer.events]
    assert versions[1] == 2 * versions[0] and "cold_start" not in kinds


def test_an_optimizer_that_no_checkpoint_can_hold_is_refused_at_its_first_step(
    tmp_path: Path,
) -> None:
    text = "^optimizer=Signs: state.0.kept: a checkpoint cannot hold object; attach without"

    def play(peer: Peer) -> None:
        signed_steps(peer, tmp_path, keeps=object())

    with pytest.raises(CheckpointError, match=text):
        play_peers(play)


def test_checkpoints_have_what_modules_keep_and_any_dtype(tmp_path: Path) -> None:
    kinds = {"complex64", "uint16", "float8_e4m3fn", "int8", "bool"}

    def build() -> nn.Module:
        model = Counting(4, 1)
        for kind in kinds:
            model.register_buffer(kind, torch.zeros(2).to(getattr(torch, kind)))
        return model

    def save(swarm: Swarm, model: Any) -> None:
        model.seen = 4
        for kind in kinds:
            getattr(model, kind).copy_(torch.ones(2))
        values = OmegaConf.create({"a": [1]}), numpy.float32(0.5), torch.tensor([2]), tmp_path
        swarm.save(config=values[0], best=values[1], count=values[2], place=values[3])

    def look(swarm: Swarm, model: Any) -> None:
        assert model.seen == 8
        assert all(torch.all(getattr(model, kind).to(torch.complex64) == 1) for kind in kinds)
        assert swarm.state == {
            "config": {"a": [1]},
            "best": 0.5,
            "count": 2,
            "place": str(tmp_path),
        }
        with pytest.raises(
            CheckpointError, match=r"^swarm.save.made: a checkpoint cannot hold obj"
        ):
            swarm.save(made=object())

    in_sessions(tmp_path, build, save, look)


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (torch.zeros(2, dtype=torch.complex128), r"a checkpoint cannot hold torch\.complex128"),
        (torch.eye(2).to_sparse(), r"^table is torch\.sparse_coo"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_at_attach(
    buffer: Tensor, said: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 1)
        model.register_buffer("table", buffer)
        return model

    with pytest.raises(ConfigError, match=said):
        in_sessions(tmp_path, build, lambda *_: None)


def test_a_forked_process_is_no_peer_and_ends() -> None:
    sync, model, optimizer = opened()
    with sync:
        step(model, optimizer)
        sync.forget()  # what the fork calls
        step(model, optimizer)
        assert sync.steps == 1


def test_a_worker_that_imports_the_script_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match=r"^attach: this process is a worker .* `if __name__ =="):
        attached(made())


def test_lines_that_nobody_can_read_end_nothing() -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        lasting = LastingStream(stream)
        print("read", file=lasting, flush=True)
        os.close(reader)
        for _ in range(2):
            print("not read", file=lasting, flush=True)
    assert SimpleNamespace(closed=stream.closed).closed


def test_an_empty_address_is_refused_and_paths_are_as_a_shell_makes_them() -> None:
    for address in ("", [""]):
        with pytest.raises(ConfigError, match=r"^address is empty"):
            made(address=address)
    assert made(address=[]).network.initial_peers == ()
    swarm = made(identity="~/keys/own.key", key_path=None)
    assert swarm._peer.identity == Path.home() / "keys/own.key"
