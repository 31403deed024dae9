"""`diloco local` with peers that are no peers: what it does when one of them ends before any
trains."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import local
from diloco.config import compose
from diloco.errors import DilocoError


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", 3, " was killed (SIGKILL) before training began"),
        ("import os; os.write(2, b'why'); os.abort()", 3, " was killed (SIGABRT, see "),
        ("import sys; sys.exit('diloco: error: data.path: wrong')", 1, ": data.path: wrong (log: "),
        ("import no_module", 1, ": ModuleNotFoundError: No module named 'no_module' (log: "),
        ('print(\'{"t": "ready"}\', flush=True); raise SystemExit(4)', 4, ": None (log: "),
    ],
    ids=["killed", "aborted", "refused", "broken", "ready"],
)
def test_a_peer_that_ends_before_any_trains_is_named_at_once(
    ends: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others would wait for it."""

    def peer(config: Any, base: Path, index: int, names: Any) -> tuple[list[str], dict[str, str]]:
        return ["-c", ends if index == 2 else "import time; time.sleep(1000)"], {}

    started: list[Any] = []

    class Kept(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(local, "_peer", peer)
    monkeypatch.setattr(subprocess, "Popen", Kept)
    with pytest.raises(DilocoError) as raised:
        local.run(compose(["experiment=smoke", "local.peers=3", f"run.dir={tmp_path}/run"]))
    assert str(raised.value).startswith("p2") and said in str(raised.value)
    assert raised.value.exit_code == code
    assert len(started) == 3 and all(process.poll() is not None for process in started)
    for process in started:
        process.stdin.close()
        process.stdout.close()
