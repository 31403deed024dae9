"""How a trainer's peer ends that does not come to its end: by a signal, by an error."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.errors import DataError, DivergedError
from tests.support.loops import Direct
from tests.unit.integrations.test_callbacks import Going, Regression, fit, pytestmark, trainer

__all__ = ["pytestmark"]  # of the libraries


class Node(Going):
    async def snapshot(self) -> Any:
        raise AssertionError("not in these tests")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """That of peers of this process; signals end programs as usual."""
    made, before = Node(), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr("diloco.attach.swarm.NodeThread", lambda: Direct(made))
    yield made
    signal.signal(signal.SIGTERM, before)


def real(kind: str = "DilocoCallback") -> Any:
    import diloco

    return getattr(diloco, kind)(run_id="run", sync_every=4, quiet=True)


class Told(Regression):
    """A signal comes with its second batch."""

    def __init__(self, evaluating: bool = False) -> None:
        super().__init__()
        self._evaluating = evaluating

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(self.seen) == 4 and self.training is not self._evaluating:
            signal.raise_signal(signal.SIGTERM)
        return super().forward(x)


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_signal_ends_a_trainer_with_a_checkpoint(
    evaluating: bool, node: Node, tmp_path: Path, monkeypatch: Any
) -> None:
    """After the batch under way; while it evaluates, at once. And then the program, with the
    signal's status."""
    saved: list[Path] = []
    save = "diloco.integrations.trainer.save_beside"
    monkeypatch.setattr(save, lambda place, swarm: saved.append(place))
    told = {"save_strategy": "steps", "save_steps": 100, "gradient_accumulation_steps": 2}
    told |= {"eval_strategy": "steps", "eval_steps": 1} if evaluating else {}
    one = trainer(tmp_path, real(), model=Told(evaluating), **told)
    with pytest.raises(SystemExit) as caught:
        one.train()
    assert caught.value.code == 143 and one.state.global_step == 1
    assert node.said[-2:] == ["leave", "close"]
    assert saved == ([] if evaluating else [tmp_path / "checkpoint-1"])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_ends_lightning_with_a_goodbye(node: Node, tmp_path: Path) -> None:
    """Also while it waits for others, of which Lightning's own handler knows nothing."""

    async def begin(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    node.begin = begin  # type: ignore[assignment, method-assign]
    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, real("DilocoLightningCallback"))
    assert caught.value.code == 143 and "leave" in node.said


def test_a_trainer_that_fails_says_goodbye_and_comes_back(node: Node, tmp_path: Path) -> None:
    """When it fails, and not when it trains again; also when the library itself trains again."""
    own, said = real(), list[str]()

    class Failing(Regression):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            if len(self.seen) == 4:
                self.seen.append(0)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(x)

    one = trainer(tmp_path, own, model=Failing(), auto_find_batch_size=True, max_steps=20)
    one.train()
    said = [word for word in node.said if word in ("begin", "leave", "close")]
    assert said == ["leave", "close", "leave", "close"]


class Diverging(Node):
    """Its swarm refuses what is not finite."""

    async def exchange(self) -> Any:
        raise DivergedError("training diverged: nan in outer step 2; lower inner.lr; more")


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("DilocoCallback", "lower learning_rate, or max_grad_norm"),
        ("DilocoLightningCallback", "lower the optimizer's learning rate, or gradient_clip_val"),
    ],
)
def test_divergence_is_one_line_in_the_trainers_words(
    kind: str, remedy: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("diloco.attach.swarm.NodeThread", lambda: Direct(Diverging()))
    with pytest.raises(DivergedError) as caught:
        if kind == "DilocoCallback":
            trainer(tmp_path, real(kind)).train()
        fit(tmp_path, real(kind))
    assert str(caught.value) == f"training diverged: nan in outer step 2; {remedy}"


def test_an_empty_loader_is_refused_before_anybody_waits(node: Node, tmp_path: Path) -> None:
    one = trainer(tmp_path, real(), data=[{"x": torch.ones(4)}] * 5, dataloader_drop_last=True)
    one.args.per_device_train_batch_size = one._train_batch_size = 8
    said = "^the training data makes no batch of its 5 rows; give more rows, a smaller batch, or k"
    with pytest.raises(DataError, match=said):
        one.train()
    assert not node.said
