"""A swarm of one peer, with outer rate 1 and no momentum, trains as no swarm does; who goes on
from its checkpoint ends as without an interruption; the moments of a late peer, whose groups have
another order, are those of the parameters of the same names, or it starts cold.

All are equal bit by bit; the loop without a swarm rounds as an exchange does, `a - (a - p)`.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from diloco.errors import CheckpointError, ConfigError
from scripts.families import WORKS, Member, refused
from scripts.families._alone import Peer, play_peers

SOURCES = ("torch", "schedulefree", "bitsandbytes", "torchao", "pytorch-optimizer", "heavyball")
ROUNDS, EVERY = 4, 4
# modules, distributions and what is no optimizer of a loop by itself
LIBRARIES = {
    "torch.optim": ("torch", {"Optimizer"}),
    "schedulefree": ("schedulefree", set()),
    "bitsandbytes.optim": ("bitsandbytes", {"GlobalOptimManager"}),
    "torchao.optim": ("torchao", set()),
    "pytorch_optimizer": ("pytorch-optimizer", {"PCGrad", "SafeFP16Optimizer"}),
    "heavyball": ("heavyball", {"SplitOpt"}),
}
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # the arithmetic, without its compiler
# Slow imports, before the processes of members are forked: each optimizer takes in the compiler.
for module in ("torch._dynamo", *LIBRARIES):
    with contextlib.suppress(ModuleNotFoundError):
        import_module(module)
QUICK = {"torch.optim.AdamW", "torch.optim.Muon"}
Make = Callable[[nn.Module, bool], Any]


def members() -> Iterable[Member]:
    for module, (distribution, without) in LIBRARIES.items():
        if find_spec(module.partition(".")[0]) is None:
            yield Member(module, module, needs=distribution)
            continue
        for name in sorted(_classes(module) - without):
            yield Member(f"{module}.{name}", module, f"{module}.{name}" in QUICK)


def _classes(module: str) -> set[str]:
    found = vars(import_module(module))
    return {
        name
        for name, kind in found.items()
        if isinstance(kind, type) and (issubclass(kind, torch.optim.Optimizer) or _steps(kind))
    }


def _steps(kind: type) -> bool:
    return hasattr(kind, "step") and hasattr(kind, "param_groups")


# -- a small loop ----------------------------------------------------------------------------------


def network(only_matrices: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=not only_matrices) for _ in range(3)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def groups(model: nn.Module, other_order: bool) -> list[nn.Parameter]:
    parameters = list(model.parameters())
    return parameters[::-1] if other_order else parameters


def gradient(model: nn.Module, step: int, graph: bool = False) -> Tensor:
    """The loss of a step, whose gradients are there; those of the layers differ in size."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 8, generator=generator)
    loss = (model(inputs) - inputs.flip(1)).square().mean()
    loss.backward(create_graph=graph)
    return loss


