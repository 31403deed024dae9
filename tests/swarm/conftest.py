"""Everything in this folder starts real processes or real libp2p daemons."""

import os
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.peers import DEADLINE_S

HERE = Path(__file__).parent
LIMIT_S = 3 * DEADLINE_S  # of a test, whatever else the machine does


def pytest_configure(config: pytest.Config) -> None:
    """The workers of pytest-xdist share a server, which the process that starts them has started
    before."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        warm.start_server()


@pytest.fixture(autouse=True, scope="session")
def warm_processes() -> None:
    if warm.PLACE not in os.environ:
        warm.start_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.swarm)
            item.add_marker(pytest.mark.timeout(LIMIT_S))
