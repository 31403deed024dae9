"""The server of the page, the figures for Prometheus, and the live view with and without a
terminal."""

import asyncio
import io
import json
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from diloco.cli.status import dashboard
from diloco.dashboard.live import LiveView, Stderr
from diloco.dashboard.server import HEADERS, PAGE, Dashboard, exposition
from diloco.dashboard.tables import page
from diloco.errors import ConfigError
from diloco.messages.control import Figures
from diloco.messages.snapshot import Snapshot
from diloco.rundir.reporting import Notice, PeerStatus, Ready, Report
from diloco.text import human_bytes, human_count, human_seconds
from tests.support.fake_swarm import FakeSwarm, peer_id, snapshot

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def polled(page: Dashboard, swarm: FakeSwarm, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        asyncio.run(page.poll(swarm))
        clock.now += 1.0


def test_the_page_the_state_and_the_metrics_are_served_over_http() -> None:
    swarm = FakeSwarm(4)

    def read(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(url, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return reply.status, reply.read(), dict(reply.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers)

    async def visit() -> None:
        with Dashboard("127.0.0.1", 0) as dashboard:
            url = f"http://127.0.0.1:{dashboard.server_address[1]}"
            await dashboard.poll(swarm)
            watching = asyncio.create_task(dashboard.watch(swarm))
            status, page, headers = await asyncio.to_thread(read, url)
            assert (status, page) == (200, PAGE) and headers.items() >= HEADERS.items()
            status, state, headers = await asyncio.to_thread(read, f"{url}/api/state?again")
            assert (status, len(msgspec.json.decode(state, type=Snapshot).peers)) == (200, 4)
            assert float(headers["X-Diloco-Age-Seconds"]) < 60
            assert b"\ndiloco_up 1.0\n" in (await asyncio.to_thread(read, f"{url}/metrics"))[1]
            assert (await asyncio.to_thread(read, f"{url}/else"))[0] == 404
            for path in ("/", "/api/page", "/api/state", "/metrics"):
                assert (await asyncio.to_thread(read, url + path, Host="evil.example"))[0] == 403
            watching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await watching

    asyncio.run(visit())


def test_the_page_reads_only_fields_that_its_content_has() -> None:
    known = set(re.findall(r'"([a-z_]+)":', json.dumps(page(snapshot(2)))))
    field = r"(?<!#)\b(?:point|page|column)\.([a-z_]+)\b(?!\()"
    used = set(re.findall(field, PAGE.decode()))
    assert len(used) >= 10 and used - known == set()


def test_only_names_of_this_machine_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site whose own name leads to 127.0.0.1 (DNS rebinding) still says that name."""
    monkeypatch.setattr("socket.gethostname", lambda: "Box.example")
    with Dashboard("127.0.0.1", 0) as dashboard:
        for host in ("127.0.0.1", "LocalHost", "[::1]", "192.168.1.7", "box.example"):
            assert dashboard.answer(f"{host}:8471", "/")[0] == 200
        for host in ("evil.example:8471", "localhost.evil.example:8471", "", "[::1"):
            assert dashboard.answer(host, "/")[0] == 403


def test_prometheus_reads_the_swarm_and_that_it_is_lost() -> None:
    clock = Clock()
    swarm = FakeSwarm(3, dies_after_s=2, clock=clock)
    with Dashboard("127.0.0.1", 0, clock) as dashboard:

        def read() -> dict[str, float]:
            lines = [line for line in exposition(dashboard).splitlines() if line[0] != "#"]
            return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

        assert read()["diloco_up"] == 0.0 and dashboard.answer("localhost", "/api/state")[0] == 503
        polled(dashboard, swarm, clock, 1)
        metrics = read()
        assert metrics["diloco_up"] == 1.0 and dashboard.snapshot is not None
        processed = dashboard.snapshot.ledger.processed
        assert metrics['diloco_tokens{fate="processed"}'] == processed
        fates = sum(value for name, value in metrics.items() if name.startswith("diloco_tokens{"))
        assert fates == 2 * processed
        assert f'diloco_peer_tokens{{peer="worker-02",peer_id="{peer_id(2)}"}}' in metrics
        polled(dashboard, swarm, clock, 10)
        metrics = read()
        assert (metrics["diloco_up"], metrics["diloco_last_answer_seconds"]) == (0.0, 9.0)
        assert len([name for name in metrics if name.startswith("diloco_peer_tokens{")]) == 3


def test_a_name_with_quotes_is_one_label() -> None:
    with Dashboard("127.0.0.1", 0) as dashboard:
        seen = snapshot(1)
        dashboard.snapshot = replace(seen, peers=[replace(seen.peers[0], name='a"} 1\\')])
        assert 'diloco_peer_tokens{peer="a\\"} 1\\\\",peer_id="' in exposition(dashboard)


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host=203\.0\.113\.7 --port=0 cannot be listened on"):
        dashboard.callback(ADDRESS, "203.0.113.7", 0)


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def screen(width: int = 80, terminal: bool = False) -> Console:
    size = {"width": width, "height": 24}
    return Console(
        file=Screen() if terminal else io.StringIO(), color_system=None, _environ={}, **size
    )


def make(
    terminal: bool, peers: int = 2, total: int | None = 16, width: int = 80
) -> tuple[LiveView, io.StringIO, Clock]:
    clock, console = Clock(), screen(width, terminal)
    names = [f"p{index}" for index in range(peers)]
    return LiveView(console, names, total, "run quickstart", clock), console.file, clock  # type: ignore[return-value]


def status(peer: str = "p0", state: str = "training", version: int = 3, **more: Any) -> PeerStatus:
    known = {"loss": 2.614, "eval_loss": 2.7, "tokens_per_s": 4100.0, "bytes_sent": 1230000}
    own = {name: more.pop(name) for name in list(more) if name in Figures.__struct_fields__}
    return PeerStatus(
        peer, 0.0, state, version, inner_step=90, figures=Figures(**{**known, **own}), **more
    )


def shown(view: LiveView, width: int = 80) -> list[list[str]]:
    """The words of each line."""
    console = screen(width)
    console.print(view.render())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(cell_len, lines)) <= width  # a letter may take no column, or two
    return [line.split() for line in lines]


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
        "[ 12.3s] p0 v3/16 loss 2.61 held-out 2.70 tok/s 4.1k sent 1.2 MB training",
        "[ 12.3s] p0 ready at /ip4/127.0.0.1/tcp/1/p2p/12D3",
        "[ 12.3s] p0: one two",
        "[ 12.3s] p0 v3/16 loss 2.61 held-out 2.40 tok/s 4.1k sent 1.2 MB done",
        "[ 12.3s] p1 v4/16 loss - held-out - tok/s - sent - left",
    ]


def test_there_is_one_line_per_peer_and_outer_step_or_one_in_ten_seconds() -> None:
    view, file, clock = make(terminal=False)
    for version in (1, 2):
        for step in range(50):
            clock.now += 0.01
            state, loss = ("evaluating", None) if step < 5 else ("training", 5.0 - version)
            for peer in ("p0", "p1"):
                view.update(status(peer, state, version, eval_loss=loss))
    # once the evaluation of the step is known, so that version and loss belong together
    lines = [line.split("] ")[1] for line in file.getvalue().splitlines()]
    expected = [("p0", 1, 4), ("p1", 1, 4), ("p0", 2, 3), ("p1", 2, 3)]
    assert [line.split(" tok/s")[0] for line in lines] == [
        f"{peer} v{version}/16 loss 2.61 held-out {loss}.00" for peer, version, loss in expected
    ]
    view, file, clock = make(terminal=False)
    for second in range(60):
        clock.now = float(second)
        view.update(status(state="exchanging"))
    begins = [line[:8] for line in file.getvalue().splitlines()]
    assert begins == [f"[{second:5.1f}s]" for second in range(10, 60, 10)]
    view, file, clock = make(terminal=False)
    for second in range(60):
        clock.now = float(second)
        view.update(PeerStatus("host", state="training", version=3 + (second > 40)))
    assert [line.split()[3] for line in file.getvalue().splitlines()] == ["v3/16", "v4/16"]


def test_the_table_shows_every_peer_the_sum_and_the_progress() -> None:
    view, _, clock = make(terminal=True)
    view.update(status(version=2))
    clock.now = 10.0
    view.update(status("p1", "exchanging", 4, bytes_received=2.5e9, bytes_sent=5e5, peers=12))
    title, progress, *table = shown(view)
    assert title == ["run", "quickstart"]
    # Two outer steps took 10 s, so the other twelve take 60 s; those before a resume do not count.
    assert progress[-8:] == "4/16 0:10 elapsed 1:00 to go 12 peers".split()
    assert [" ".join(words) for words in table] == [
        "peer state version step loss held-out tok/s sent received",
        "p0 training 2/16 90 2.61 2.70 4.1k 1.2 MB 0 B",
        "p1 exchanging 4/16 90 2.61 2.70 4.1k 500 kB 2.5 GB",
        "together 8.2k 1.7 MB 2.5 GB",
    ]


def test_what_a_peer_says_is_text_and_no_markup() -> None:
    view, _, _ = make(terminal=True, peers=1)
    view.update(status("volunteer"))
    assert any(line[0] == "volunteer" for line in shown(view)), "whom nobody announced"
    view.update(status("[red]x[/red]\x1b[2J", state="[bold]\nodd"))
    assert any("[red]x[/red] [2J [bold] odd" in " ".join(line) for line in shown(view, 200))


def test_a_terminal_ends_with_the_final_table_and_one_address() -> None:
    view, file, _ = make(terminal=True)
    handler, logger = Stderr(), logging.getLogger("diloco.above")
    logger.addHandler(handler)
    with view:
        logger.warning("the disk is %s", "behind")
        for peer in ("p0", "p1"):
            view.update(Ready(peer, address=f"/address/of/{peer}"))
        view.update(status(version=16, state="done"))
    logger.removeHandler(handler)
    text = file.getvalue()
    assert "diloco: the disk is behind\n" in text, "above the table"
    assert "p0 ready at /address/of/p0" in text and "/address/of/p1" not in text
    assert "done" in text.rpartition("run quickstart")[2]
    assert text.endswith("\x1b[?25h")  # the cursor is back


texts = st.text(max_size=9)
figures = st.none() | st.floats() | st.integers(0, 10**12)
numbers = dict.fromkeys(["loss", "tokens_per_s", "bytes_sent"], figures)
reports = st.builds(Ready, texts, address=texts, advice=texts)
told = st.none() | st.builds(Figures, **numbers)
reports |= st.builds(PeerStatus, texts, state=texts, version=figures, figures=told)


@pytest.mark.parametrize("terminal", [False, True])
@settings(max_examples=50, deadline=None)
@given(said=st.lists(reports))
def test_no_message_can_end_the_view_or_break_its_lines(terminal: bool, said: list[Report]) -> None:
    view, file, _ = make(terminal, total=None)
    for message in said:
        view.update(message)
    shown(view)
    if not terminal:
        assert all(line.startswith("[  0.0s] ") for line in file.getvalue().split("\n")[:-1])
        assert file.getvalue().replace("\n", "").isprintable()


BYTES = {None: "-", 0: "0 B", 999: "999 B", 1000: "1.0 kB", 1.234e6: "1.2 MB", 99.96e6: "100 MB"}
BYTES |= {999.6e6: "1.0 GB", 5e15: "5000 TB", float("nan"): "-"}
COUNTS = {None: "-", 7.4: "7", 4100: "4.1k", 123456: "123k", 2e6: "2.0M"}
SECONDS = {0: "0:00", 59.6: "1:00", 3725: "1:02:05", 90000: "25:00:00", float("inf"): "-"}


@pytest.mark.parametrize(
    ("readable", "expected"),
    [(human_bytes, BYTES), (human_count, COUNTS), (human_seconds, SECONDS)],
)
def test_numbers_are_readable(
    readable: Callable[[float | None], str], expected: dict[float | None, str]
) -> None:
    assert {number: readable(number) for number in expected} == expected
