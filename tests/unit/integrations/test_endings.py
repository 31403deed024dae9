"""How many tokens a batch is, and how a trainer's peer ends by a signal or an error."""

import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.errors import ConfigError, DataError, DivergedError
from diloco.integrations.batches import tokens_of
from diloco.integrations.membership import FOLDER
from scripts.families._alone import Peer, play_peers
from tests.support.loops import Direct, LastFlight, made
from tests.unit.integrations.test_callbacks import (
    Going,
    Regression,
    callback,
    fit,
    pytestmark,
    trainer,
)

__all__ = ["pytestmark"]  # of the libraries


class Node(Going):
    async def snapshot(self) -> Any:
        raise AssertionError("not in these tests")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """That of peers of this process; signals end programs as usual."""
    made, before = Node(), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr("diloco.attach.swarm.EventLoopThread", lambda: Direct(made))
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


REMEDIES = {
    "DilocoCallback": "lower learning_rate, or max_grad_norm",
    "DilocoLightningCallback": "lower the optimizer's learning rate, or gradient_clip_val",
}


@pytest.mark.parametrize(("kind", "remedy"), REMEDIES.items())
def test_divergence_is_one_line_in_the_trainers_words(
    kind: str, remedy: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("diloco.attach.swarm.EventLoopThread", lambda: Direct(Diverging()))
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


def test_the_next_fold_is_the_same_peer_in_whatever_directory(node: Node, tmp_path: Path) -> None:
    """A run's address has the key of its founder in it, so a new key would be a stranger's."""
    for number, content in enumerate([b"key", None, b"another"]):
        place = tmp_path / f"fold-{number}" / FOLDER
        place.mkdir(parents=True)
        if content is not None:
            (place / "identity.key").write_bytes(content)
        trainer(place.parent, callback(Going(), run_id="folds"), max_steps=20).train()
    kept = [
        (tmp_path / f"fold-{number}" / FOLDER / "identity.key").read_bytes() for number in (1, 2)
    ]
    assert kept == [b"key", b"another"], "a directory with a key is another peer's"


def test_who_plans_fewer_steps_than_the_others_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def work(peer: Peer) -> None:
        model, swarm = nn.Linear(4, 1), peer.swarm(min_peers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = 8 if peer.name == "a" else 24
        swarm.in_trainer(nullcontext(), None, steps, remedy="", signals=())
        with swarm, swarm.attach(model, optimizer):
            for _ in range(8):
                peer.step()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()

    heard = {}
    for peer in play_peers(work, work):
        heard[peer.name] = [fields for kind, fields in peer.events if kind == "planned"]
    assert heard["b"] == []
    [plans] = heard["a"]
    made()._program._say_event("planned", plans)
    said = (
        "diloco: another peer plans 6 outer steps, and this one 2: it ends before the others, and"
    )
    assert capsys.readouterr().err.startswith(said)


IDS = torch.arange(12).reshape(2, 6)
MASK = (IDS % 6 < 4).long()
IMAGES = torch.zeros(2, 3, 4, 4)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS, "labels": IDS}, 12),
        ({"attention_mask": MASK, "labels": IDS, "input_ids": IDS}, 8),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 6, 6)}, 12),  # no mask of tokens
        ({"chosen_input_ids": IDS, "chosen_attention_mask": MASK, "rejected_input_ids": IDS}, 20),
        ({"tokens": IDS, "targets": IDS}, 12),
        ({"idx": IDS, "mask": MASK}, 12),
        ((IDS, IDS), 12),
        ({"inputs_embeds": torch.zeros(2, 6, 8), "labels": IDS.where(MASK > 0, -100)}, 8),
        ({"input_ids": IDS.reshape(1, 12), "position_ids": IDS.reshape(1, 12)}, 12),  # packed
        ({"pixel_values": IMAGES, "labels": torch.tensor([1, 2])}, 2),
        ({"pixel_values": IMAGES.to(torch.uint8)}, 2),
        ((IMAGES, torch.tensor([1, 2])), 2),
        ([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], 3),
        (object(), 1),
    ],
)
def test_the_batch_alone_tells_how_many_tokens_it_is(batch: Any, count: int) -> None:
    assert int(tokens_of(batch)) == count


class Language(nn.Module):
    """Its loss never calls the whole of it, as that of a compiled one, or of a trainer with its own
    loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not self.training
        return {"loss": self.loss(input_ids)}

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(ids)).flatten(0, 1), ids.flatten())


def compute_loss(model: Language, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    loss = model.loss(inputs["input_ids"])
    return (loss, {}) if return_outputs else loss


def test_a_trainer_counts_what_its_own_loss_reads(tmp_path: Path) -> None:
    item = {"input_ids": torch.arange(6), "labels": torch.arange(6)}
    own, told = callback(Going()), {"learning_rate": 1e-5, "gradient_accumulation_steps": 3}
    told |= {"eval_strategy": "steps", "eval_steps": 1}
    told |= {"remove_unused_columns": False, "prediction_loss_only": True}
    made = [trainer(tmp_path, own, model=Language(), data=[item] * 32, **told) for _ in range(2)]
    for one in (*made, *made):
        one.compute_loss = compute_loss
        own._membership._settings["runtime"]._node = Going()
        one.train()
        assert own.attachment.tokens == 4 * 3 * 2 * 6


def test_a_trainer_whose_batches_nobody_sees_is_refused(tmp_path: Path) -> None:
    own = callback(LastFlight())
    one = trainer(tmp_path, own)
    seen = one.training_step
    one.training_step = lambda *arguments: seen.__wrapped__(*arguments)
    with pytest.raises(ConfigError, match=r"^callbacks: this trainer calls no training_step, so"):
        one.train()


def test_lightning_counts_batches_too(tmp_path: Path) -> None:
    own = callback(Going(), "DilocoLightningCallback")
    fit(tmp_path, own, accumulate_grad_batches=3)
    assert own.attachment.tokens == 4 * 3 * 2
