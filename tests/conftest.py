"""What every test shares: no network, no surprise threads, and hypothesis without time limits."""

import os
import signal
from pathlib import Path

# A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl+C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports the libraries that read these.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "agg"

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Fixtures of several folders.
pytest_plugins = [f"tests.support.{name}" for name in ("coroutines", "data", "gates", "origins")]

# A slow or busy machine must not fail a property: what is tested is the result.
settings.register_profile("diloco", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("diloco")


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's peers remember runs and identities: nothing is left in the user's home, or
    taken from it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "diloco"


@pytest.fixture
def registers() -> Iterator[None]:
    """What the test registers is forgotten after it."""
    from tests.support.extensions import registering

    with registering():
        yield
