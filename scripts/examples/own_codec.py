"""A codec from your own code: how pseudo-gradients travel.

    python scripts/examples/own_codec.py              starts a swarm, prints its ADDRESS and waits
                                                      for a second peer
    python scripts/examples/own_codec.py ADDRESS      joins it, from another terminal

A bit for each value, its sign, and the mean magnitude of each block of 4096: a thirty-second of
fp32. What it loses is sent in later rounds (`error_feedback`). A payload has its parts one after
another, and each part has all blocks in order. The codec encodes contributions; updates go out in
int8. One that encodes updates, too, says `publishes = True`, and decodes to the same bits on every
machine.

For `diloco train outer.codec_up=sign1` and `diloco join` see own_optimizer.py: the entry point is
the same. Two networks learn from a teacher, each from inputs of its own, drawn with `swarm.seed`;
both print the same anchors.
"""

import sys

import numpy as np
import torch
from torch import nn

from diloco import Codec, Swarm, register
from diloco.errors import PayloadError
from diloco.outer.payloads import LIMIT, refuse_diverged

BLOCK = 4096


@register
class Sign1(Codec):
    """Signs, and a magnitude for each block."""

    name = "sign1"

    def widths(self, numel):
        return [4, -(-numel // 8)]  # bytes of each part of one block: the magnitude, the signs

    def encode(self, x, out):
        refuse_diverged(x, self.name, LIMIT)  # a model that diverged sends nothing
        magnitudes, signs = self.pieces(out, x.numel())
        blocks = x.split(BLOCK)
        magnitudes.copy_(torch.stack([block.abs().mean() for block in blocks]).view(torch.uint8))
        signs.copy_(torch.from_numpy(np.packbits((x >= 0).numpy())))  # 4096 is a multiple of 8

    def decode(self, payload, out):
        magnitudes, signs = self.pieces(payload, out.numel())  # PayloadError if the length is wrong
        magnitudes = magnitudes.clone().view(torch.float32)
        if not bool((magnitudes <= LIMIT).all() & (magnitudes >= 0).all()):  # NaN is neither
            raise PayloadError("sign1 payload holds an impossible magnitude")
        positive = torch.from_numpy(np.unpackbits(signs.numpy(), count=out.numel())).bool()
        scales = magnitudes.repeat_interleave(BLOCK)[: out.numel()]
        out.copy_(torch.where(positive, scales, -scales))


torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).requires_grad_(False)
held_out = torch.randn(1000, 8)

model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
swarm = Swarm(
    run_id="own_codec",
    address=sys.argv[1:],
    min_peers=2,
    sync_every=10,
    momentum=0.0,
    codec_up="sign1",
    error_feedback=0.95,
)
generator = torch.Generator().manual_seed(swarm.seed)  # another one on each peer
with swarm, swarm.attach(model, optimizer) as sync:
    while swarm.steps < 100:
        inputs = torch.randn(32, 8, generator=generator)
        if sync.steps == 0:
            print(f"first batch: {inputs[0].tolist()}")
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), teacher(inputs)).backward()
        optimizer.step()

loss = nn.functional.mse_loss(model(held_out), teacher(held_out))
print(f"held-out loss {loss:.4f}, anchors {sync.anchor_digest()}")
