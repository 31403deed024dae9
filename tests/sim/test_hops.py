"""The table of the way of a contribution (diloco/README.md) is that of a traced run."""

import sys
import threading
from inspect import unwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from diloco.attach.attachment import Attachment
from diloco.core.rules import author, contributions, learning, tips
from diloco.outer.aggregate import Aggregate
from diloco.outer.replica import Replica
from diloco.swarm.node.node import Node
from diloco.swarm.rpc import contribution, state
from tests.support.places import PACKAGE
from tests.support.simulated import simulated

HEADER = "| who | call | file |\n|---|---|---|\n"
WAY: list[tuple[str, Any]] = [
    ("contributor", Attachment._after_step),
    ("", Node.stepped),
    ("", learning.contribute),
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


def test_the_table_of_the_way_is_what_a_run_does(tmp_path: Path) -> None:
    """Each call comes after the one before."""
    way = [(who, unwrap(function).__code__) for who, function in WAY]
    wanted, called = {code for _, code in way}, list[CodeType]()

    def traced(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in wanted:
            called.append(frame.f_code)

    threading.setprofile(traced)
    sys.setprofile(traced)
    try:
        simulated(tmp_path, "local.peers=2", "budget.outer_steps=1")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    rows, files, rest = [], set(), iter(called)
    for who, code in way:
        assert code in rest, f"{code.co_qualname} does not follow"
        file = Path(code.co_filename).relative_to(PACKAGE)
        files.add(file)
        rows.append(f"| {who} | `{code.co_qualname}` | {file} |\n".replace("|  |", "| |"))
    assert HEADER + "".join(rows) in (PACKAGE / "README.md").read_text()
    assert len(WAY) <= 12 and len(files) <= 10
