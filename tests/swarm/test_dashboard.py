"""The page of a swarm in a real browser, where there is one."""

import importlib.util
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.peers import Command, command, eventually, free_port
from tests.support.places import ROOT

PEERS = 64
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[str, Command]]:
    """Address and process of the page of a fake swarm."""
    port = free_port()
    fake = str(ROOT / "tests" / "support" / "fake_swarm.py")
    with command(fake, str(port), str(PEERS), directory=tmp_path) as process:

        def answers() -> bool:
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state", timeout=10)
            except (urllib.error.URLError, ConnectionError):
                return False
            return bool(page.status == 200)

        process.sees(answers, "the page")
        yield f"http://127.0.0.1:{port}", process


@pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="no chromium, or no playwright to drive it, on this machine",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(("width", "height", "scheme"), [(1440, 900, "light"), (390, 844, "dark")])
def test_a_browser_shows_the_swarm_live_and_asks_nobody_else(
    page: tuple[str, Command], width: int, height: int, scheme: str
) -> None:
    from playwright.sync_api import sync_playwright

    url, process = page
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        ).new_page()
        requested: list[str] = []
        problems: list[str] = []
        tab.on("request", lambda request: requested.append(request.url))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        tab.goto(url)
        tab.get_by_text("live", exact=True).wait_for()
        assert tab.title() == "diloco: fake"
        for table in ("peers", "board"):
            assert tab.locator(f"#{table} tr").count() == 1 + PEERS
        assert tab.locator("#peers").get_by_text("worker-03", exact=True).count() == 1
        assert "def read(path):\n    with open(path)" in tab.locator("#samples").inner_text()
        assert len(tab.locator("#loss .mean").get_attribute("points").split()) > 300
        assert [one for one in requested if not one.startswith((url, "data:"))] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        light = tab.evaluate("getComputedStyle(document.body).color") == "rgb(227, 232, 238)"
        assert light == (scheme == "dark"), "text is light on dark"
        figures = tab.locator("#figures")
        before = figures.inner_text()
        eventually(lambda: (tab.wait_for_timeout(100), figures.inner_text() != before)[1], "news")
        assert problems == []
        process.process.kill()
        tab.get_by_text("the dashboard does not answer").wait_for()
        browser.close()
