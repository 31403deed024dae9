"""The table of faults in scripts/TABLES.md: what is measured, how, and what was to be reached. Imported by `chaos`.

Each row is one measurement that leaves one JSON file: a run of `chaos` itself, tests with real daemons, a simulation.
A row whose file is there is not measured again, so that what was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diloco.testing.bench.machine import describe
from diloco.testing.bench.readme import place, put

__all__ = ["NAME", "ROWS", "regenerate", "table"]

NAME = "faults"
ROOT = Path(__file__).parents[3]
PATIENCE_S = 1800.0
CRASHES = ("crash:1@17.5", "crash:1@9.5,join:4@11,crash:2@21.5")
DOWNLOAD = (
    "tests/swarm/test_swarm.py::test_a_joiner_draws_parts_from_three_donors_and_finishes_when_one_dies",
    "tests/sim/test_download.py::test_when_a_donor_crashes_only_its_part_is_fetched_again",
)

Figures = dict[str, Any]
Line = tuple[str, str, str, bool | None, str]  # figure, to reach, reached, whether it did, conditions


@dataclass(frozen=True)
class Row:
    """One measurement; `lines` of the table from its figures."""

    measure: Callable[[], Figures]
    lines: Callable[[Figures], list[Line]]


# -- measurements -----------------------------------------------------------------------------------------------------


def chaos(*arguments: str) -> Callable[[], Figures]:
    """A run of the executable beside this; its figures."""

    def measure() -> Figures:
        with TemporaryDirectory(prefix="diloco-table-") as scratch:
            file = Path(scratch) / "figures.json"
            command = [sys.executable, str(ROOT / "scripts" / "chaos"), *arguments, "--json", str(file)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                try:
                    code = process.wait(PATIENCE_S)
                finally:
                    process.terminate()  # not killed, so that it ends its peers and takes its namespaces away
            if not file.exists():
                raise OSError(f"chaos ended with {code}")
            return json.loads(file.read_text())  # type: ignore[no-any-return]

    return measure


def downloads() -> Figures:
    """Tests that kill a donor amid a download: with real daemons, and with every message counted in virtual time."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "swarm or not swarm", *DOWNLOAD]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    return {"passed": done.returncode == 0, "said": (done.stdout.strip().splitlines() or ["nothing"])[-1]}


def momenta() -> Figures:
    """Relative distance of each momentum that a successor began with from the one its dead syncer had."""
    from torch import Tensor

    from diloco.config import compose
    from diloco.outer.replica import Replica
    from diloco.sim.run import simulate

    hold = Replica.hold
    held: dict[int, list[tuple[Replica, Tensor]]] = {}

    def watched(replica: Replica, fragment: int, *state: Any) -> None:
        hold(replica, fragment, *state)
        held.setdefault(fragment, []).append((replica, replica.held[fragment].state.momentum.clone()))

    distances = []
    for crash in CRASHES:
        held.clear()
        Replica.hold = watched  # type: ignore[method-assign, assignment]
        try:
            with TemporaryDirectory(prefix="diloco-table-") as scratch:
                small = ["experiment=smoke", "local.peers=4", "budget.outer_steps=8", "outer.sync_every=4"]
                small += ["outer.fragments=4", f"run.dir={scratch}", f"sim.events=[{crash}]"]
                simulate(compose(small), lambda message: None)
        finally:
            Replica.hold = hold  # type: ignore[method-assign]
        for fragment, heirs in held.items():
            for (dead, _), (_, inherited) in pairwise(heirs):
                lost = dead.held[fragment].state.momentum
                distances.append(float((inherited - lost).norm() / lost.norm()))
    return {"distances": distances}


# -- lines ------------------------------------------------------------------------------------------------------------


def of_kind(figures: Figures, kind: str) -> list[Figures]:
    """Faults of a kind that were done."""
    return [row for row in figures["faults"] if row["fault"].split()[0] == kind and not row["skipped"]]


def seconds(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values) + " s"


def killed(figures: Figures) -> list[Line]:
    [kill], stops = of_kind(figures, "kill"), of_kind(figures, "stop")
    detected = "" if kill["detect_s"] is None else f", detected after {kill['detect_s']:.2f} s"
    conditions = f"step {figures['step_s']:.2f} s, longest gap before it {figures['calm_gap_s']:.2f} s{detected}"
    lines: list[Line] = [
        (
            "one of 4 killed, sync: longest time between inner steps of a survivor",
            "<= 1 s",
            seconds([kill["gap_s"]]),
            kill["gap_s"] <= 1,
            conditions,
        )
    ]
    for stop in stops:
        slept = f"asleep for {of_kind(figures, 'cont')[0]['at'] - stop['at']:.0f} s"
        lines.append(("the same when one is frozen (SIGSTOP)", "", seconds([stop["gap_s"]]), None, slept))
    return lines


