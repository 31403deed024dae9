"""DiLoCo in plain torch: a loop of your own becomes a peer by two lines.

    python scripts/examples/plain_torch.py              starts a swarm, prints its ADDRESS and waits
                                                        for a second peer
    python scripts/examples/plain_torch.py ADDRESS      joins it, from another terminal

A small network learns to guess the next character of the sources of torch. Each peer draws its
batches with its own `swarm.seed`, so the two see different text. After 200 steps each, in ten
seconds, both print the same anchors: all peers end with the same weights, bit for bit.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from diloco import Swarm

CONTEXT, STEPS = 16, 200  # characters that are seen, inner steps of each peer

files = sorted(Path(nn.__file__).parents[1].glob("*.py"))
text = "".join(file.read_text(errors="ignore") for file in files)[:1_000_000]
tokens = torch.tensor([min(ord(letter), 127) for letter in text])
train, held_out = tokens[:-20_000], tokens[-20_000:]


def batch(data, size, generator):
    """Contexts (size, CONTEXT) and the character that follows each (size,)."""
    at = torch.randint(len(data) - CONTEXT, (size,), generator=generator)
    return torch.stack([data[i : i + CONTEXT] for i in at]), data[at + CONTEXT]


model = nn.Sequential(
    nn.Embedding(128, 16),
    nn.Flatten(),
    nn.Linear(16 * CONTEXT, 256),
    nn.GELU(),
    nn.Linear(256, 128),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
swarm = Swarm(
    run_id="plain_torch", address=sys.argv[1:], sync_every=20, rounds=STEPS // 20, min_peers=2
)

generator = torch.Generator().manual_seed(swarm.seed)  # another one on each peer
with swarm, swarm.attach(model, optimizer) as sync:
    while swarm.steps < STEPS:
        inputs, targets = batch(train, 64, generator)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # each 20th one exchanges what was learned with the other peers
        if sync.steps == 1:
            print(f"first batch: {''.join(map(chr, inputs[0].tolist()))!r}")

inputs, targets = batch(held_out, 1000, torch.Generator().manual_seed(0))
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(inputs), targets)
print(f"held-out loss {loss:.3f}, anchors {sync.anchor_digest()}")
