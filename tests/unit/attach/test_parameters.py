"""What of a model the swarm keeps in step, what it refuses, and which optimizers return to a
copy."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.attach.optimizer import ExchangeGuard, decay_of, unwrap_optimizer
from diloco.attach.parameters import (
    TrainedParams,
    buffer_digests,
    named,
    unwrap_model,
    values_digest,
)
from diloco.attach.swarm import Swarm
from diloco.config import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.codecs import CODECS
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.swarm.node.options import RunSpec
from tests.support.loops import Direct, LastFlight, made


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
        (parameter(torch.zeros(3, dtype=torch.complex64)), "w is complex64, .*view_as_real.*, or"),
        (nn.Linear(2, 2, device="meta"), r"weight has no values yet \(device=meta\); load the mo"),
        (parameter(torch.zeros(3).as_subclass(Part)), "w is a Part, and .*; share .*Distributed"),
        (parameter(torch.tensor([-math.inf]).bfloat16()), "w has NaN or infinite values at attach"),
        (nn.Sequential(nn.LazyLinear(4)), "0.weight has no shape yet; run one batch through the m"),
    ],
)
def test_parameters_that_no_swarm_can_keep_are_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^{why}"):
        swarm().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_has_parameters_of_what_is_attached_and_no_others() -> None:
    model, head, copied = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(4, 3)
    model.empty = nn.Parameter(torch.zeros(0))  # type: ignore[assignment]
    several = [*model.parameters(), *head.parameters()]
    for attached, trained, why in (
        (model, several, r"SGD has 2 parameters that are in no .* \[2\]\); make"),
        ([model, head], copied.parameters(), "SGD has none of the model's 5 trained parameters"),
    ):
        with pytest.raises(ConfigError, match=f"^optimizer={why}"):
            swarm().attach(attached, torch.optim.SGD(trained, lr=0.1))
    alone = swarm().attach([model], torch.optim.SGD(model.parameters(), lr=0.1))
    assert set(alone.parameters) == {"weight", "bias", "empty"}
    head.weight = model.weight  # type: ignore[assignment]
    together = torch.optim.SGD({*model.parameters(), *head.parameters()}, lr=0.1)
    names = set(swarm().attach([model, head], together).parameters)
    assert names == {"0.weight", "0.bias", "0.empty", "1.bias"}


def test_parameters_that_stay_are_named() -> None:
    """Those in no group at once, those without a change after the first round, each once; by
    values, not gradients."""
    told: list[tuple[object, ...]] = []

    def tell(kind: str, fields: dict[str, object]) -> None:
        told.append((kind, fields["names"], str(fields["why"])[:11]))

    names = ("a", "decayed", "rows", "still", "zero")
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(300)) for name in names})
    trained = TrainedParams(model)
    decays = {name: 0.1 * (name == "decayed") for name in names if name != "still"}
    groups = [{"params": [model[name]], "weight_decay": decay} for name, decay in decays.items()]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    trained.check_start("SGD", optimizer.param_groups, tell)
    trained.remember()
    for name, one in model.items():
        one.grad = torch.ones(300) if name == "a" else torch.zeros(300)
    model["rows"].grad[7] = 1.0
    optimizer.step()
    trained.check(tell)
    trained.check(tell)
    still = [("untrained", "still", "are in no g"), ("untrained", "still, zero", "did not mov")]
    assert told == still


def ddp(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    """What torch.compile returns, without the seconds that its import takes."""
    made = nn.Module()
    made._orig_mod = model
    return made


def inside(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Only a part of the model is wrapped."""

    def change(model: nn.Module) -> nn.Module:
        model.head = wrap(model.head)  # type: ignore[arg-type, assignment]
        return model

    return change


def fsdp2(model: nn.Module) -> nn.Module:
    """Which changes the class, in a module of torch."""
    base = type("FSDPModule", (), {"__module__": "torch.distributed.fsdp"})
    model.__class__ = type("FSDPNet", (base, type(model)), {"__module__": "torch.distributed.fsdp"})
    return model


