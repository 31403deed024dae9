"""The two sides of a comparison: a loop without a swarm, and the same loop as a swarm of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import diloco
from diloco.attach.attachment import Attachment
from scripts.families._alone import Peer, play_peers

STEPS, EVERY = 16, 4
Ended = dict[str, Any]  # what a loop ends with: tensors and plain values, by what they are


class Side:
    """What a loop asks; without a peer, it gets nothing."""

    def __init__(self, peer: Peer | None = None) -> None:
        self._peer = peer
        self._callbacks: list[Any] = []
        self._attachments: list[Attachment] = []

    @contextmanager
    def attached(self, model: Any, optimizer: Any, *schedules: Any, **own: Any) -> Iterator[Any]:
        """A loop that its user has written is a peer inside."""
        if self._peer is None:
            yield None
            return
        swarm = self._peer.swarm()
        with swarm, swarm.attach(model, optimizer, schedulers=schedules, **own) as sync:
            self._attachments.append(sync)
            yield swarm

    def callbacks(self, kind: str) -> list[Any]:
        """What makes a trainer a peer."""
        if self._peer is None:
            return []
        self._callbacks.append(getattr(diloco, kind)(**self._peer.settings()))
        return self._callbacks[-1:]

    def check(self, steps: int) -> None:
        """All steps were the peer's, and it exchanged."""
        syncs = [*self._attachments, *(one.attachment for one in self._callbacks)]
        assert syncs[-1].steps == steps, f"{syncs[-1].steps} of {steps} steps were counted"
        assert syncs[-1].version == steps // EVERY, f"{syncs[-1].version} exchanges"


def play_both(train: Callable[[Side], Ended], tried: int = 0) -> None:
    """The loop ends in a swarm of one as it ends without; `steps` of them is how many it took.

    Before those it may have `tried` some, and gone back.
    """
    with rounded(tried), _in_folder("plain"):
        plain = train(Side())
    with _in_folder("alone"):
        alone = play_alone(train, plain["steps"])
    compare("", plain, alone)


def play_alone(train: Callable[[Side], Ended], steps: int | None = None) -> Ended:
    """What a loop ends with as a swarm of one, which has counted so many `steps`."""
    ended = Ended()

    def work(peer: Peer) -> None:
        side = Side(peer)
        ended.update(train(side))
        if steps is not None:
            side.check(steps)

    play_peers(work)
    return ended


@contextmanager
def _in_folder(name: str) -> Iterator[None]:
    Path(name).mkdir()
    with contextlib.chdir(name):
        yield


@contextmanager
def rounded(tried: int) -> Iterator[None]:
    """After every `EVERY`-th step the parameters are rounded, as an exchange does."""
    count, inside, anchors = -tried, 0, dict[Tensor, Tensor]()  # of every model that was trained

    def parameters(optimizer: Any) -> list[Tensor]:
        return [one for group in optimizer.param_groups for one in group["params"]]

    def before(optimizer: Any, *_: object) -> None:
        nonlocal inside
        inside += 1
        for one in parameters(optimizer) if count >= 0 else ():
            anchors.setdefault(one, one.detach().clone())

    def after(optimizer: Any, *_: object) -> None:
        nonlocal count, inside
        inside -= 1  # some call the step of another one
        count += not inside
        is_due = not inside and count > 0 and count % EVERY == 0
        for one in parameters(optimizer) if is_due else ():
            one.detach().copy_(anchors[one] - (anchors[one] - one.detach()))
            anchors[one] = one.detach().clone()

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    yield
    for hook in hooks:
        hook.remove()


def compare(at: str, here: Any, there: Any) -> None:
    """Raise `AssertionError` that names the first difference."""
    if isinstance(here, Mapping):
        assert here.keys() == there.keys(), f"{at}: {sorted(here)} and {sorted(there)}"
        for name in here:
            compare(f"{at}.{name}".lstrip("."), here[name], there[name])
    elif isinstance(here, list | tuple):
        assert len(here) == len(there), f"{at}: {here} and {there}"
        for number, both in enumerate(zip(here, there, strict=True)):
            compare(f"{at}[{number}]", *both)
    elif isinstance(here, Tensor | float):
        one, other = torch.as_tensor(here), torch.as_tensor(there)
        off = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
        same = torch.equal(one.nan_to_num(), other.nan_to_num())
        assert same, f"{at} differs by {off:.1e} in a swarm"
    else:
        assert here == there, f"{at}: {here!r} and {there!r} in a swarm"


def values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of parameters and buffers, whole."""
    return {name: _whole(value).detach().clone() for name, value in model.state_dict().items()}


def _whole(value: Any) -> Tensor:
    tensor: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor


# -- a small loop ----------------------------------------------------------------------------------


def network() -> nn.Sequential:
    """Which has buffers, and draws random numbers."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 16), nn.Linear(16, 8)
    return nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), last)


def batch(number: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = (model(inputs) - inputs.flip(1)).square().mean()
    return loss


def make_group() -> None:
    """A process group of one."""
    names: Any = dist  # whose names of stores have no types
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=names.HashStore(), rank=0, world_size=1)
