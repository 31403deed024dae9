"""What a whole run takes by the prediction of one outer step (`planning`): seconds, tokens, bytes, and dollars.

All peers are alike and there from the first step to the last. Evaluations, checkpoints, the start of machines, and the
host are not in it.
"""

from __future__ import annotations

from typing import NamedTuple

from diloco.config import Config
from diloco.config.prices import Cost, Machine
from diloco.train.planning import Exchange, Link, predict

__all__ = ["Forecast", "forecast"]


class Forecast(NamedTuple):
    """A run of `peers` peers. `wall_s` is seconds of each peer, and `bytes_sent` is what each peer sends."""

    peers: int
    tokens: float
    wall_s: float
    bytes_sent: float

    def cost(self, machine: Machine) -> Cost:
        """Dollars for all peers, each on such a machine."""
        return machine.cost(self.peers * self.wall_s, self.peers * self.bytes_sent)


def forecast(config: Config, exchange: Exchange, link: Link, step_s: float) -> Forecast:
    """The run to the first limit of its budget, with inner steps of `step_s` seconds."""
    budget, outer = config.budget, config.outer
    tokens_per_step = exchange.peers * config.inner.batch_size * config.data.sequence_length
    steps = []  # inner steps of a peer
    if budget.outer_steps is not None:
        steps.append(budget.outer_steps * outer.sync_every / exchange.versions)
    if budget.tokens is not None:
        steps.append(budget.tokens / tokens_per_step)
    one = predict(exchange, link, step_s)
    rounds = min(steps) / exchange.sync_every
    return Forecast(
        exchange.peers, min(steps) * tokens_per_step, rounds * (one.compute_s + one.wait_s), rounds * one.bytes_sent
    )
