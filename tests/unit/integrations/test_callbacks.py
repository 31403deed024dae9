"""What a trainer's callback is told and says, in one process: joining late, ending with the swarm,
and bad input."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import diloco
from diloco.attach.optimizer import unwrap_optimizer
from diloco.attach.parameters import unwrap_model
from diloco.attach.schedulers import ScheduledStep
from diloco.errors import ConfigError, DilocoError, JoinError
from diloco.integrations.membership import FOLDER
from diloco.rundir.files import exclusive
from diloco.swarm.node.position import Position
from tests.support.loops import Direct, LastFlight

# Of the libraries, about themselves and this machine.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]


class Going(LastFlight):
    """A node whose swarm has made 3 outer steps, and makes one more with each exchange."""

    async def exchange(self) -> Position:
        self.version += 1
        return await super().exchange()


class Regression(nn.Module):
    """A model as the Trainer wants it; it remembers which items it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += x[:, 0].int().tolist()
        return {"loss": self.layer(x).square().mean()}


def callback(node: LastFlight, kind: str = "DilocoCallback", **settings: Any) -> Any:
    """One whose swarm is `node`."""
    given = {"run_id": "run", "sync_every": 4, "runtime": Direct(node), **settings}
    return getattr(diloco, kind)(**given)


ONES = [{"x": torch.ones(4)}] * 64
NUMBERS = [{"x": torch.full((4,), float(number))} for number in range(64)]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(NUMBERS)


