"""The inner optimizers: which parameters Muon takes, one step, one hook, and state that comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from diloco.config import compose
from diloco.train.inner import Pair, inner_optimizer
from diloco.train.session import flatten_optimizer, restore_optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.tanh(self.layer(self.embed_tokens(tokens))))


def made(name: str = "muon") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, inner_optimizer(net, compose([f"inner.optimizer={name}", "inner.lr=0.05"]).inner)


def step(net: Net, optimizer: torch.optim.Optimizer) -> float:
    tokens = torch.arange(8)
    loss = nn.functional.cross_entropy(net(tokens), tokens.roll(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def test_muon_takes_the_matrices_inside_the_model_and_adamw_the_rest() -> None:
    net, optimizer = made()
    assert isinstance(optimizer, Pair)
    muon, adamw = optimizer.parts
    assert [p for group in muon.param_groups for p in group["params"]] == [net.layer.weight]
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert rest == {id(p) for p in net.parameters() if p is not net.layer.weight}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_it_learns_and_tells_its_hook_once_per_step(name: str) -> None:
    net, optimizer = made(name)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    losses = [step(net, optimizer) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0] and len(calls) == 60


def test_a_learning_rate_that_is_set_counts_for_both() -> None:
    net, optimizer = made()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.clone() for p in net.parameters()]
    step(net, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize(("name", "lr"), [("muon", 0.15), ("adamw", 0.05)])
def test_muon_takes_a_multiple_of_the_learning_rate_of_adamw(name: str, lr: float) -> None:
    settings = compose([f"inner.optimizer={name}", "inner.lr=0.05", "inner.muon_lr_ratio=3"]).inner
    assert settings.peak_lr == pytest.approx(lr)
    assert {group["lr"] for group in inner_optimizer(Net(), settings).param_groups} == {settings.peak_lr}


def test_its_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    net, optimizer = made()
    for _ in range(3):
        step(net, optimizer)
    tensors, saved = flatten_optimizer(optimizer)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    expected = [step(net, optimizer) for _ in range(3)]
    again, fresh = made()
    again.load_state_dict(weights)
    restore_optimizer(fresh, tensors, saved)
    assert [step(again, fresh) for _ in range(3)] == expected
