"""An outer optimizer from your own code.

    python scripts/examples/own_optimizer.py              starts a swarm, prints its ADDRESS and
                                                          waits for a second peer
    python scripts/examples/own_optimizer.py ADDRESS      joins it, from another terminal

`push` says what one merged pseudo-gradient does. It is linear in its four values, so an heir goes
on with its momentum as with that of the built-in ones. A step that is not linear, such as a sign,
defines `transition` instead (`diloco.outer.optimizer`), and does without this. Another step needs
another name, because peers compare names and not code.

For `diloco train outer.optimizer=heavy_ball` and `diloco join` put the class into a package that
all install:

    [project.entry-points."diloco.extensions"]
    heavy_ball = "my_package.heavy_ball"

Whoever lacks it is told so in one line. Two networks learn from a teacher, each from inputs of its
own, drawn with `swarm.seed`; in ten seconds both print the same anchors.
"""

import sys

import torch
from torch import nn

from diloco import OuterOptimizer, Swarm, register


@register
class HeavyBall(OuterOptimizer):
    """Polyak's momentum: Nesterov's without the look ahead."""

    name = "heavy_ball"

    def push(self, theta, momentum, window, delta, lr, beta, delay, last):
        momentum = beta * momentum + delta
        return theta - lr * momentum, momentum, window


torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).requires_grad_(False)
held_out = torch.randn(1000, 8)

model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
swarm = Swarm(
    run_id="own_optimizer",
    address=sys.argv[1:],
    min_peers=2,
    sync_every=10,
    optimizer="heavy_ball",
    lr=0.7,
    momentum=0.5,
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
