"""A LightningModule as a peer, by one callback.

    python scripts/examples/lightning_module.py            starts a swarm, prints its ADDRESS, waits
                                                           for a second peer
    python scripts/examples/lightning_module.py ADDRESS    joins it, from another terminal

Needs `pip install 'diloco[lightning]'`. A small network learns to guess the next character of the
sources of torch. The callback gives each peer an order of the data of its own, and says so, also
after `seed_everything(42)`. 100 steps each, in 20 s; both print the same anchors.
"""

import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from diloco import DilocoLightningCallback

CONTEXT, STEPS = 16, 100

files = sorted(Path(torch.__file__).parent.glob("*.py"))
text = "".join(file.read_text(errors="ignore") for file in files)[:500_000]
tokens = torch.tensor([min(ord(letter), 127) for letter in text])
rows = [(row[:-1], row[-1]) for row in tokens.unfold(0, CONTEXT + 1, 3)]
train, held_out = rows[:-1000], rows[-1000:]


class NextLetter(LightningModule):
    def __init__(self):
        super().__init__()
        head = nn.Linear(16 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 128)
        self.layers = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), *head)

    def loss(self, batch):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def training_step(self, batch, number):
        if number == 0:
            print(f"first batch: {''.join(map(chr, batch[0][0].tolist()))!r}")
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


own = DilocoLightningCallback(
    run_id="lightning", address=sys.argv[1:], sync_every=20, rounds=STEPS // 20, min_peers=2
)
loader = DataLoader(train, batch_size=32, shuffle=True)
trainer = Trainer(
    max_steps=STEPS,
    default_root_dir=tempfile.mkdtemp(),
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[own],
)
module = NextLetter()
trainer.fit(module, loader)

with torch.no_grad():
    loss = module.loss([torch.stack(column) for column in zip(*held_out, strict=True)])
print(f"held-out loss {loss:.3f}, anchors {own.attachment.anchor_digest()}")