def trainer(
    directory: Path, *own: Any, model: nn.Module | None = None, data: Any = ONES, **told: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    short = {"max_steps": 16, "per_device_train_batch_size": 2, "logging_steps": 1}
    made = TrainingArguments(str(directory), **{"learning_rate": 1.0, **quiet, **short, **told})
    sets = {"train_dataset": data, "eval_dataset": data[:2] if isinstance(data, list) else None}
    return Trainer(model or Regression(), made, **sets, callbacks=list(own))


def refused(work: Callable[[], object], said: str, kind: type[DilocoError] = ConfigError) -> None:
    with pytest.raises(kind, match=said) as error:
        work()
    assert "\n" not in str(error.value)


def test_a_late_trainer_has_the_swarms_rate_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainerCallback

    sent: list[dict[str, Any]] = []

    class Tracker(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            sent.append(dict(logs))

    trackers = "transformers.trainer.get_reporting_integration_callbacks"
    monkeypatch.setattr(trackers, lambda report_to: [Tracker])
    node = Going()  # 12 of the 16 inner steps are done
    own = callback(node)
    late = trainer(tmp_path, own, gradient_accumulation_steps=2)
    late.train()
    training = [logs for logs in sent if "loss" in logs]
    assert [logs["learning_rate"] for logs in training] == [1 - n / 16 for n in (12, 13, 14, 15)]
    assert [logs["diloco/round"] for logs in training] == [3, 3, 3, 4]
    names = ("peers", "bytes_sent", "wait_share", "tokens_discarded")
    assert {f"diloco/{name}" for name in names} < late.state.log_history[0].keys()
    assert own.attachment.steps == late.state.global_step == 4, "micro-batches are no steps"
    assert own.attachment.tokens == 4 * 2 * 2, "it tells of how many samples a step is made"
    assert node.said[-1] == "close" and "leave" in node.said


def test_the_others_are_told_while_a_trainer_evaluates(tmp_path: Path) -> None:
    node = Going()
    paused: list[bool] = []

    class Model(Regression):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            changes = [said for said in node.said if said in ("pause", "resume")]
            paused.append(changes[-1:] == ["pause"])
            assert paused[-1] is not self.training
            return super().forward(x)

    told = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    trainer(tmp_path, callback(node), model=Model(), **told).train()
    assert sum(paused) == 3, "before the first step, and after the 2nd and the 4th"


def test_a_trainer_that_cannot_join_is_refused(tmp_path: Path) -> None:
    """One whose callback is there twice, whose directory is in use, or whose run is over."""
    own, *two = (callback(Going(), identity=tmp_path / name) for name in "abc")
    for several in ([own, own], two):
        said = "callbacks: a DilocoCallback is there twice; name one"
        refused(trainer(tmp_path, *several).train, said)
    with exclusive(tmp_path / FOLDER, "it"):
        said = "output directory: .* is in use by another process"
        refused(trainer(tmp_path, callback(Going())).train, said)
    node = Going()
    said = "max_steps=12, and the swarm has made so many inner"
    refused(trainer(tmp_path, callback(node), max_steps=12).train, said, JoinError)
    assert node.said[-1] == "close"


@pytest.mark.parametrize("name", ["DilocoCallback", "DilocoLightningCallback"])
def test_a_missing_library_is_named_with_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.find_spec", lambda library: None)
    extra = "lightning" if "Lightning" in name else "hf"
    said = rf"^{name} needs \w+, .* pip install 'diloco\[{extra}\]'$"
    with pytest.raises(ImportError, match=said):
        getattr(diloco, name)


def seen_by(directory: Path, name: str, data: Any = NUMBERS, **arguments: Any) -> list[int]:
    model, own = Regression(), callback(Going(), identity=name)
    told = {"max_steps": 20, "learning_rate": 1e-6, **arguments}
    trainer(directory, own, model=model, data=data, **told).train()
    return model.seen


def test_data_without_an_order_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen_by(tmp_path, "a", train_sampling_strategy="sequential")
    said = capsys.readouterr().err
    assert "diloco: the training data comes in the order of a SequentialSampler, the same" in said
    assert "or give each peer other data: callback.shard(dataset, index=0, of=2)\n" in said
    assert seen_by(tmp_path, "a", data=Stream()) == list(range(16))
    said = capsys.readouterr().err
    assert "diloco: the training data is a stream, which every peer reads from its begin" in said
    assert "give each peer its share: callback.shard(dataset)\n" in said


def test_a_callback_shares_a_stream_before_there_is_a_swarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = callback(Going())
    trainer(tmp_path, own, data=own.shard(Stream())).train()
    assert "stream" not in capsys.readouterr().err and own._membership._active._numbers[0] == 1
    assert len(own.shard(NUMBERS, index=1, of=3)) == 21
    said = r"shard\(list\): it has a length, so the callback gives each peer its own order"
    refused(lambda: own.shard(NUMBERS), said)


def fit(directory: Path, own: Any, *others: Any, workers: int = 0, **told: Any) -> Any:
    """A module that was trained, and its trainer."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rates, self.seen = nn.Linear(4, 1), list[float](), list[int]()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            self.seen += batch[:, 0].int().tolist()
            return self.layer(batch / 64).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            made = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
            return [made], [{"scheduler": scheduler, "interval": "step"}]

    seed_everything(42)
    enabled = [f"enable_{name}" for name in ("checkpointing", "progress_bar", "model_summary")]
    quiet = {"accelerator": "cpu", **dict.fromkeys(["logger", *enabled], False)}
    module, data = Module(), torch.arange(64.0)[:, None].expand(64, 4)
    told = {"max_steps": 16, "default_root_dir": directory, **told}
    one = Trainer(callbacks=[own, *others], **quiet, **told)
    one.fit(module, DataLoader(data, batch_size=2, shuffle=True, num_workers=workers))
    return module, one


def lightning(**settings: Any) -> Any:
    return callback(Going(), "DilocoLightningCallback", **settings)


def lightened(directory: Path, name: str, workers: int = 0) -> list[int]:
    module, one = fit(directory, lightning(identity=name), max_steps=20, workers=workers)
    assert one.callback_metrics["diloco/peers"] == 1 and one.callback_metrics["diloco/round"] >= 3
    return module.seen  # type: ignore[no-any-return]


@pytest.mark.parametrize("seen", [seen_by, lightened])
def test_peers_of_one_seed_train_on_other_batches(
    seen: Callable[..., list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, again = (seen(tmp_path, name) for name in "aba")
    assert a == again != b and len(set(a)) == len(a) == 16
    line = "diloco: this peer reads its data in an order of its own "
    said = [one for one in capsys.readouterr().err.splitlines() if one.startswith(line)]
    assert said[0] == said[2] != said[1] and len(said) == 3


def test_lightning_joins_late_with_the_swarms_rate(tmp_path: Path) -> None:
    told = {"accumulate_grad_batches": 2, "max_steps": -1, "max_epochs": 1}
    module, _ = fit(tmp_path, own := lightning(), **told)
    assert own.attachment.steps == 4, "it ends with the swarm"
    # After each micro-batch, and after the schedule's own step, which follows that of the
    # optimizer.
    assert module.rates == [1 / 13, 1 / 14, 1 / 14, 1 / 15, 1 / 15, 1 / 16, 1 / 16, 1 / 17]


@pytest.mark.filterwarnings("ignore:SWA is currently only supported:UserWarning")
def test_lightning_may_put_another_schedule_in_the_place_of_one(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    average = StochasticWeightAveraging(0.5, swa_epoch_start=1, annealing_epochs=1)
    module, _ = fit(tmp_path, lightning(), average, limit_train_batches=2)
    # its own schedule begins with the swarm's rate, and ends its epoch of two batches at .5
    assert module.rates == [1 / 13, 0.5, 0.5, 0.5]


def test_lightning_may_not_change_what_is_trained_in_the_middle(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import BackboneFinetuning, ModelPruning

    own = lightning()
    for other in (BackboneFinetuning(), ModelPruning("l1_unstructured")):
        name = type(other).__name__
        said = f"^callbacks: {name} changes which parameters are trained, .* leave it out"
        refused(partial(own.on_train_start, SimpleNamespace(callbacks=[other]), None), said)


class FullyShardedDataParallel(nn.Module):
    """Has the name of FSDP1's."""


class Mastered(torch.optim.SGD):
    """Marked as Apex marks optimizers that train fp32 copies."""

    master_weights = True


ZeroOptimizer = type("ZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero"})


def test_the_pace_of_the_schedules_of_accelerate_is_known() -> None:
    accelerated = SimpleNamespace(scheduler="inside", step_with_optimizer=True)
    for split, times in ((False, 4), (True, 1)):
        accelerated.split_batches = split
        assert ScheduledStep.of(accelerated, 4) == ("inside", times, 1)
    assert ScheduledStep.of("plain", 4) == ("plain", 1, 1)


def test_what_cannot_be_attached_is_refused() -> None:
    said = "^model=FullyShardedDataParallel: FSDP1 makes flat parameter"
    refused(lambda: unwrap_model(FullyShardedDataParallel()), said)
    said = "^optimizer=ZeroOptimizer: DeepSpeed trains flat copies"
    refused(lambda: unwrap_optimizer(ZeroOptimizer()), said)
    zero = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})([nn.Parameter(torch.zeros(1))])
    refused(lambda: unwrap_optimizer(zero), "^optimizer=ZeroRedundancyOptimizer has its state on")
    mastered = Mastered([nn.Parameter(torch.zeros(1))])
    said = "^optimizer=Mastered trains copies of its own; drop"
    refused(lambda: unwrap_optimizer(mastered), said)
