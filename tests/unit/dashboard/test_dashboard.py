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
from diloco.dashboard.poller import READ_S, SAMPLE_S, Poller
from diloco.errors import ConfigError
from diloco.rundir.compare import Point, Run
from tests.support.dashboards import PEERS, needs_extra
from tests.support.fake_swarm import FRAGMENTS, FakeSwarm, peer_id, snapshot

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def polled(poller: Poller, clock: Clock, seconds: float) -> None:
    for _ in range(int(seconds)):
        asyncio.run(poller.poll())
        clock.now += 1.0


def test_the_loss_is_drawn_by_tokens_and_by_time() -> None:
    seen = snapshot(4)
    last = seen.loss[-1]
    by_tokens, by_time = charts.loss_by_tokens(seen), charts.loss_by_time(seen)
    assert by_tokens["xAxis"]["name"] == "million tokens applied"
    assert by_tokens["series"][0]["data"][-1] == [last.tokens / 1e6, round(last.loss, 4)]
    assert by_time["series"][0]["data"][-1] == [round(last.at * 1000), round(last.loss, 4)]
    lowest, highest = (series["data"][-1][1] for series in by_time["series"][1:])
    assert lowest < last.loss < highest
    still = [point.model_copy(update={"tokens": 7}) for point in seen.loss]
    chart = charts.loss_by_tokens(seen.model_copy(update={"loss": still}))
    assert chart["series"][0]["data"] == [[7.0, round(last.loss, 4)]], "points at one reading of the clock are one"
    assert chart["series"][0]["showSymbol"]  # a line of one point is invisible


def test_the_held_out_loss_of_runs_is_beside_their_baseline(tmp_path: Path) -> None:
    ends = {"diloco": Point(1, 3.0, 1e6, 1.0, 1.0), "data_parallel": Point(2, 2.0, 2e6, 1.0, 1.0)}
    mine, baseline = (
        Run(tmp_path, {"outer.method": method, "run.seed": 0}, [Point(0, 4.0, 0.0, 0.0, 0.0), last], name=method)
        for method, last in ends.items()
    )
    series = charts.loss_by_tokens(snapshot(4), [mine, baseline])["series"]
    assert [one["name"] for one in series[3:]] == ["held-out, diloco", "held-out, data_parallel"]
    assert series[3]["data"] == [[0.0, 4.0], [1.0, 3.0]]
    assert charts.held_out([baseline, mine]) == "3.000 (+0.0 %)"
    assert charts.held_out([mine]) == "3.000" and charts.held_out([baseline]) == "-"


def test_run_directories_are_read_now_and_then(tmp_path: Path) -> None:
    line, file = {"time": 1.0, "peer": "p0", "version": 0, "tokens": 0, "eval_loss": 5.0}, tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(line) + "\n")
    clock = Clock()
    poller = Poller(FakeSwarm(2, clock=clock), clock, [tmp_path])
    polled(poller, clock, 1)
    file.write_text(file.read_text() + json.dumps({**line, "version": 1, "eval_loss": 4.0}) + "\n")
    for seconds, losses in ((READ_S - 1, [5.0]), (1, [5.0, 4.0])):
        polled(poller, clock, seconds)
        assert [point.loss for point in poller.runs[0].curve] == losses


def test_every_fragment_is_on_the_map_once_under_its_syncer() -> None:
    seen = snapshot(PEERS)
    fragments = [seen.fragments[0].model_copy(update={"syncer": None}), *seen.fragments[1:]]
    [series] = charts.fragment_map(seen.model_copy(update={"fragments": fragments}))["series"]
    tiles = {tile["name"]: [child["name"] for child in tile["children"]] for tile in series["data"]}
    assert sorted(int(name.split()[0]) for names in tiles.values() for name in names) == list(range(FRAGMENTS))
    assert (tiles["nobody"], tiles["worker-05"]) == (["0  v50"], ["1  v50"])


def test_the_bars_of_a_peer_end_where_its_rounds_did() -> None:
    seen = snapshot(3)
    chart = charts.timeline(seen)
    rows = [row for row in seen.timeline if row.peer_id == peer_id(1)][-charts.ROUNDS :]
    begin = min(row.ended_at for row in seen.timeline if row.round == rows[0].round) - 12  # about
    index = chart["yAxis"]["data"].index("worker-01")
    lengths = [series["data"][index] for series in chart["series"]]
    assert sum(lengths) == pytest.approx(rows[-1].ended_at - begin, abs=0.5)
    seconds = rows[0].seconds
    assert lengths[1:4] == pytest.approx([seconds.compute, seconds.wait, seconds.comm + seconds.outer])
    assert [series["name"] for series in chart["series"][:4]] == ["", "compute", "wait", "exchange"]


def test_a_swarm_of_which_nothing_is_known_yet_has_a_page_too() -> None:
    first = charts.event_rows(snapshot(4))[0]  # the newest
    assert (first["kind"], first["text"], first["ago"]) == ("join", "peer=worker-01 live=1", "0:03")
    empty: dict[str, Any] = {key: [] for key in ("peers", "fragments", "rounds", "loss", "timeline", "events")}
    bare = snapshot(2).model_copy(update=empty)
    for chart in (charts.loss_by_tokens, charts.loss_by_time, charts.fragment_map, charts.timeline):
        json.dumps(chart(bare), allow_nan=False)
    assert charts.peer_rows(bare, lambda peer: []) == charts.event_rows(bare) == []


