"""The page of a swarm: charts and rows, the poller behind them, Prometheus, and (where there is one) a real browser."""

from __future__ import annotations

import importlib.util
import shutil
import urllib.error
import urllib.request

import pytest

from diloco.protocol.snapshot import Snapshot
from tests.support.dashboards import PEERS, fetch, needs_extra
from tests.support.peers import DEADLINE_S, Command, eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="no chromium, or no playwright to drive it, on this machine",
)


@needs_extra
def test_state_metrics_and_page_are_served_from_one_process(page: tuple[str, Command]) -> None:
    url, _ = page
    seen = Snapshot.model_validate_json(fetch(f"{url}/api/state"))
    assert len(seen.peers) == PEERS
    assert b"diloco_up 1.0" in fetch(f"{url}/metrics")
    assert b"diloco: fake" in fetch(url)
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        for path in ("/", "/api/state", "/metrics", "/_nicegui_ws/socket.io/?EIO=4&transport=polling"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=DEADLINE_S)
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as reply:
        assert reply.headers["X-Frame-Options"] == "DENY"
        assert "frame-ancestors 'none'" in reply.headers["Content-Security-Policy"]


@needs_extra
@needs_browser
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(("width", "height", "scheme"), [(1440, 900, "light"), (390, 844, "dark")])
def test_a_browser_shows_the_swarm_live_offline_and_in_under_two_megabytes(
    page: tuple[str, Command], width: int, height: int, scheme: str
) -> None:
    from playwright.sync_api import sync_playwright

    url, _ = page
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        tab = context.new_page()
        requested: list[str] = []
        problems: list[str] = []
        received = {"bytes": 0}
        tab.on("request", lambda request: requested.append(request.url))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        network = context.new_cdp_session(tab)
        network.send("Network.enable")
        network.on("Network.loadingFinished", lambda event: received.update(
            bytes=received["bytes"] + event["encodedDataLength"]
        ))  # fmt: skip
        network.on("Network.webSocketFrameReceived", lambda event: received.update(
            bytes=received["bytes"] + len(event["response"]["payloadData"])
        ))  # fmt: skip
        tab.goto(url)
        tab.get_by_text("live", exact=True).wait_for()
        tab.get_by_text("worker-03", exact=True).first.wait_for()
        assert received["bytes"] < 2_000_000
        assert [one for one in requested if not one.startswith((url, "data:", "ws://127.0.0.1"))] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator("canvas").count() == 4
        assert tab.evaluate("document.body.classList.contains('body--dark')") == (scheme == "dark")
        tokens = tab.get_by_text("tokens applied", exact=True).locator("xpath=following-sibling::*")
        flight = tab.get_by_text("in flight", exact=True).locator("xpath=following-sibling::*")
        before = (tokens.inner_text(), flight.inner_text())
        eventually(lambda: (tab.wait_for_timeout(100), (tokens.inner_text(), flight.inner_text()) != before)[1], "news")
        assert problems == []
        browser.close()
