"""Whether an attack was contained, in words; and the table of all attacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diloco.testing.attacks.arena import VERSIONS, Attack
from diloco.testing.attacks.stage import Outcome

__all__ = ["HEAD", "Verdict", "judge", "rows"]

HEAD = ("attack", "finding", "who", "with what", "before", "now", "contained")
LOSS = 1.75  # times the loss without the attacker; honest swarms differ by up to 1.6
WORST = 3.0  # the same of the worst chunk, 2.2
CLOCK = 1.5  # times the tokens that were processed: a peer that does nothing may still claim what others do
KEPT = 0.55  # of the honest peers' tokens
PACE = (1.5, 10.0)  # times the seconds without the attacker, and so many more
BUSY = (3, 200)  # the same for streams and event lines


@dataclass(frozen=True)
class Verdict:
    """What an attack did. `harm` is empty when it was contained; `named` are the events that accuse the attacker."""

    harm: tuple[str, ...]
    named: tuple[str, ...]

    @property
    def contained(self) -> bool:
        """Whether the attack did no harm, and was named if it can be proved."""
        return not self.harm

    def __str__(self) -> str:
        return "; ".join(
            [*(self.harm or ("as without it",)), *([f"events: {', '.join(self.named)}"] * bool(self.named))]
        )


def judge(attack: Attack, outcome: Outcome, calm: Outcome) -> Verdict:
    """Compare a swarm with the attacker with the same one without it (`calm`)."""
    harm = [f"{reason.partition(': ')[2]} in {reason.partition(':')[0]}" for reason in outcome.crashed]
    if not outcome.done:
        harm.append(f"the others stop at version {min(outcome.version, VERSIONS)}")
    elif outcome.version < VERSIONS:
        harm.append(f"the run ends at version {outcome.version} of {VERSIONS}")
    if outcome.digests != 1:
        harm.append(f"{outcome.digests} different models")
    if not outcome.loss <= LOSS * calm.loss:
        harm.append(f"loss x {short(outcome.loss / calm.loss)}")
    elif not outcome.worst <= WORST * calm.worst:
        harm.append(f"loss x {short(outcome.worst / calm.worst)} in a chunk")
    if outcome.clock > CLOCK:
        harm.append(f"clock x {short(outcome.clock)}")
    if outcome.kept < KEPT:
        harm.append(f"{1 - outcome.kept:.0%} of the honest work lost")
    if outcome.done and outcome.seconds > PACE[0] * calm.seconds + PACE[1] + attack.lasts_s:
        harm.append(f"{outcome.seconds / calm.seconds:.1f} times as long")
    harm += _excess(attack, outcome, calm)
    if attack.proof and not outcome.named:
        harm.append("nobody names it")
    return Verdict(tuple(dict.fromkeys(harm)), outcome.named)


def _excess(attack: Attack, outcome: Outcome, calm: Outcome) -> Iterator[str]:
    """Yields what a peer had more of than it should."""
    for what, number, usual in (
        ("streams", outcome.streams, calm.streams),
        ("event lines", outcome.lines, calm.lines),
    ):
        if number > BUSY[0] * usual + BUSY[1]:
            yield f"{number} {what} of a peer, {usual} without it"
    for figure, limit in attack.limits.items():
        value = outcome.measured.get(figure, math.nan)
        if not value <= limit:
            yield f"{figure.replace('_', ' ')}: {short(value)}"


def short(value: float) -> str:
    """Two or three digits, and a power of ten where there are many."""
    if not math.isfinite(value) or value < 1e4:
        return f"{value:.2g}" if value < 100 else f"{value:.0f}"
    return f"10^{math.log10(value):.0f}"


def rows(
    attacks: Iterable[Attack], before: Mapping[str, str], now: Mapping[str, Verdict], known: Mapping[str, str]
) -> list[Sequence[str]]:
    """One row per attack, in the order of `HEAD`."""
    found: list[Sequence[str]] = []
    for attack in attacks:
        verdict = now.get(attack.name)
        contained = "" if verdict is None else "yes" if verdict.contained else "no"
        if contained == "no" and attack.name in known:
            contained += f": {known[attack.name]}"
        found.append(
            (
                attack.name,
                attack.finding or "-",
                attack.who,
                attack.what,
                before.get(attack.name, "-"),
                "-" if verdict is None else str(verdict),
                contained,
            )
        )
    return found
