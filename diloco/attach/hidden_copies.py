"""Tries out, on small copies, whether an optimizer goes on from parameters that somebody changes
between its steps.

Those with a second sequence do not: masters, averages of the parameters, slow weights to which they
return. They would undo what is adopted of the swarm, at once or over some steps, and nothing would
fail.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from diloco.attach.devices import forked_random
from diloco.errors import ConfigError

MOST = 1 << 18  # elements of a group that are copied
# steps before the change, and after it; slow weights come back every 5 to 10 steps
BEFORE, AFTER = 3, 12
STAYS = 0.75  # of the change, at least
KNOWN = ("torch.optim", "diloco.attach.muon")


def refuse_hidden_copies(optimizer: Any) -> None:
    """Raise `ConfigError` for an optimizer that undoes changes of its parameters; what cannot be
    tried is believed."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith(KNOWN):
        return
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(
            f"optimizer={name} has two sequences of parameters, which its train() and eval()"
            " exchange, and the swarm would adopt one of them; attach an optimizer with one, such"
            " as AdamW"
        )
    try:
        share = _share(optimizer)
    except Exception:  # whatever a class that nobody here knows raises
        return
    if share < STAYS:
        raise ConfigError(
            f"optimizer={name} returns to a copy of the parameters that it keeps:"
            f" {max(share, 0.0):.0%} of a change between two steps is left after {AFTER} more, so"
            " it would undo what the swarm gives; attach an optimizer without such a copy (instead"
            " of masters: fp32 parameters and torch.autocast)"
        )


def _copy(optimizer: Any) -> tuple[Any, list[Tensor]]:
    """A copy over copies of the smallest parameters, which learning rate and weight decay hardly
    move; and these."""
    nested = [optimizer, *(one for one in vars(optimizer).values() if isinstance(one, Optimizer))]
    inside = [one for one in nested if isinstance(one, Optimizer)]  # which has parameters and state
    memo: dict[int, Any] = {id(one): object.__new__(type(one)) for one in nested}
    copies: dict[int, nn.Parameter] = {}
    for params in (group["params"] for one in inside for group in one.param_groups):
        ordered = sorted(params, key=Tensor.numel)
        sizes = accumulate(one.untyped_storage().nbytes() // one.element_size() for one in ordered)
        small = {id(one) for one, upto in zip(ordered, sizes, strict=True) if upto <= MOST}
        for one in params:
            # with its storage, which the optimizer may know under another name
            if id(one) not in copies:
                copies[id(one)] = nn.Parameter(
                    deepcopy(one.data, memo) if id(one) in small else one.new_empty(0)
                )
        memo[id(params)] = [copies[id(one)] for one in params if copies[id(one)].numel()]
    memo |= copies
    for one in inside:
        memo |= {
            id(kept): {}
            for key, kept in one.state.items()
            if id(key) in copies and not copies[id(key)].numel()
        }
    for one in nested:
        # put there by a scheduler
        own = {key: value for key, value in vars(one).items() if key != "step"}
        memo |= {id(value): type(value)() for key, value in own.items() if key.endswith("_hooks")}
        large = (
            leaf
            for leaf in _pytree.tree_leaves(own)
            if isinstance(leaf, Tensor) and leaf.numel() > MOST
        )
        memo = {id(leaf): leaf.new_empty(0) for leaf in large} | memo  # such as a master
        memo[id(one)].__dict__.update(deepcopy(own, memo))
    for group in (group for one in inside for group in memo[id(one)].param_groups):
        group |= {
            key: 1e-3 * group[key] for key in ("lr", "weight_decay") if group.get(key) is not None
        }
    return memo[id(optimizer)], [one for one in copies.values() if one.numel()]


def _share(optimizer: Any) -> float:
    """How much of a change of the parameters is left after some steps; of the dtype that keeps
    least."""
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu").to(
            like
        )

    (one, own), (other, changed) = _copy(optimizer), _copy(optimizer)
    with forked_random(own[0].device), torch.no_grad():
        changes = [noise(p) * (0.1 * p.float().square().mean().sqrt().clamp(min=0.1)) for p in own]
        for step in range(BEFORE + AFTER):
            if step == BEFORE:
                starts = [p.clone() for p in changed]
                for p, change in zip(changed, changes, strict=True):
                    p.add_(change)
                # as rounded
                changes = [(p - start).float() for p, start in zip(changed, starts, strict=True)]
            for p, q in zip(own, changed, strict=True):
                p.grad = noise(p)
                q.grad = p.grad.clone()
            for made in (one, other):
                type(made).step(made)
    left, whole = defaultdict[torch.dtype, float](float), defaultdict[torch.dtype, float](float)
    for p, q, change in zip(own, changed, changes, strict=True):
        left[p.dtype] += float(((q - p).detach().float() * change).sum())
        whole[p.dtype] += float(change.square().sum())
    return min(left[dtype] / whole[dtype] for dtype in left)
