"""The live view: lines of a stable format without a terminal, a table that fits with one, and odd
messages."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from diloco.cli.table import LiveView, _Stderr
from diloco.rundir.reporting import Notice, PeerStatus, Ready, Report
from diloco.text import human_bytes, human_count, human_seconds


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    terminal: bool, peers: int = 2, total: int | None = 16, width: int = 80
) -> tuple[LiveView, io.StringIO, Clock]:
    clock, file = Clock(), io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, width=width, height=24, color_system=None, _environ={}
    )
    return (
        LiveView(console, [f"p{index}" for index in range(peers)], total, "run quickstart", clock),
        file,
        clock,
    )


def status(peer: str = "p0", state: str = "training", version: int = 3, **more: Any) -> PeerStatus:
    defaults = {
        "inner_step": 90,
        "loss": 2.614,
        "eval_loss": 2.7,
        "tokens_per_s": 4100.0,
        "bytes_sent": 1230000,
    }
    return PeerStatus(peer, 0.0, state, version, **{**defaults, **more})


def shown(view: LiveView, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=24, color_system=None, _environ={})
    console.print(view.render())
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_line_has_the_documented_format() -> None:
    view, file, clock = make(terminal=False, width=20)  # and is never wrapped
    clock.now = 12.34
    view.update(status())
    view.update(Ready("p0", address="/ip4/127.0.0.1/tcp/1/p2p/12D3"))
    for peer in ("p0", "p1"):  # it is said once
        view.update(Notice(peer, text="one\ntwo"))
    view.update(status(state="done", eval_loss=2.4))  # also within the same step
    view.update(PeerStatus("p1", state="left", version=4))
    assert file.getvalue().splitlines() == [
        "[ 12.3s] p0 v3/16 loss 2.61 held-out 2.70 4.1k tok/s 1.2 MB sent training",
        "[ 12.3s] p0 ready at /ip4/127.0.0.1/tcp/1/p2p/12D3",
        "[ 12.3s] p0: one two",
        "[ 12.3s] p0 v3/16 loss 2.61 held-out 2.40 4.1k tok/s 1.2 MB sent done",
        "[ 12.3s] p1 v4/16 loss - held-out - - tok/s - sent left",
    ]


def test_there_is_at_most_one_line_per_peer_and_outer_step() -> None:
    view, file, clock = make(terminal=False)
    for version in (1, 2):
        for step in range(50):
            clock.now += 0.01
            for peer in ("p0", "p1"):
                state = "evaluating" if step < 5 else "training"
                view.update(
                    status(peer, state, version, eval_loss=5.0 - version if step >= 5 else None)
                )
    lines = file.getvalue().splitlines()
    assert [line.split("] ")[1].split(" loss")[0] for line in lines] == [
        "p0 v1/16",
        "p1 v1/16",
        "p0 v2/16",
        "p1 v2/16",
    ]
    # Printed only when the evaluation of the step is known, so that version and loss belong
    # together.
    assert [line.split("held-out ")[1][:4] for line in lines] == ["4.00", "4.00", "3.00", "3.00"]


def test_a_long_outer_step_gives_a_line_every_ten_seconds() -> None:
    view, file, clock = make(terminal=False)
    for second in range(60):
        clock.now = float(second)
        view.update(status(state="exchanging"))
    assert [line[:8] for line in file.getvalue().splitlines()] == [
        f"[{t:5.1f}s]" for t in range(10, 60, 10)
    ]


def test_the_table_shows_every_peer_the_sum_and_the_progress() -> None:
    view, _, clock = make(terminal=True)
    view.update(status(version=2))
    clock.now = 10.0
    view.update(status("p1", "exchanging", 4, bytes_received=2.5e9, bytes_sent=5e5))
    lines = shown(view)
    assert lines[0].strip() == "run quickstart"
    # Two outer steps took 10 s, so the other twelve take 60 s; those before a resume do not count.
    assert lines[1].split()[-6:] == ["4/16", "0:10", "elapsed", "1:00", "to", "go"]
    assert lines[2].split() == [
        "peer",
        "state",
        "version",
        "step",
        "loss",
        "held-out",
        "tok/s",
        "sent",
        "received",
    ]
    assert lines[3].split() == [
        "p0",
        "training",
        "2/16",
        "90",
        "2.61",
        "2.70",
        "4.1k",
        "1.2",
        "MB",
        "-",
    ]
    assert lines[4].split() == [
        "p1",
        "exchanging",
        "4/16",
        "90",
        "2.61",
        "2.70",
        "4.1k",
        "500",
        "kB",
        "2.5",
        "GB",
    ]
    assert lines[5].split() == ["together", "8.2k", "1.7", "MB", "2.5", "GB"]
    assert len(lines) == 6


def test_the_view_fits_a_terminal_of_eighty_columns() -> None:
    view, _, _ = make(terminal=True, peers=2, total=10_000)
    fields = {
        "inner_step": 1_234_567,
        "bytes_sent": 123.4e9,
        "bytes_received": 99.9e9,
        "tokens_per_s": 99.9e3,
    }
    view.update(status("p1", "evaluating", 9_999, peers=12, **fields))
    lines = shown(view)
    assert max(map(len, lines)) <= 80 and "9999/10000 0:00 elapsed - to go 12 peers" in lines[1]
    assert lines[4].split()[2:] == [
        "9999/10000",
        "1234567",
        "2.61",
        "2.70",
        "99.9k",
        "123",
        "GB",
        "99.9",
        "GB",
    ]


def test_rows_have_a_state_and_the_step_of_the_round() -> None:
    view, _, _ = make(terminal=True, peers=1, width=120)
    view.update(status(state="evaluating", inner_step=0))
    assert shown(view, 120)[3].split()[:4] == [
        "p0",
        "evaluating",
        "3/16",
        "0",
    ], "a new round starts at step zero"
    view.update(status("volunteer"))
    assert any(line.startswith("volunteer") for line in shown(view)), "whom nobody announced"
    view.update(status("[red]x[/red]\x1b[2J", state="[bold]\nodd"))
    [line] = [line for line in shown(view, 200) if "[red]x[/red] [2J" in line]
    assert "[bold] odd" in line, "text, and no markup"


def test_a_terminal_ends_with_the_final_table_and_one_address() -> None:
    view, file, _ = make(terminal=True)
    handler, logger = _Stderr(), logging.getLogger("diloco.above")
    logger.addHandler(handler)
    with view:
        logger.warning("the disk is %s", "behind")
        for peer in ("p0", "p1"):
            view.update(Ready(peer, address=f"/address/of/{peer}"))
        view.update(status(version=16, state="done"))
    logger.removeHandler(handler)
    assert "diloco: the disk is behind\n" in file.getvalue(), "above the table"
    assert (
        "p0 ready at /address/of/p0" in file.getvalue() and "/address/of/p1" not in file.getvalue()
    )
    assert "done" in file.getvalue().rpartition("run quickstart")[2]
    assert file.getvalue().endswith("\x1b[?25h")  # the cursor is back


texts = st.text(max_size=9)
figures = st.none() | st.floats() | st.integers(0, 10**12)
messages = st.builds(Ready, texts, address=texts, advice=texts) | st.builds(
    PeerStatus,
    texts,
    state=texts,
    version=figures,
    loss=figures,
    tokens_per_s=figures,
    bytes_sent=figures,
)


@pytest.mark.parametrize("terminal", [False, True])
@settings(max_examples=50, deadline=None)
@given(said=st.lists(messages))
def test_no_message_can_end_the_view_or_break_its_lines(terminal: bool, said: list[Report]) -> None:
    view, file, _ = make(terminal, total=None)
    for message in said:
        view.update(message)
    shown(view)
    if not terminal:
        assert all(line.startswith("[  0.0s] ") for line in file.getvalue().split("\n")[:-1])
        assert file.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("readable", "texts"),
    [
        (
            human_bytes,
            {
                None: "-",
                0: "0 B",
                999: "999 B",
                1000: "1.0 kB",
                1.234e6: "1.2 MB",
                99.96e6: "100 MB",
            },
        ),
        (human_bytes, {999.6e6: "1.0 GB", 5e15: "5000 TB", float("nan"): "-"}),
        (human_count, {None: "-", 7.4: "7", 4100: "4.1k", 123456: "123k", 2e6: "2.0M"}),
        (
            human_seconds,
            {0: "0:00", 59.6: "1:00", 3725: "1:02:05", 90000: "25:00:00", float("inf"): "-"},
        ),
    ],
)
def test_numbers_are_readable(
    readable: Callable[[float | None], str], texts: dict[float | None, str]
) -> None:
    assert {number: readable(number) for number in texts} == texts
