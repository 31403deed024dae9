"""The page of a swarm: charts and rows, the poller behind them, Prometheus, and (where there is one) a real browser."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import dashboard as cli_dashboard
from diloco.config.address import scope
from diloco.dashboard import charts
from diloco.dashboard.poller import READ_S, SAMPLE_S, SAMPLES, Poller
from diloco.errors import ConfigError
from diloco.rundir.compare import Point, Run
from tests.support.dashboards import PEERS, needs_extra
from tests.support.fake_swarm import FRAGMENTS, FakeSwarm, peer_id, snapshot


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def polled(poller: Poller, clock: Clock, seconds: float) -> None:
    for _ in range(int(seconds)):
        asyncio.run(poller.poll())
        clock.now += 1.0


# --- Charts and rows --------------------------------------------------------------------------------------------------


def test_the_curves_are_of_the_loss_by_the_swarm_clock_and_by_time() -> None:
    seen = snapshot(4)
    last = seen.loss[-1]
    by_tokens, by_time = charts.loss_by_tokens(seen), charts.loss_by_time(seen)
    assert by_tokens["xAxis"]["name"] == "million tokens applied"
    assert by_tokens["series"][0]["data"][-1] == [last.tokens / 1e6, round(last.loss, 4)]
    assert by_time["series"][0]["data"][-1] == [round(last.at * 1000), round(last.loss, 4)]
    lowest, highest = (series["data"][-1][1] for series in by_time["series"][1:])
    assert lowest < last.loss < highest


def test_the_held_out_loss_of_runs_is_drawn_beside_that_of_their_baseline(tmp_path: Path) -> None:
    mine, baseline = (
        Run(tmp_path, {"outer.method": method, "run.seed": 0}, [Point(0, 4.0, 0.0, 0.0, 0.0), last], name=method)
        for method, last in (
            ("diloco", Point(1, 3.0, 1e6, 1.0, 1.0)),
            ("data_parallel", Point(2, 2.0, 2e6, 1.0, 1.0)),
        )
    )
    series = charts.loss_by_tokens(snapshot(4), [mine, baseline])["series"]
    assert [one["name"] for one in series[3:]] == ["held-out, diloco", "held-out, data_parallel"]
    assert series[3]["data"] == [[0.0, 4.0], [1.0, 3.0]]
    assert charts.held_out([baseline, mine]) == "3.000 (+0.0 %)"
    assert charts.held_out([mine]) == "3.000" and charts.held_out([baseline]) == "-"


def test_run_directories_are_read_now_and_then(tmp_path: Path) -> None:
    line = {"time": 1.0, "peer": "p0", "version": 0, "tokens": 0, "eval_loss": 5.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    clock = Clock()
    poller = Poller(FakeSwarm(2, clock=clock), clock, [tmp_path])
    polled(poller, clock, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line, "version": 1, "eval_loss": 4.0}) + "\n")
    polled(poller, clock, READ_S - 1)
    assert [point.loss for point in poller.runs[0].curve] == [5.0]
    polled(poller, clock, 1)
    assert [point.loss for point in poller.runs[0].curve] == [5.0, 4.0]


def test_points_at_one_reading_of_the_clock_are_one() -> None:
    seen = snapshot(4)
    still = [point.model_copy(update={"tokens": 7}) for point in seen.loss]
    chart = charts.loss_by_tokens(seen.model_copy(update={"loss": still}))
    assert chart["series"][0]["data"] == [[7.0, round(seen.loss[-1].loss, 4)]]
    assert chart["series"][0]["showSymbol"]  # a line of one point is invisible


def test_every_fragment_is_on_the_map_once_under_its_syncer() -> None:
    seen = snapshot(PEERS)
    fragments = [seen.fragments[0].model_copy(update={"syncer": None}), *seen.fragments[1:]]
    [series] = charts.fragment_map(seen.model_copy(update={"fragments": fragments}))["series"]
    tiles = {tile["name"]: [child["name"] for child in tile["children"]] for tile in series["data"]}
    assert sorted(int(name.split()[0]) for names in tiles.values() for name in names) == list(range(FRAGMENTS))
    assert tiles["nobody"] == ["0  v50"]
    assert tiles["worker-05"] == ["1  v50"]


def test_the_bars_of_a_peer_end_where_its_rounds_did() -> None:
    seen = snapshot(3)
    chart = charts.timeline(seen)
    rows = [row for row in seen.timeline if row.peer_id == peer_id(1)][-charts.ROUNDS :]
    begin = min(row.ended_at for row in seen.timeline if row.round == rows[0].round) - 12  # about
    index = chart["yAxis"]["data"].index("worker-01")
    lengths = [series["data"][index] for series in chart["series"]]
    assert sum(lengths) == pytest.approx(rows[-1].ended_at - begin, abs=0.5)
    assert lengths[1:4] == [pytest.approx(value) for value in (
        rows[0].seconds.compute, rows[0].seconds.wait, rows[0].seconds.comm + rows[0].seconds.outer
    )]  # fmt: skip
    assert [series["name"] for series in chart["series"][:4]] == ["", "compute", "wait", "exchange"]


def test_a_swarm_of_which_nothing_is_known_yet_has_a_page_too() -> None:
    seen = snapshot(2)
    empty: dict[str, Any] = {key: [] for key in ("peers", "fragments", "rounds", "loss", "timeline", "events")}
    bare = seen.model_copy(update=empty)
    for chart in (charts.loss_by_tokens, charts.loss_by_time, charts.fragment_map, charts.timeline):
        json.dumps(chart(bare), allow_nan=False)
    assert charts.peer_rows(bare, lambda peer: []) == charts.event_rows(bare) == []


def test_the_leaderboard_ranks_peers_by_the_tokens_that_are_in_the_model() -> None:
    known = snapshot(3, elapsed_s=1200)
    first, second, third = known.ledger.contributions
    rows = [
        replace(first, tokens=100, first_version=99, last_version=100),
        replace(second, peer_id="", name="others", tokens=900),
        replace(third, tokens=300, first_version=2),
    ]
    ledger = known.ledger.model_copy(update={"contributions": rows})
    board = charts.contribution_rows(known.model_copy(update={"ledger": ledger}))
    shown = [tuple(row[key] for key in ("rank", "peer", "tokens", "share", "part", "since")) for row in board]
    assert shown == [
        (1, "worker-02", "300", "23.1%", 1.0, "step 2"),  # that round is too long ago to be in the snapshot
        (2, "worker-00", "100", "7.7%", 0.333, "step 99, 0:12 ago"),
        ("", "others", "900", "69.2%", 1.0, "step 1"),
    ]
    none = known.ledger.model_copy(update={"contributions": []})
    assert charts.contribution_rows(known.model_copy(update={"ledger": none})) == []


def test_events_name_peers_and_come_newest_first() -> None:
    first = charts.event_rows(snapshot(4))[0]
    assert (first["kind"], first["text"], first["ago"]) == ("join", "peer=worker-01 live=1", "0:03")


# --- The poller -------------------------------------------------------------------------------------------------------


def test_the_pace_of_each_peer_is_sampled_and_its_history_bounded() -> None:
    clock = Clock()
    poller = Poller(FakeSwarm(2, clock=clock), clock)
    polled(poller, clock, SAMPLE_S * (SAMPLES + 5))
    assert len(poller.paces(peer_id(1))) == SAMPLES
    assert poller.paces(peer_id(1)) == pytest.approx([913] * SAMPLES, abs=1)
    assert poller.tokens_per_s == pytest.approx(1813, abs=2)
    assert poller.paces("nobody") == []


def test_what_was_seen_last_stays_when_nobody_answers() -> None:
    clock = Clock()
    poller = Poller(FakeSwarm(2, dies_after_s=3, clock=clock), clock)
    polled(poller, clock, 4)
    assert (poller.lost, poller.number) == (None, 4)
    polled(poller, clock, 10)
    assert poller.lost is not None and "does not answer" in poller.lost
    assert poller.snapshot is not None and poller.number == 4
    assert poller.seen_s() == 11


# --- The command ------------------------------------------------------------------------------------------------------


def test_without_the_extra_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nicegui" else found(name))
    with pytest.raises(ConfigError, match=r"needs nicegui; pip install 'diloco\[dashboard\]'"):
        cli_dashboard.run(
            "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg", "127.0.0.1", 0
        )


@needs_extra
@pytest.mark.parametrize(("host", "port"), [("203.0.113.7", 0), ("127.0.0.1", 1)])
def test_an_address_that_cannot_be_listened_on_is_named(host: str, port: int) -> None:
    if port and os.geteuid() == 0:
        pytest.skip("root may listen on every port")
    with pytest.raises(ConfigError, match=rf"--host={host} --port={port} cannot be listened on"):
        cli_dashboard.run("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg", host, port)


def test_only_loopback_counts_as_unseen() -> None:
    hosts = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "box")
    assert [scope(f"/ip/{host}") == "loopback" for host in hosts] == [True, True, True, False, False]


# --- Prometheus -------------------------------------------------------------------------------------------------------


@needs_extra
def test_prometheus_reads_the_swarm_and_that_it_is_lost() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from diloco.dashboard.server import exposition

    clock = Clock()
    poller = Poller(FakeSwarm(3, dies_after_s=2, clock=clock), clock)

    def read() -> dict[str, dict[str, float]]:
        families = text_string_to_metric_families(exposition(poller).decode())
        return {f.name: {str(dict(s.labels)): s.value for s in f.samples} for f in families}

    assert read()["diloco_up"] == {"{}": 0.0} and "diloco_tokens" not in read()
    polled(poller, clock, 1)
    metrics = read()
    assert metrics["diloco_up"] == {"{}": 1.0}
    assert poller.snapshot is not None
    ledger = poller.snapshot.ledger
    tokens = metrics["diloco_tokens"]
    assert tokens["{'fate': 'processed'}"] == ledger.processed
    assert sum(tokens.values()) == 2 * ledger.processed
    assert len(metrics["diloco_peer_tokens"]) == 3
    polled(poller, clock, 10)
    assert read()["diloco_up"] == {"{}": 0.0}
    assert len(read()["diloco_peer_tokens"]) == 3  # what was seen last


# --- Other sites ------------------------------------------------------------------------------------------------------


@needs_extra
@pytest.mark.parametrize(
    ("host", "origin", "why"),
    [
        ("127.0.0.1:8471", None, None),
        ("localhost:8471", "http://localhost:8471", None),
        ("LocalHost:8471", "http://localhost:8471", None),
        ("[::1]:8471", "http://[::1]:8471", None),
        ("192.168.1.7:8471", "http://192.168.1.7:8471", None),
        ("evil.example:8471", None, "not served under this name"),
        ("evil.example", "http://evil.example", "not served under this name"),
        ("localhost.evil.example:8471", None, "not served under this name"),
        ("", None, "not served under this name"),
        ("[::1", None, "is no address"),
        ("127.0.0.1:8471", "http://evil.example", "another site asks"),
        ("127.0.0.1:8471", "http://127.0.0.1:9000", "another site asks"),
        ("127.0.0.1:8471", "null", "another site asks"),
    ],
)
def test_only_the_page_itself_is_answered(host: str, origin: str | None, why: str | None) -> None:
    from diloco.dashboard.guard import objection

    found = objection(host, origin, {"localhost"})
    assert found is None if why is None else why in str(found)


@needs_extra
def test_a_web_socket_of_another_site_is_closed_and_every_answer_has_the_headers() -> None:
    from diloco.dashboard.guard import HEADERS, OwnPageOnly

    async def page(scope: Any, receive: Any, send: Any) -> None:
        kind = "websocket.accept" if scope["type"] == "websocket" else "http.response.start"
        await send({"type": kind, "status": 200, "headers": []})

    async def ask(kind: str, host: str, origin: str) -> dict[str, Any]:
        said: list[Any] = []
        scope = {"type": kind, "method": "GET", "headers": [(b"host", host.encode()), (b"origin", origin.encode())]}

        async def send(message: Any) -> None:
            said.append(message)

        await OwnPageOnly(page, {"localhost"})(scope, None, send)  # type: ignore[arg-type]
        return said[0]  # type: ignore[no-any-return]

    assert asyncio.run(ask("websocket", "localhost:1", "http://localhost:1"))["type"] == "websocket.accept"
    assert asyncio.run(ask("websocket", "localhost:1", "http://evil.example")) == {
        "type": "websocket.close", "code": 1008
    }  # fmt: skip
    answer = asyncio.run(ask("http", "localhost:1", "http://localhost:1"))
    assert {(name.lower().encode(), text.encode()) for name, text in HEADERS.items()} <= set(answer["headers"])
    assert asyncio.run(ask("http", "localhost:1", "http://evil.example"))["status"] == 403


# --- Served -----------------------------------------------------------------------------------------------------------