class Loop:
    """A model, its optimizer, and the way in which its steps are taken."""

    def __init__(self, name: str, other_order: bool = False) -> None:
        module, _, kind = name.rpartition(".")
        self.how = "closure" if kind.endswith("Closure") else STEPS.get(kind, "step")
        self.kind, self.model = kind, network(kind in MATRICES)
        if self.how == "sparse":
            self.model = nn.Embedding(8, 4, sparse=True)
        torch.manual_seed(1)  # some draw
        parameters = groups(self.model, other_order)
        self.optimizer = made(getattr(import_module(module), kind), kind, parameters)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        if self.how == "closure":
            if self.kind in AROUND:  # which climb along gradients that are there already
                gradient(self.model, number)
            self.optimizer.step(self._closure(number))
            self.optimizer.zero_grad()
            return
        if self.how == "sparse":
            self.model(torch.arange(8)).square().sum().backward()
        else:
            gradient(self.model, number, graph=self.how == "graph")
        if self.how == "two":
            self.optimizer.first_step(zero_grad=True)
            gradient(self.model, number)
            self.optimizer.second_step(zero_grad=True)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _closure(self, number: int) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            self.model.zero_grad()
            with torch.enable_grad():
                return gradient(self.model, number)

        return closure

    def values(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.model.named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        """What the optimizer keeps for each parameter, by its name."""
        return {
            f"{name}.{key}": value.detach().float().clone()
            for name, one in self.model.named_parameters()
            for key, value in self.optimizer.state.get(one, {}).items()
            if isinstance(value, Tensor) and value.shape == one.shape
        }


# Two loops of Kron's differ by so much, by where their tensors lie in memory; so do those of
# heavyball after torch.save and torch.load of their state_dict().
LAST_BITS = 1e-6
MATRICES = {"Muon", "AdaMuon", "NorMuon"}
STEPS = {"LBFGS": "closure", "SparseAdam": "sparse", "AdaHessian": "graph", "SophiaH": "graph"}
STEPS |= dict.fromkeys(("SAM", "GSAM", "WSAM", "LookSAM", "FriendlySAM", "BSAM"), "closure")
STEPS |= dict.fromkeys(("AliG", "SAMWrapper", "MSAMLaProp"), "closure")
AROUND = {"SAM", "GSAM", "WSAM", "LookSAM", "FriendlySAM"}


def made(kind: type, name: str, parameters: list[nn.Parameter]) -> Any:
    """An instance, with a rate that moves something in so few steps."""
    if name in AROUND:
        return kind(parameters, base_optimizer=torch.optim.SGD, lr=0.05)
    if name in ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference", "Lookahead", "TRAC"):
        return kind(torch.optim.SGD(parameters, lr=0.05))
    if name in ("OrthoGrad", "SAMWrapper"):
        inner = torch.optim.SGD(parameters, lr=0.05)
        return kind(inner) if name == "OrthoGrad" else kind(parameters, wrapped_optimizer=inner)
    if name == "CPUOffloadOptimizer":
        return kind(parameters, torch.optim.AdamW, lr=0.01)
    first: Exception | None = None
    if "LARS" in name:  # which has a momentum of 0, and does not take it
        return kind(parameters, lr=0.01, momentum=0.9)
    for settings in ({"lr": 0.01}, {}, {"lr": 0.01, "momentum": 0.9}, {"num_iterations": 16}):
        try:
            return kind(parameters, **settings)
        except (TypeError, ValueError) as error:
            first = first or error
    assert first is not None
    raise first


# -- the oracles -----------------------------------------------------------------------------------


def play(name: str) -> str:
    warnings.simplefilter("ignore")
    try:
        plain, again = [_plain(name) for _ in range(2)]
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return f"skipped: without a swarm it raises {text[:120]}"
    limit = LAST_BITS if re.search("Kron|PSGD|QSGD|LATHER", name) else 0.0
    _compare("of two loops without a swarm", plain, again, limit)
    try:
        _compare("of a swarm of one", plain, _alone(name), limit)
    except ConfigError as error:
        return refused(error)
    try:
        _resumes(name, limit)
    except CheckpointError as error:
        return refused(error) if "attach without checkpoints" in str(error) else f"bug: {error}"
    try:
        _late(name)
    except ConfigError as error:  # such as one whose first step puts the parameters elsewhere
        return refused(error)
    return WORKS


def _plain(name: str) -> dict[str, Tensor]:
    loop = Loop(name)
    anchor = loop.values()
    for number in range(ROUNDS * EVERY):
        loop.step(number)
        if number % EVERY == EVERY - 1:
            with torch.no_grad():
                for key, parameter in loop.model.named_parameters():
                    parameter.copy_(anchor[key] - (anchor[key] - parameter))
            anchor = loop.values()
    return loop.values()


def _alone(name: str) -> dict[str, Tensor]:
    loop = Loop(name)

    def work(peer: Peer) -> None:
        swarm = peer.swarm()
        with swarm, swarm.attach(loop.model, loop.optimizer):
            for number in range(ROUNDS * EVERY):
                peer.step()
                loop.step(number)
            assert swarm.steps == ROUNDS * EVERY, f"{swarm.steps} steps counted"

    play_peers(work)
    return loop.values()


def _resumes(name: str, limit: float) -> None:
    """In two sessions, and in one."""

    def session(folder: str, begin: int, end: int) -> dict[str, Tensor]:
        loop = Loop(name)

        def work(peer: Peer) -> None:
            swarm = peer.swarm()
            with swarm, swarm.attach(loop.model, loop.optimizer, checkpoints=folder):
                assert swarm.steps == begin
                for number in range(begin, end):
                    peer.step()
                    loop.step(number)
                swarm.save()

        play_peers(work)
        return loop.values()

    half = ROUNDS * EVERY // 2
    whole = session("whole", 0, 2 * half)
    session("stopped", 0, half)
    _compare("after a restart", whole, session("stopped", half, 2 * half), limit)


def _late(name: str) -> None:
    donor, late = Loop(name), Loop(name, other_order=True)
    history: list[dict[str, Tensor]] = []
    begun: list[dict[str, Tensor]] = []

    def first(peer: Peer) -> None:
        swarm = peer.swarm()
        with swarm, swarm.attach(donor.model, donor.optimizer):
            for number in range(4 * EVERY):
                peer.step()
                history.append(donor.moments())
                donor.step(number)
            history.append(donor.moments())

    def second(peer: Peer) -> None:
        swarm = peer.swarm()
        with swarm, swarm.attach(late.model, late.optimizer):
            begun.append(late.moments())
            for number in range(EVERY):
                peer.step()
                late.step(number)

    peers = play_peers(first, second, late_s=1.5 * EVERY)
    cold = any(kind == "cold_start" for kind, _ in peers[1].events)
    [own] = begun
    if cold or not any(history[-1]):
        return
    same = [
        own.keys() == then.keys() and all(torch.equal(own[key], then[key]) for key in own)
        for then in history
    ]
    assert own and any(same), "a late peer has other moments than its donor, by name"


def _compare(
    what: str, here: dict[str, Tensor], there: dict[str, Tensor], limit: float = 0.0
) -> None:
    for name, values in here.items():
        off = float((values - there[name]).abs().max() / values.abs().max())
        same = off <= limit if limit else torch.equal(values, there[name])
        assert same, f"{what}: {name} differs by {off:.1e}"
