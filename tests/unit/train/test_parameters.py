"""What of a model the swarm keeps in step, what it refuses, and what it says of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diloco.config import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.codecs import codec
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.swarm.node.options import RunSpec
from diloco.train.api import Swarm
from diloco.train.parameters import OwnBuffers, Trained, frozen_digest, values_digest


class Net(nn.Module):
    """A trained layer, a frozen one, running statistics, and a table that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.base(x)))  # type: ignore[no-any-return]


def swarm() -> Swarm:
    return Swarm(run_id="run", identity=Path("a"), sync_every=4)


def untold(kind: str, fields: dict[str, object]) -> None:
    raise AssertionError(kind)


class Part(Tensor):
    """Of a parameter that is elsewhere, too."""


def parameter(values: Tensor) -> nn.Module:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
    model["w"] = nn.Parameter(values)
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (parameter(torch.zeros(3, dtype=torch.complex64)), "w is complex64, .*; keep .*view_as_real.*, or freeze it$"),
        (nn.Linear(2, 2, device="meta"), r"weight has no values yet \(device=meta\); load the model before attach$"),
        (parameter(torch.zeros(3).as_subclass(Part)), "w is a Part, and .*; share the model .*DistributedDataParallel"),
    ],
)
def test_parameters_that_no_swarm_can_keep_are_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^{why}"):
        swarm().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def cast(model: nn.Linear) -> None:
    model.to(torch.float64)


def rebind(model: nn.Linear) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [cast, rebind])
def test_storage_that_is_bound_anew_is_followed(change: Callable[[nn.Linear], None]) -> None:
    model = nn.Linear(4, 4)
    trained = Trained(model)
    settings = OuterConfig(method="diloco", sync_every=1, codec_up="fp32", codec_down="fp32")
    replica = Replica(trained, partition({name: p.numel() for name, p in trained.items()}, 1), settings)
    change(model)
    trained.check(untold)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1.0)
    delta = torch.empty(20)
    codec("fp32").decode(replica.encode(0, 0), delta)
    torch.testing.assert_close(delta, torch.ones(20))
    replica.load_local_()
    assert torch.equal(torch.cat([p.detach().float().flatten() for p in model.parameters()]), replica.anchors[0])


def replace(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach().clone())


def grow(model: nn.Linear) -> None:
    model.adapter = nn.Parameter(torch.zeros(2))  # type: ignore[assignment]


def to(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear], None]:
    def make(model: nn.Linear) -> None:
        model.weight.data = change(model.weight.data)

    return make


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replace, "weight is another parameter since attach, and the swarm has the old one; make such changes "),
        (to(lambda w: w.view(2, 8)), r"weight has shape \[2, 8\], and had \[4, 4\] when it was attached; make such"),
        (grow, "adapter is trained since attach, but the swarm does not know it; make such changes before attach"),
        (to(lambda w: w.to(torch.complex64)), "weight is complex64, and outer steps are of real numbers"),
    ],
)
def test_a_model_that_trains_something_else_is_refused(change: Callable[[nn.Linear], None], why: str) -> None:
    model = nn.Linear(4, 4)
    trained = Trained(model)
    trained.check(untold)
    model.bias.requires_grad_(False)
    trained.check(untold)  # a parameter may be frozen later
    change(model)
    with pytest.raises(ConfigError, match=f"^{why}"):
        trained.check(untold)


def run_of(model: nn.Module) -> RunSpec:
    return swarm().options(Trained(model), None, model=("", frozen_digest(model))).run


def test_peers_with_another_base_are_in_another_run() -> None:
    one, other = Net(), Net()
    with torch.no_grad():
        other.head.weight.add_(1.0)  # trained, so that the swarm gives it its values
        other.norm.running_mean.add_(1.0)  # type: ignore[union-attr, operator]
    assert run_of(one).manifest_hash == run_of(other).manifest_hash
    other.base.to(torch.float64)  # the same values
    assert run_of(one).manifest_hash == run_of(other).manifest_hash
    with torch.no_grad():
        other.base.weight[3, 3] += 1e-3
    assert run_of(one).manifest_hash != run_of(other).manifest_hash
    [difference] = run_of(one).differences(run_of(other).manifest_text)
    assert difference.startswith("frozen_parameters is ")


def test_a_digest_is_of_names_shapes_and_values() -> None:
    values = torch.arange(6.0)
    others = [values.view(2, 3), values + 1, torch.complex(values, values)]
    assert len({values_digest({"b": values}), *(values_digest({"a": one}) for one in (values, *others))}) == 5
    assert values_digest({"a": values.view(2, 3).T.contiguous().T}) == values_digest({"a": values.view(2, 3)})
    assert values_digest({}) is values_digest({"a": torch.zeros(0)}) is None


def test_buffers_that_training_changes_are_named_once() -> None:
    """Those that stay are not worth a word."""
    model = Net()
    buffers = OwnBuffers(model)
    model.eval()(torch.randn(8, 4))
    assert buffers.changed() is None
    buffers = OwnBuffers(model)
    model.table.add_(1.0)  # type: ignore[operator]
    model.train()(torch.randn(8, 4))
    said = buffers.changed()
    assert said is not None and (said["buffers"], said["first"]) == (3, "norm.running_mean")
    model(torch.randn(8, 4))
    assert buffers.changed() is None