@pytest.mark.parametrize(
    "wraps",
    [*itertools.permutations((ddp, compiled)), (inside(compiled), inside(ddp)), (fsdp2, ddp)],
)
def test_wrappers_change_no_name(wraps: Sequence[Callable[[nn.Module], nn.Module]]) -> None:
    plain, model = Net(), Net()
    wrapped: nn.Module = model
    for wrap in wraps:
        wrapped = wrap(wrapped)
    one, other = (unwrap_model(net) for net in (plain, wrapped))
    specs = [swarm().options(TrainedParams(net), model=net).run for net in (one, other)]
    assert specs[0] == specs[1]
    assert buffer_digests(one) == buffer_digests(other)
    names = [name for name, _ in named(unwrap_model([wrapped, nn.Linear(1, 1)]))]
    assert names[-3:] == ["0.head.bias", "1.weight", "1.bias"]


def test_storage_that_is_bound_anew_is_followed() -> None:
    model = nn.Linear(4, 4)
    trained = TrainedParams(model)
    settings = OuterConfig(method="diloco", sync_every=1, codec_up="fp32", codec_down="fp32")
    replica = Replica(trained, partition(trained.numels, 1), settings)
    model.to(torch.float64)
    trained.check(untold)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1.0)
    delta = torch.empty(20)
    CODECS["fp32"].decode(replica.capture(0), delta)
    torch.testing.assert_close(delta, torch.ones(20))
    replica.load_local_()
    values = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    assert torch.equal(values, replica.anchors[0])


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
        (replace, "weight is another parameter since attach; the swarm has the old one; make such"),
        (to(lambda w: w.view(2, 8)), r"weight has shape \[2, 8\], and had \[4, 4\] when it was"),
        (grow, "adapter is trained since attach, but the swarm does not know it; make such chang"),
        (to(lambda w: w.to(torch.complex64)), "weight is complex64, and outer steps are of real"),
    ],
)
def test_a_model_that_trains_something_else_is_refused(change: Any, why: str) -> None:
    model = nn.Linear(4, 4)
    trained = TrainedParams(model)
    trained.check(untold)
    model.bias.requires_grad_(False)
    trained.check(untold)  # a parameter may be frozen later
    change(model)
    with pytest.raises(ConfigError, match=f"^{why}"):
        trained.check(untold)


def run_of(model: nn.Module) -> RunSpec:
    return swarm().options(TrainedParams(model), model=model).run


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
    matrix = values.view(2, 3)
    others = [values, matrix, values + 1, torch.complex(values, values)]
    digests = {values_digest({"b": values}), *(values_digest({"a": one}) for one in others)}
    assert len(digests) == 5
    assert values_digest({"a": matrix.T.contiguous().T}) == values_digest({"a": matrix})
    assert values_digest({}) is values_digest({"a": torch.zeros(0)}) is None


def test_buffers_that_training_changes_are_named_once() -> None:
    said: list[tuple[str, dict[str, object]]] = []
    model = Net()
    attached = TrainedParams(model)
    model.eval()(torch.randn(8, 4))
    attached.check(lambda kind, fields: said.append((kind, fields)))
    assert not said
    attached = TrainedParams(model)
    model.table.add_(1.0)  # type: ignore[operator]
    for _ in range(2):
        model.train()(torch.randn(8, 4))
        attached.check(lambda kind, fields: said.append((kind, fields)))
    [(kind, fields)] = said
    assert (kind, fields["buffers"], fields["first"]) == ("own_buffers", 3, "norm.running_mean")


Params = list[nn.Parameter]


