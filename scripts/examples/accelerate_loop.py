"""A loop over Accelerate as a peer, by three lines.

    python scripts/examples/accelerate_loop.py            starts a swarm, prints its ADDRESS and
                                                          waits for a second peer
    python scripts/examples/accelerate_loop.py ADDRESS    joins it, from another terminal

A small network learns to guess the next character of the sources of torch. `swarm.shard` gives each
peer an order of the data of its own. The schedule is brought to the swarm's step before each step,
so a peer that joins late has the learning rate of the others. 120 steps each, in 20 s; the swarm's
figures go where the loop logs its own.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from diloco import Swarm

CONTEXT, STEPS = 16, 120

files = sorted(Path(torch.__file__).parent.glob("*.py"))
text = "".join(file.read_text(errors="ignore") for file in files)[:500_000]
tokens = torch.tensor([min(ord(letter), 127) for letter in text])
rows = [(row[:-1], row[-1]) for row in tokens.unfold(0, CONTEXT + 1, 3)]
train, held_out = rows[:-1000], rows[-1000:]

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
head = nn.Linear(16 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 128)
model = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), *head)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)

swarm = Swarm(
    run_id="accelerate", address=sys.argv[1:], sync_every=20, rounds=STEPS // 20, min_peers=2
)
loader = DataLoader(swarm.shard(train), batch_size=32)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

with swarm, swarm.attach(model, optimizer, schedulers=[scheduler]) as sync:
    for number, (inputs, targets) in enumerate(loader):
        if number == 0:
            print(f"first batch: {''.join(map(chr, inputs[0].tolist()))!r}")
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number % 40 == 39:  # with a tracker: accelerator.log({"loss": loss, **swarm.figures()})
            print(f"loss {loss:.3f}", swarm.figures())
        if swarm.steps >= STEPS:
            break

inputs, targets = (torch.stack(column) for column in zip(*held_out, strict=True))
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(inputs), targets)
print(f"held-out loss {loss:.3f}, anchors {sync.anchor_digest()}")
