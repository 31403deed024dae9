"""A swarm for loops with Hugging Face Accelerate."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from diloco.attach.peer_state import PeerState
from diloco.attach.swarm import Attachment, Swarm
from diloco.errors import ConfigError
from diloco.integrations.membership import FOLDER, check_processes, load_beside, save_beside
from diloco.integrations.orders import ORDERED, check_has_batches, order_by_, remedy

__all__ = ["AccelerateSwarm"]

logger = logging.getLogger(__name__)


class AccelerateSwarm(Swarm):
    """A `Swarm` whose peer is saved and loaded with `accelerator.save_state` and `load_state`.

        swarm = AccelerateSwarm(accelerator, run_id="mine", sync_every=100)
        with swarm, swarm.attach(model, optimizer, schedulers=[scheduler]):   # what accelerator.prepare returned
            ...

    `load_state` comes before `attach`; then the same peer goes on, if its key is where it was: in
    `accelerator.project_dir`, or at `identity`. The processes of `accelerate launch` are one peer. A step of the
    optimizer counts once, however many micro-batches it has, and one that fp16 skips does not.

    Raises what `Swarm` raises, and `ConfigError` for a `load_state` while a model is attached.
    """

    def __init__(self, accelerator: Accelerator, **settings: Any) -> None:
        if "identity" not in settings and accelerator.project_dir is not None:
            settings["identity"] = Path(accelerator.project_dir) / FOLDER / "identity.key"
        super().__init__(**settings)
        self._accelerator = accelerator
        self._loaded: PeerState | None = None
        accelerator.register_save_state_pre_hook(self._save_beside)
        accelerator.register_load_state_pre_hook(self._load_beside)

    def attach(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        schedulers: Iterable[Any] = (),
        **more: Any,
    ) -> Attachment:
        """As `Swarm.attach`, for what `accelerator.prepare` returned. Prepared loaders that shuffle their data get an
        order of this peer's own; where there is none, a line says what to do.
        """
        check_processes(self._accelerator.num_processes)
        for loader in self._accelerator._dataloaders:
            check_has_batches(loader)
        saved, self._loaded = self._loaded, None
        attached = super().attach(model, optimizer, schedulers=schedulers, saved=saved, **more)
        loaders = list(self._accelerator._dataloaders)  # that were prepared; those that evaluate are in no random order
        if loaders and not self._sharded:
            drawn = [order_by_(loader, self.seed) for loader in loaders]
            self._voice.say(f"{ORDERED} (seed {self.seed})" if any(drawn) else remedy(loaders[0], "swarm"))
        return attached

    def _save_beside(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        sync = self.attachment
        if sync is None or sync.view is None or sync.view.closed or self.run is None:
            return
        save_beside(Path(output_dir), self)

    def _load_beside(self, models: list[nn.Module], input_dir: str) -> None:
        if self.attachment is not None and self.attachment.view is not None and not self.attachment.view.closed:
            raise ConfigError("load_state: the model is attached already, and is the swarm's; load it before attach")
        self._loaded = load_beside(Path(input_dir))
        if self._loaded is None:
            logger.warning("%s holds nothing of a swarm: this peer joins as a new one", input_dir)