class Masters(torch.optim.Optimizer):
    """Trains fp32 copies, which it has from the beginning."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.1})
        self.masters = {one: one.detach().float() for one in params}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for one, master in self.masters.items():
            if one.grad is not None:
                one.copy_(master.sub_(one.grad.float(), alpha=0.1))


class Returning(torch.optim.SGD):
    """Every so many steps it goes a part of the way back to slow weights, or to an average in
    each."""

    def __init__(self, params: Params, every: int, part: float = 0.5) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.every, self.part, self.taken = every, part, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = self.param_groups[0]["params"]
        slow = [self.state[one].setdefault("slow", one.clone()) for one in own]
        super().step()
        self.taken += 1
        if self.taken % self.every == 0:
            for one, kept in zip(own, slow, strict=True):
                one.copy_(kept.lerp_(one, self.part))


class Switched(torch.optim.SGD):
    """As those of schedulefree, which refuse a step before train()."""

    def train(self) -> None: ...
    def eval(self) -> None: ...
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError


def params() -> Params:
    return [nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((3, 4), (4,), ())]


def test_an_optimizer_with_two_sequences_of_parameters_is_refused() -> None:
    said = r"^optimizer=Switched has two sequences .* its train\(\) and eval\(\) exchange.*$"
    with pytest.raises(ConfigError, match=said):
        unwrap_optimizer(Switched(params(), lr=0.1))


def guarded(optimizer: torch.optim.Optimizer, every: int = 8, steps: int = 32) -> None:
    """A guarded loop with an exchange after each `every` steps, which moves about half as far."""
    own = [one for group in optimizer.param_groups for one in group["params"]]
    guard = ExchangeGuard({str(index): one for index, one in enumerate(own)})
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        if step % every == 0:
            begun = [one.detach().clone() for one in own]
        for one in own:
            one.grad = (1.0 + torch.randn(one.shape, generator=generator)).to(one)
        guard.check_kept()
        optimizer.step()
        guard.check_step("Some", decay_of(optimizer))
        if (step + 1) % every == 0:
            with guard.exchanging(), torch.no_grad():
                for one, old in zip(own, begun, strict=True):
                    size = 0.5 * (one - old).float().square().mean().sqrt()
                    one.add_((size * torch.randn(one.shape, generator=generator)).to(one))


def wide() -> Params:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in (*[(8, 8)] * 20, (40,), ())]


@pytest.mark.parametrize(
    "made",
    [
        lambda: Masters([one.data.bfloat16().requires_grad_() for one in wide()]),  # type: ignore[misc]
        lambda: Returning(wide(), 1, 0.1),
        lambda: Returning(wide(), 5),
        lambda: Returning(wide(), 10),
    ],
)
def test_an_optimizer_that_returns_to_a_copy_is_named_after_one_exchange(made: Any) -> None:
    said = r"^optimizer=Some returns to a copy .* took back [0-9]+% of what an exchange gave; .*$"
    with pytest.raises(ConfigError, match=said):
        guarded(made(), steps=16)


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Its rate falls to a hundredth and rises again, in each dozen of steps."""
    rates = itertools.cycle([0.1] * 3 + [0.001] * 9)
    group = optimizer.param_groups[0]
    optimizer.register_step_pre_hook(lambda *_: group.update(lr=next(rates)))
    return optimizer


@pytest.mark.parametrize("every", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.optim.AdamW(wide(), lr=0.1, weight_decay=0.5),
        lambda: torch.optim.SGD(wide(), lr=1.0, momentum=0.99),
        lambda: torch.optim.AdamW(wide(), lr=1.0, weight_decay=1.0),  # takes all back in each step
        lambda: scheduled(torch.optim.SGD(wide(), lr=0.1)),
        lambda: torch.optim.AdamW(params(), lr=1e-5),  # too small a rate for bf16
        lambda: torch.optim.SGD(params(), lr=3.0),  # so few values point anywhere
    ],
)
def test_no_other_optimizer_is_taken_for_one_that_returns(made: Any, every: int) -> None:
    guarded(made(), every)


def test_one_process_may_have_its_model_in_rows() -> None:
    """FSDP2 in a process group of one, as in a trial of a script for many."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with made(runtime=Direct(LastFlight())).attach(model, optimizer) as sync:
            for _ in range(4):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            assert sync.steps == 4 and sync._rows is not None
            values = torch.empty(15)
            sync._rows.gather_(values, *partition(sync.parameters.numels, 1), 0)
        weight = values[:12].view(3, 4)
        whole: Any = model.weight
        assert torch.equal(weight, whole.full_tensor()) and not torch.equal(weight, before)
    finally:
        torch.distributed.destroy_process_group()
