"""The inner optimizers: which parameters Muon takes, one step, one hook, and state that comes
back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diloco.attach.optimizer import CombinedOptimizer, load_moments_, snapshot
from diloco.attach.saved import flatten_optimizer, restore_optimizer
from diloco.config import compose
from diloco.train import optimizer as inner
from diloco.train.optimizer import Muon, inner_optimizer


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


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    """A learning rate that is set counts for both."""
    net, optimizer = made()
    assert isinstance(optimizer, CombinedOptimizer)
    muon, adamw = optimizer.parts
    assert [p for group in muon.param_groups for p in group["params"]] == [net.layer.weight]
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert rest == {id(p) for p in net.parameters() if p is not net.layer.weight}
    net, optimizer = made()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.clone() for p in net.parameters()]
    step(net, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
    for name, rate in (("muon", 0.15), ("adamw", 0.05)):
        overrides = [f"inner.optimizer={name}", "inner.lr=0.05", "inner.muon_lr_ratio=3"]
        settings = compose(overrides).inner
        rates = {group["lr"] for group in inner_optimizer(Net(), settings).param_groups}
        assert rates == {settings.peak_lr} and settings.peak_lr == pytest.approx(rate)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_it_learns_and_tells_its_hook_once_per_step(name: str) -> None:
    net, optimizer = made(name)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    losses = [step(net, optimizer) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0] and len(calls) == 60


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_takes_over_the_state_of_another(fused: bool) -> None:
    nets = [(Net(), kernel) for kernel in (not fused, fused, fused)]
    made = [(net, torch.optim.AdamW(net.parameters(), fused=kernel)) for net, kernel in nets]
    (net, optimizer), moved, resumed = made
    for _ in range(3):
        step(net, optimizer)
    for other, _ in (moved, resumed):
        other.load_state_dict(net.state_dict())
    state = snapshot(optimizer)
    assert state is not None
    load_moments_(moved[1], state)
    tensors, saved = flatten_optimizer(optimizer)
    restore_optimizer(resumed[1], {name: one.clone() for name, one in tensors.items()}, saved)
    assert resumed[1].param_groups[0]["fused"] is fused, "kernels are this device's own"
    losses = [[step(*both) for _ in range(3)] for both in ((net, optimizer), moved, resumed)]
    # one kernel rounds unlike several
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_muon_steps_along_all_directions_of_a_matrix(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.setattr(inner, "iteration_dtype", lambda device: dtype)
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(shape))
    optimizer = Muon([matrix], lr=0.5, weight_decay=0.0)
    matrix.grad = torch.randn(shape) @ torch.diag(torch.logspace(-2, 0, shape[1]))
    u, _, v = torch.linalg.svd(matrix.grad, full_matrices=False)
    optimizer.step()
    sizes = torch.diag(-u.T @ matrix.detach() @ v.T) / (0.5 * 0.2 * 48**0.5)
    assert sizes.min() > 0.6 and sizes.max() < 1.3


def test_adamw_is_fused_where_all_parameters_are_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **settings: asked.update(settings))
    for places, fused in (("cuda cuda", True), ("cpu cpu", None), ("cuda cpu", None)):
        devices = map(torch.device, places.split())
        parameters: Any = [SimpleNamespace(device=device, ndim=2) for device in devices]
        inner._adamw(parameters, compose().inner)
        assert asked["fused"] is fused
