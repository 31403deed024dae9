"""nanoGPT's style of loop: settings at the top, `get_batch` from an array of tokens, a schedule by
hand, a small GPT.

    python scripts/examples/nanogpt.py              starts a swarm, prints its ADDRESS and waits for
                                                    a second peer
    python scripts/examples/nanogpt.py ADDRESS      joins it, from another terminal

What makes a script of this kind a peer is marked: four lines. The seed of `get_batch` is the peer's
own, because with 1337 all peers would train on the same batches, and learn what one learns. The
schedule follows `swarm.steps`, so a peer that joins late has the learning rate of the others. 100
steps in 20 s; both print the same anchors.
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from diloco import Swarm

block_size, batch_size, n_layer, n_head, n_embd = 64, 16, 2, 4, 64
max_iters, warmup_iters, learning_rate, min_lr = 100, 10, 3e-3, 3e-4
gradient_accumulation_steps, eval_iters = 2, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):  # (B, T, n_embd)
        # (3, B, head, T, width)
        heads = self.qkv(self.ln_1(x)).unflatten(2, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(128, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 128, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


files = sorted(Path(nn.__file__).parents[1].glob("*.py"))
text = "".join(file.read_text(errors="ignore") for file in files)[:1_000_000]
data = torch.tensor([min(ord(letter), 127) for letter in text])
splits = {"train": data[:-50_000], "val": data[-50_000:]}


def get_batch(split, generator):
    chosen = splits[split]
    ix = torch.randint(len(chosen) - block_size, (batch_size,), generator=generator)
    rows = torch.stack([chosen[i : i + block_size + 1] for i in ix])
    return rows[:, :-1], rows[:, 1:]


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = min(1.0, (it - warmup_iters) / (max_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    generator = torch.Generator().manual_seed(1337)  # the same for all: they evaluate alike
    return sum(model(*get_batch("val", generator)).item() for _ in range(eval_iters)) / eval_iters


model = GPT()
optimizer = torch.optim.AdamW(
    model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1
)
# <- 1
swarm = Swarm(
    run_id="nanogpt", address=sys.argv[1:], sync_every=10, rounds=max_iters // 10, min_peers=2
)
generator = torch.Generator().manual_seed(swarm.seed)  # <- 2, instead of 1337

sync = swarm.attach(model, optimizer).open()  # <- 3
while swarm.steps < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(swarm.steps)
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch("train", generator)
        if sync.steps == micro_step == 0:
            print(f"first batch: {''.join(map(chr, X[0].tolist()))!r}")
        (model(X, Y) / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
swarm.close()  # <- 4
print(f"held-out loss {estimate_loss():.3f}, anchors {sync.anchor_digest()}")