def test_the_leaderboard_ranks_peers_by_tokens_in_the_model() -> None:
    known = snapshot(3, elapsed_s=1200)

    def board(*rows: Any) -> list[tuple[Any, ...]]:
        ledger = known.ledger.model_copy(update={"contributions": list(rows)})
        found = charts.contribution_rows(known.model_copy(update={"ledger": ledger}))
        return [tuple(row[key] for key in ("rank", "peer", "tokens", "share", "part", "since")) for row in found]

    first, second, third = known.ledger.contributions
    first = replace(first, tokens=100, first_version=99, last_version=100)
    others = replace(second, peer_id="", name="others", tokens=900)
    assert board(first, others, replace(third, tokens=300, first_version=2)) == [
        (1, "worker-02", "300", "23.1%", 1.0, "step 2"),  # that round is too long ago to be in the snapshot
        (2, "worker-00", "100", "7.7%", 0.333, "step 99, 0:12 ago"),
        ("", "others", "900", "69.2%", 1.0, "step 1"),
    ]
    assert board() == []


def test_the_pace_of_each_peer_is_sampled_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, samples = Clock(), 6
    monkeypatch.setattr("diloco.dashboard.poller.SAMPLES", samples)
    poller = Poller(FakeSwarm(2, clock=clock), clock)
    polled(poller, clock, SAMPLE_S * (samples + 5))
    assert poller.paces(peer_id(1)) == pytest.approx([913] * samples, abs=1)
    assert poller.tokens_per_s == pytest.approx(1813, abs=2)
    assert poller.paces("nobody") == []


def test_what_was_seen_last_stays_when_nobody_answers() -> None:
    clock = Clock()
    poller = Poller(FakeSwarm(2, dies_after_s=3, clock=clock), clock)
    polled(poller, clock, 4)
    assert (poller.lost, poller.number) == (None, 4)
    polled(poller, clock, 10)
    assert poller.lost is not None and "does not answer" in poller.lost
    assert poller.snapshot is not None and poller.number == 4 and poller.seen_s() == 11


def test_without_the_extra_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nicegui" else found(name))
    with pytest.raises(ConfigError, match=r"needs nicegui; pip install 'diloco\[dashboard\]'"):
        cli_dashboard.run(ADDRESS, "127.0.0.1", 0)


@needs_extra
@pytest.mark.parametrize(("host", "port"), [("203.0.113.7", 0), ("127.0.0.1", 1)])
def test_an_address_that_cannot_be_listened_on_is_named(host: str, port: int) -> None:
    if port and os.geteuid() == 0:
        pytest.skip("root may listen on every port")
    with pytest.raises(ConfigError, match=rf"--host={host} --port={port} cannot be listened on"):
        cli_dashboard.run(ADDRESS, host, port)


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
    assert metrics["diloco_up"] == {"{}": 1.0} and poller.snapshot is not None
    processed = poller.snapshot.ledger.processed
    assert metrics["diloco_tokens"]["{'fate': 'processed'}"] == processed
    assert sum(metrics["diloco_tokens"].values()) == 2 * processed and len(metrics["diloco_peer_tokens"]) == 3
    polled(poller, clock, 10)
    metrics = read()
    assert metrics["diloco_up"] == {"{}": 0.0} and len(metrics["diloco_peer_tokens"]) == 3  # what was seen last


@needs_extra
@pytest.mark.parametrize(
    ("host", "origins", "why"),
    [
        ("127.0.0.1:8471", [None], None),
        ("localhost:8471", ["http://localhost:8471"], None),
        ("LocalHost:8471", ["http://localhost:8471"], None),
        ("[::1]:8471", ["http://[::1]:8471"], None),
        ("192.168.1.7:8471", ["http://192.168.1.7:8471"], None),
        ("evil.example:8471", [None], "not served under this name"),
        ("evil.example", ["http://evil.example"], "not served under this name"),
        ("localhost.evil.example:8471", [None], "not served under this name"),
        ("", [None], "not served under this name"),
        ("[::1", [None], "is no address"),
        ("127.0.0.1:8471", ["http://evil.example", "http://127.0.0.1:9000", "null"], "another site asks"),
    ],
)
def test_only_the_page_itself_is_answered(host: str, origins: list[str | None], why: str | None) -> None:
    from diloco.dashboard.guard import objection

    for origin in origins:
        found = objection(host, origin, {"localhost"})
        assert found is None if why is None else why in str(found)


@needs_extra
def test_another_site_gets_no_socket_and_all_get_the_headers() -> None:
    from diloco.dashboard.guard import HEADERS, OwnPageOnly

    async def page(scope: Any, receive: Any, send: Any) -> None:
        kind = "websocket.accept" if scope["type"] == "websocket" else "http.response.start"
        await send({"type": kind, "status": 200, "headers": []})

    def ask(kind: str, origin: str) -> dict[str, Any]:
        said: list[Any] = []
        scope = {"type": kind, "method": "GET", "headers": [(b"host", b"localhost:1"), (b"origin", origin.encode())]}

        async def send(message: Any) -> None:
            said.append(message)

        asyncio.run(OwnPageOnly(page, {"localhost"})(scope, None, send))  # type: ignore[arg-type]
        return said[0]  # type: ignore[no-any-return]

    assert ask("websocket", "http://localhost:1")["type"] == "websocket.accept"
    assert ask("websocket", "http://evil.example") == {"type": "websocket.close", "code": 1008}
    answer = ask("http", "http://localhost:1")
    assert {(name.lower().encode(), text.encode()) for name, text in HEADERS.items()} <= set(answer["headers"])
    assert ask("http", "http://evil.example")["status"] == 403


def test_only_loopback_counts_as_unseen() -> None:
    hosts = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "box")
    assert [scope(f"/ip/{host}") == "loopback" for host in hosts] == [True, True, True, False, False]
