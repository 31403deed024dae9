"""Lightning's Trainer, with each of its callbacks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from scripts.families._features import CALLBACKS, FLAGS
from scripts.families._sides import EVERY, STEPS, Ended, Side, batch, loss_of, network, values

RATE = 0.02
KEEPING = ("ckpt_path in the middle", "ModelCheckpoint", "OnExceptionCheckpoint")


class Module(LightningModule):
    def __init__(self, feature: str) -> None:
        super().__init__()
        self.automatic_optimization = feature != "manual optimization"
        self.fails = feature == "OnExceptionCheckpoint"
        parts = list(network())
        self.backbone, self.head = nn.Sequential(*parts[:-1]), parts[-1]
        self.batch_size, self.lr = 16, RATE
        self.rates: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.backbone(inputs))
        return outputs

    def training_step(self, inputs: Tensor, _: int) -> Tensor:
        if self.fails and self.global_step == STEPS // 2 + 2:
            raise KeyError("a row that nobody can read")
        loss = loss_of(self, inputs)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()  # type: ignore[union-attr]
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, inputs: Tensor, _: int) -> None:
        self.log("held", loss_of(self, inputs))

    def train_dataloader(self) -> Any:
        rows: Any = torch.cat([batch(number) for number in range(EVERY)])
        return DataLoader(rows, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        rows: Any = batch(-1)
        return DataLoader(rows, batch_size=16)

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr)
        schedule = CosineAnnealingLR(optimizer, T_max=STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(library: str, feature: str, side: Side) -> Ended:
    """Fit a module; what came of it and of the callback."""
    settings, compared = CALLBACKS.get(feature, ({}, ()))
    made = [getattr(of_lightning, feature.split()[0])(**settings)] if feature in CALLBACKS else []
    if feature == "ckpt_path in the middle":
        fit(feature, side, [], STEPS // 2)
        [path] = Path().rglob("*.ckpt")
        module, trainer = fit(feature, side, [], STEPS, ckpt_path=path)
    else:
        module, trainer = fit(feature, side, made, STEPS)
    return {
        "steps": trainer.global_step,
        "model": values(module),
        "rates": module.rates,
        "figures": {name: _named(getattr(made[0], name)) for name in compared},
        "logged": {
            key: one for key, one in trainer.callback_metrics.items() if "diloco" not in key
        },
        "files": _saved(Path("kept")),
    }


def _named(figure: Any) -> Any:
    """Without the folders of files."""
    is_kept = isinstance(figure, dict)
    return {Path(key).name: one for key, one in figure.items()} if is_kept else figure


def _saved(folder: Path) -> dict[str, Any]:
    """The weights of checkpoints, which are then no more."""
    found = {}
    for path in sorted(folder.glob("*.ckpt")):
        found[path.name] = torch.load(path, weights_only=True)["state_dict"]
        path.unlink()
    return found


def fit(feature: str, side: Side, made: list[Any], steps: int, **more: Any) -> tuple[Any, Any]:
    seed_everything(0)
    module = Module(feature)
    own = side.callbacks("DilocoLightningCallback")
    trainer = Trainer(
        max_steps=-1 if feature.endswith("epochs") else steps,
        max_epochs=steps // EVERY if feature.endswith("epochs") else None,
        accelerator="cpu",
        check_val_every_n_epoch=1,
        num_sanity_val_steps=0,
        default_root_dir="out",
        logger=CSVLogger("logs")
        if feature in ("LearningRateMonitor", "ThroughputMonitor")
        else False,
        enable_checkpointing=feature in KEEPING,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*made, *own],
        log_every_n_steps=1,
        **FLAGS.get(feature, {}),
    )
    with suppress(KeyError):
        trainer.fit(module, **more)
    return module, trainer
