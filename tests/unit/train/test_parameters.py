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


def attach(model: nn.Module) -> None:
    swarm().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def untold(kind: str, fields: dict[str, object]) -> None:
    raise AssertionError(kind)


# -- what is trained --------------------------------------------------------------------------------------------------


def test_complex_parameters_are_refused_at_attach() -> None:
    model = nn.ParameterDict({"phase": nn.Parameter(torch.zeros(3, dtype=torch.complex64))})
    with pytest.raises(ConfigError, match=r"^phase is complex64, .*; keep .*view_as_real.*, or freeze it$"):
        attach(model)


def test_parameters_without_values_are_refused_at_attach() -> None:
    with pytest.raises(ConfigError, match=r"^weight has no values yet \(device=meta\); load the model before attach$"):
        attach(nn.Linear(2, 2, device="meta"))


def test_parts_of_parameters_are_refused_at_attach() -> None:
    class Part(Tensor):
        pass

    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
    model["w"] = nn.Parameter(torch.zeros(3).as_subclass(Part))
    with pytest.raises(ConfigError, match=r"^w is a Part, and .*; share the model .*DistributedDataParallel"):
        attach(model)


def cast(model: nn.Linear) -> None:
    model.to(torch.float64)


def rebind(model: nn.Linear) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [cast, rebind])
def test_storage_that_is_bound_anew_after_attach_is_followed(change: Callable[[nn.Linear], None]) -> None:
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


def reshape(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.view(2, 8)


def grow(model: nn.Linear) -> None:
    model.adapter = nn.Parameter(torch.zeros(2))  # type: ignore[assignment]


def rotate(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.to(torch.complex64)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replace, r"^weight is another parameter since attach, and the swarm has the old one; make such changes "),
        (reshape, r"^weight has shape \[2, 8\], and had \[4, 4\] when it was attached; make such changes "),
        (grow, r"^adapter is trained since attach, but the swarm does not know it; make such changes before attach"),
        (rotate, r"^weight is complex64, and outer steps are of real numbers"),
    ],
)
def test_a_model_that_trains_something_else_after_attach_is_refused(
    change: Callable[[nn.Linear], None], why: str
) -> None:
    model = nn.Linear(4, 4)
    trained = Trained(model)
    trained.check(untold)
    change(model)
    with pytest.raises(ConfigError, match=why):
        trained.check(untold)


def test_a_parameter_may_be_frozen_later() -> None:
    model = nn.Linear(4, 4)
    trained = Trained(model)
    model.bias.requires_grad_(False)
    trained.check(untold)


# -- what is not trained ----------------------------------------------------------------------------------------------


def manifest_hash(model: nn.Module) -> str:
    return swarm().options(Trained(model), None, model=("", frozen_digest(model))).run.manifest_hash


def test_peers_with_equal_models_are_in_one_run_and_another_base_is_another_run() -> None:
    one, other = Net(), Net()
    with torch.no_grad():
        other.head.weight.add_(1.0)  # trained, so that the swarm gives it its values
        other.norm.running_mean.add_(1.0)  # type: ignore[union-attr, operator]
    assert manifest_hash(one) == manifest_hash(other)
    other.base.to(torch.float64)  # the same values
    assert manifest_hash(one) == manifest_hash(other)
    with torch.no_grad():
        other.base.weight[3, 3] += 1e-3
    assert manifest_hash(one) != manifest_hash(other)
    spec = [swarm().options(Trained(model), None, model=("", frozen_digest(model))).run for model in (one, other)]
    [difference] = spec[0].differences(spec[1].manifest_text)
    assert difference.startswith("frozen_parameters is ")


def test_a_digest_is_of_names_shapes_and_values() -> None:
    values = torch.arange(6.0)
    known = {
        values_digest({"a": values}),
        values_digest({"b": values}),
        values_digest({"a": values.view(2, 3)}),
        values_digest({"a": values + 1}),
        values_digest({"a": torch.complex(values, values)}),
    }
    assert len(known) == 5
    assert values_digest({"a": values.view(2, 3).T.contiguous().T}) == values_digest({"a": values.view(2, 3)})
    assert values_digest({}) is values_digest({"a": torch.zeros(0)}) is None


def test_buffers_that_training_changes_are_named_once() -> None:
    model = Net()
    buffers = OwnBuffers(model)
    model.table.add_(1.0)  # type: ignore[operator]
    model(torch.randn(8, 4))
    said = buffers.changed()
    assert said is not None and (said["buffers"], said["first"]) == (3, "norm.running_mean")
    model(torch.randn(8, 4))
    assert buffers.changed() is None


def test_buffers_that_stay_are_not_worth_a_word() -> None:
    model = Net()
    buffers = OwnBuffers(model)
    model.eval()(torch.randn(8, 4))
    assert buffers.changed() is None