def delayed(mode: str) -> Callable[[Figures], list[Line]]:
    def lines(figures: Figures) -> list[Line]:
        step_s = figures["step_s"]
        delays = [max(0.0, row["gap_s"] - step_s) for row in of_kind(figures, "kill")]
        conditions = f"step {step_s:.2f} s, longest delay before the first {figures['calm_gap_s'] - step_s:.2f} s"
        what = f"the same, {mode}: longest delay of an inner step of a survivor"
        return [(what, "<= a step", seconds(delays), max(delays) <= step_s, conditions)]

    return lines


def rejoined(where: str) -> Callable[[Figures], list[Line]]:
    def lines(figures: Figures) -> list[Line]:
        found = [join["parts"] for join in figures["joins"]]
        times = [parts["total"] if parts else float("inf") for parts in found]
        parts = ", ".join(f"{name} {value:.1f}" for name, value in (found[0] or {}).items() if name != "total")
        what = f"start of a joiner to its first merged contribution, quick-start model, {where}"
        return [(what, "<= 10 s", seconds(times), max(times) <= 10, f"seconds: {parts}")]

    return lines


def goodput(figures: Figures) -> list[Line]:
    calm = figures["calm"]
    share = figures["tokens_per_s"] / calm["tokens_per_s"]
    change = figures["eval_loss"] / calm["eval_loss"] - 1
    kills, kept = len(of_kind(figures, "kill")), figures["takeovers"] - figures["momentum_restarted"]
    joins = [join["parts"]["total"] for join in figures["joins"] if join["parts"]]
    spread = f"joiners {min(joins):.0f} to {max(joins):.0f} s" if joins else "nobody joined"
    return [
        (
            "goodput, one of 8 killed and replaced every 30 s for 10 minutes",
            ">= 90 %",
            f"{share:.1%}",
            share >= 0.9,
            f"{kills} kills, {spread}; {figures['tokens_per_s']:.0f} of {calm['tokens_per_s']:.0f} tokens/s",
        ),
        (
            "held-out loss of that run over the calm one, at equal applied tokens",
            "within 1 %",
            f"{change:+.1%}",
            abs(change) <= 0.01,
            f"{figures['eval_loss']:.3f} and {calm['eval_loss']:.3f} after {figures['tokens']['applied']} and "
            f"{calm['tokens']['applied']} tokens",
        ),
        (
            "takeovers of that run that kept the outer momentum",
            "",
            f"{kept} of {figures['takeovers']}",
            None,
            f"{figures['tokens']['lost']} tokens died with their peers",
        ),
    ]


def emulated(figures: Figures) -> list[Line]:
    packets = figures["packets"]
    counted = "by the kernel" if packets is None else f"{packets['lost']} of {packets['passed']} packets lost"
    skipped = figures["where"] == "loopback"
    same = len(figures["final_digests"]) == 1 and not figures["versions_unequal"]
    what = "links with latency and loss: anchors at the end"
    if skipped:
        return [(what, "1", "skipped", None, "no namespaces here")]
    conditions = f"25 ms one way, 1 % lost: {counted}; one of 4 killed and replaced, {figures['seconds']:.0f} s"
    return [(what, "1", str(len(figures["final_digests"])), same, conditions)]


def inherited(figures: Figures) -> list[Line]:
    worst = max(figures["distances"])
    what = "momentum after a syncer's death: distance from the lost one (norm), worst of all fragments"
    conditions = (
        f"{len(figures['distances'])} takeovers in virtual time, int8 updates; least {min(figures['distances']):.2%}"
    )
    return [(what, "<= 1 %", f"{worst:.2%}", worst <= 0.01, conditions)]


def downloaded(figures: Figures) -> list[Line]:
    reached = "whole, one part fetched again at most" if figures["passed"] else "failed"
    what = "state from 3 donors, one killed midway"
    return [(what, "one part fetched twice", reached, bool(figures["passed"]), f"with real daemons: {figures['said']}")]


