"""The server of the page: what it answers and to whom, and the figures for Prometheus."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request

import msgspec
import pytest
from msgspec.structs import replace

from diloco.cli.status import dashboard
from diloco.dashboard.server import HEADERS, PAGE, Dashboard, exposition
from diloco.errors import ConfigError
from diloco.messages.snapshot import Snapshot
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
            for path in ("/", "/api/state", "/metrics"):
                assert (await asyncio.to_thread(read, url + path, Host="evil.example"))[0] == 403
            watching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await watching

    asyncio.run(visit())


def test_the_page_reads_only_fields_that_a_snapshot_has() -> None:
    known = set(re.findall(r'"([a-z_]+)":', snapshot(2).json().decode()))
    field = r"(?<!#)\b(?:row|point|state|run|ledger|event)\.([a-z_]+)\b(?!\()"
    used = set(re.findall(field, PAGE.decode()))
    assert len(used) > 35 and used - known == set()


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
        assert len([name for name in metrics if name.startswith("diloco_peer_tokens")]) == 3


def test_a_name_with_quotes_is_one_label() -> None:
    with Dashboard("127.0.0.1", 0) as dashboard:
        seen = snapshot(1)
        dashboard.snapshot = replace(seen, peers=[replace(seen.peers[0], name='a"} 1\\')])
        assert 'diloco_peer_tokens{peer="a\\"} 1\\\\",peer_id="' in exposition(dashboard)


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host=203\.0\.113\.7 --port=0 cannot be listened on"):
        dashboard.callback(ADDRESS, "203.0.113.7", 0)
