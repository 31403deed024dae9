"""The table of the way of a contribution (diloco/README.md) is what a traced run does, in that
order."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.places import PACKAGE
from tests.support.simulated import simulated

ROW = re.compile(r"^\| [a-z]* ?\| `([\w.]+)` \| ([\w/]+\.py) \|$", re.MULTILINE)


def test_the_way_of_a_contribution_is_as_the_table_says(tmp_path: Path) -> None:
    hops = ROW.findall(
        (PACKAGE / "README.md")
        .read_text()
        .split("## From `optimizer.step()`")[1]
        .split("## How")[0]
    )
    wanted = {(name.split(".")[-1], str(PACKAGE / file)) for name, file in hops}
    called: list[tuple[str, str]] = []

    def traced(frame: FrameType, event: str, _: Any) -> None:
        call = (frame.f_code.co_name, frame.f_code.co_filename)
        if event == "call" and call in wanted:
            called.append(call)

    threading.setprofile(traced)
    sys.setprofile(traced)
    try:
        simulated(tmp_path / "run", "local.peers=2")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    rest = iter(called)
    for name, file in hops:  # each comes after the one before
        assert (
            name.split(".")[-1],
            str(PACKAGE / file),
        ) in rest, f"{name} of {file} does not follow"
    assert len(hops) == 12 and len({file for _, file in hops}) == 10