def digests(found: Mapping[str, Figures]) -> list[Line]:
    """Over all runs of `chaos` in the table."""
    runs = [run for figures in found.values() for run in (figures, figures.get("calm") or {}) if "final_digests" in run]
    shared = sum(run["versions_shared"] for run in runs)
    unequal = sum(len(run["versions_unequal"]) for run in runs)
    ends = sum(len(run["final_digests"]) == 1 for run in runs)
    what = "versions of fragments on several peers whose digests are equal"
    same = unequal == 0 and ends == len(runs)
    conditions = f"{ends} of {len(runs)} runs ended with one anchor"
    return [(what, "100 %", f"{shared - unequal} of {shared}", same, conditions)]


# -- the table --------------------------------------------------------------------------------------------------------

QUICKSTART = ("--experiment", "quickstart", "--loopback", "--minutes", "0.8", "--schedule", "8:kill 2, 10:join")
MEASUREMENTS: dict[str, Row] = {
    "sync": Row(chaos("--schedule", "8:kill 2, 14:stop 1, 27:cont 1", "--minutes", "0.6"), killed),
    "streaming": Row(
        chaos("--schedule", "8:kill 2, 14:kill 0", "outer=streaming", "outer.fragments=2"), delayed("streaming")
    ),
    "decoupled": Row(
        chaos(
            "--schedule", "8:kill 2, 14:kill 0", "outer=decoupled", "outer.sync_every=24", "outer.fragments=8",
            "train.step_delay_s=0.2",
        ),
        delayed("decoupled"),
    ),
    "rejoin": Row(chaos(*QUICKSTART, "train.step_delay_s=0.1"), rejoined("steps that leave the cores some time")),
    "rejoin-busy": Row(chaos(*QUICKSTART), rejoined("3 peers keep all cores busy")),
    "links": Row(
        chaos("--latency-ms", "25", "--loss", "1%", "--schedule", "8:kill 2, 10:join", "--minutes", "0.7"), emulated
    ),
    "momentum": Row(momenta, inherited),
    "download": Row(downloads, downloaded),
    "goodput": Row(
        chaos(
            "--peers", "8", "--seed", "1", "--every", "30", "--minutes", "10", "--kinds", "kill", "--calm",
            "--loopback", "train.step_delay_s=0.25",
        ),
        goodput,
    ),
}  # fmt: skip
ROWS = tuple(MEASUREMENTS)


def regenerate(
    only: Sequence[str], directory: Path | None, again: bool, target: Path | None, say: Callable[[str], None]
) -> int:
    """Measure what is missing of the rows, and write the table; an exit code."""
    directory = directory or ROOT / "runs" / "chaos-table"
    directory.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in only or ROWS:
        file = directory / f"{name}.json"
        if file.exists() and not again:
            say(f"{name}: measured already, in {file}")
            continue
        say(f"{name}: measuring")
        begun_at, machine = time.monotonic(), describe()
        try:
            figures = MEASUREMENTS[name].measure()
        except (OSError, subprocess.TimeoutExpired) as error:
            say(f"{name}: error: {error}")
            failed = True
            continue
        took_s = time.monotonic() - begun_at
        whole = {"date": str(date.today()), "machine": machine, "took_s": took_s, "figures": figures}
        file.write_text(json.dumps(whole, indent=2) + "\n")
        say(f"{name}: {took_s:.0f} s")
    found = {name: json.loads(file.read_text()) for name in ROWS if (file := directory / f"{name}.json").exists()}
    lines = table(found)
    print("\n".join(lines))
    put(NAME, lines)
    if target is not None:
        target.write_text(json.dumps(found, indent=2) + "\n")
    problems = [f"{name}: {text}" for name, one in found.items() for text in one["figures"].get("problems", ())]
    for problem in problems:
        say(f"error: {problem}")
    return 1 if failed or problems else 0


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table's text from the files of its rows; a row without one is named below it."""
    rows = [line for name in found for line in MEASUREMENTS[name].lines(found[name]["figures"])]
    rows += digests({name: one["figures"] for name, one in found.items()})
    lines = ["| figure | to reach | reached | met | conditions |", "|---|---|---|---|---|"]
    for what, goal, reached, met, conditions in rows:
        verdict = "" if met is None else "yes" if met else "**no**"
        lines.append(f"| {what} | {goal} | {reached} | {verdict} | {conditions} |")
    missing = [name for name in ROWS if name not in found]
    if found:
        days = sorted({f"{one['date']}, {place(one['machine'])}" for one in found.values()})
        loads = sorted(one["machine"]["load"] for one in found.values())
        took_s = sum(one["took_s"] for one in found.values())
        lines += ["", f"{'; '.join(days)}; {took_s / 60:.0f} minutes; load before a row {loads[0]} to {loads[-1]}."]
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    return lines
