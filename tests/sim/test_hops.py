"""The table of the way of a contribution (diloco/README.md) is that of a traced run."""

import sys
import threading
from inspect import unwrap
from pathlib import Path
from types import FrameType
from typing import Any

from diloco.attach.node_thread import NodeThread
from diloco.core.rules import author, contributions, learning, tips
from diloco.outer.aggregate import Aggregate
from diloco.outer.replica import Replica
from diloco.swarm.node.node import Node
from diloco.swarm.rpc import contribution, state
from tests.support.places import PACKAGE
from tests.support.simulated import simulated

HEADER = "| who | frames | file |\n|---|---|---|\n"
# Each of these calls follows the one before; the frames in which it is made are the way to it.
WAY: list[tuple[str, Any]] = [
    ("contributor", NodeThread.after_step),
    ("", learning.contribute),
    ("", Node.carry_out),
    ("", Replica.capture),
    ("", contributions.pass_on),
    ("", contribution.send),
    ("author", contribution.ContributionServer.answer),
    ("", author.close),
    ("", Aggregate.merge),
    ("anybody", tips.fetch),
    ("", state.ask),
    ("", Replica.apply_update_),
]
ELSEWHERE = "sim", "train"  # the simulator's own, and the loop around `optimizer.step()`
MOST_FRAMES, MOST_FILES = 32, 18


def own_frames(frame: FrameType | None) -> list[tuple[str, str]]:
    """Names and files of the package's frames, from the outermost to this one."""
    frames = list[tuple[str, str]]()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] not in ELSEWHERE:
            name = frame.f_code.co_qualname.partition(".<locals>")[0]
            frames.insert(0, (name, str(path.relative_to(PACKAGE))))
        frame = frame.f_back
    return frames


def table(way: list[tuple[str, list[tuple[str, str]]]]) -> str:
    """One row for the frames in one file that follow each other."""
    rows = list[list[str]]()
    for who, frames in way:
        for name, file in frames:
            if rows and rows[-1][2] == file and not who:
                rows[-1][1] += f", `{name}`"
            else:
                rows.append([who, f"`{name}`", file])
            who = ""
    lines = (f"| {who} | {names} | {file} |\n".replace("|  |", "| |") for who, names, file in rows)
    return HEADER + "".join(lines)


def test_the_table_of_the_way_is_what_a_run_does(tmp_path: Path) -> None:
    """Each call comes after the one before; of its frames those count that were not met before."""
    codes = [unwrap(function).__code__ for _, function in WAY]
    met: list[list[tuple[str, str]]] = []
    seen = set[tuple[str, str]]()

    def traced(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and len(met) < len(codes) and frame.f_code is codes[len(met)]:
            frames = own_frames(frame)
            met.append([one for one in dict.fromkeys(frames) if one not in seen])
            seen.update(frames)

    threading.setprofile(traced)
    sys.setprofile(traced)
    try:
        simulated(tmp_path, "local.peers=2", "budget.outer_steps=1")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert len(met) == len(WAY), f"{WAY[len(met)][1].__qualname__} does not follow"
    written = table([(who, frames) for (who, _), frames in zip(WAY, met, strict=True)])
    assert written in (PACKAGE / "README.md").read_text(), written
    frames, files = len(seen), len({file for _, file in seen})
    said = f"{frames} frames in {files} files"
    assert said in (PACKAGE / "README.md").read_text(), said
    assert frames <= MOST_FRAMES and files <= MOST_FILES
