"""The worst attacks with real processes: the quick start with an attacker among its peers, beside it without one.

Every process is `python -m diloco.train` over the loopback; the attacker's is `bent.py`. An attack is contained when
the honest peers end with equal anchors, and their held-out loss is at most 1 % above that of the honest peers alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.testing.attacks.catalogue import ATTACKS
from diloco.testing.attacks.stage import COMMON
from diloco.testing.chaos.peers import ChaosError, Crowd
from diloco.testing.links.links import Loopback

__all__ = ["REAL", "measure"]

REAL = (
    "minus-ten", "sign-flip", "higher-version", "false-clock", "takes-a-fragment", "claims-an-anchor",
    "publishes-anything", "reversed-update", "slow-word", "flood-of-claims",
)  # fmt: skip
ROUNDS = 31  # of the quick start
BEGIN_VERSION = 3
WITHIN = 0.01  # of the loss without the attacker
PATIENCE_S = 900.0  # for a run whose calm twin took less than 300 s
SLOWER = 3.0
LOOK_S = 0.5


class Mob(Crowd):
    """Peers of which the last one may be bent."""

    def __init__(self, directory: Path, overrides: Sequence[str], peers: int, attack: str | None) -> None:
        super().__init__(directory, Loopback("one machine"), overrides, peers)
        self._attack = attack

    def program(self, peer: int) -> list[str]:
        """The attacker's own, for the last peer."""
        if self._attack is None or peer < self._peers - 1:
            return super().program(peer)
        return ["-m", "diloco.testing.attacks.bent", self._attack, str(BEGIN_VERSION)]

    def honest(self) -> list[Any]:
        """The sessions of all others."""
        return [one for one in self.sessions if self._attack is None or one.peer < self._peers - 1]


def measure(arguments: argparse.Namespace) -> int:
    """Play what --only names, by default all, and print a line for each run; the exit code."""
    names = arguments.only or REAL
    if unknown := sorted(set(names) - set(REAL)):
        print(f"attacks: error: --real --only {' '.join(unknown)}: there are {', '.join(REAL)}")
        return 2
    wrong = []
    for seed in range(arguments.seeds):
        calm = played(arguments, None, arguments.peers - 1, seed, PATIENCE_S)
        print(f"seed {seed}, {arguments.peers - 1} honest peers: {calm}", flush=True)
        for name in names:
            try:
                found = played(arguments, name, arguments.peers, seed, SLOWER * calm["seconds"])
            except ChaosError as error:
                found = {"loss": None, "why": str(error)}
            over = None if not found["loss"] else found["loss"] / calm["loss"] - 1
            contained = over is not None and over <= WITHIN and found["digests"] == 1
            print(
                f"seed {seed}, {name} ({ATTACKS[name].who}): {found}, loss "
                + ("never reached" if over is None else f"{over:+.1%}")
                + (", contained" if contained else ", not contained"),
                flush=True,
            )
            wrong += [] if contained else [name]
    return 1 if wrong else 0


def played(
    arguments: argparse.Namespace, attack: str | None, peers: int, seed: int, patience_s: float
) -> dict[str, Any]:
    """One run; its figures stay in the directory, and are not measured again."""
    directory = arguments.dir / f"{attack or 'calm'}-{peers}-seed{seed}-{arguments.rounds or ROUNDS}"
    figures = directory / "figures.json"
    if figures.exists():
        return dict(json.loads(figures.read_text()))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    overrides = ["experiment=quickstart", f"run.seed={seed}", "train.threads=1", "train.device=cpu"]
    rounds = arguments.rounds or ROUNDS
    overrides += [f"budget.outer_steps={rounds}", f"eval.every={rounds}"]
    mob = Mob(directory, overrides, peers, attack)
    begun_at = time.monotonic()
    try:
        mob.begin()
        deadline = time.monotonic() + patience_s
        while any(one.poll() is None for one in mob.honest()):
            if time.monotonic() > deadline:
                break
            time.sleep(LOOK_S)
        found = _figures(mob, directory, time.monotonic() - begun_at)
    finally:
        mob.close()
    figures.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _figures(mob: Mob, directory: Path, seconds: float) -> dict[str, Any]:
    """Losses and digests of the honest peers, and which of their events accuse the attacker."""
    summaries = [said[-1] for one in mob.honest() if (said := one.said("summary"))]
    losses = [summary["eval"]["loss"] for summary in summaries if summary.get("eval")]
    last = mob.sessions[-1]
    villain = last.address.rsplit("/", 1)[1] if last not in mob.honest() and last.address else None
    kinds: Counter[str] = Counter()
    for one in mob.honest():
        log = directory / f"p{one.peer}" / "events.jsonl"
        for line in log.read_text().splitlines() if log.exists() else ():
            event = json.loads(line)
            if villain is not None and villain in line and event["kind"] not in COMMON:
                kinds[event["kind"]] += 1
    return {
        "loss": max(losses) if len(losses) == len(mob.honest()) else None,
        "digests": len({summary["anchor_digest"] for summary in summaries}),
        "exits": [one.poll() for one in mob.honest()],
        "seconds": round(seconds),
        "events": dict(kinds),
    }
