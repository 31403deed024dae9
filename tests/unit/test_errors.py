"""The exception tree, and how an error becomes one line and an exit code."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco import errors
from diloco.errors import SwarmError
from diloco.process import guard
from tests.support.places import PACKAGE

EXIT_CODES = {"DilocoError": 1, "ConfigError": 2, "DataError": 2, "CheckpointError": 2}
EXIT_CODES |= {"SwarmError": 3, "JoinError": 3, "DivergedError": 4, "UnsavedError": 5}
EXIT_CODES |= {"PayloadError": 1, "DeviceError": 6}


def failing(error: BaseException) -> int:
    def function() -> int:
        raise error

    return guard(function)


CASES = [
    (getattr(errors, name)("outer.lr=-1\n  is bad"), code, "outer.lr=-1 is bad")
    for name, code in EXIT_CODES.items()
]


@pytest.mark.parametrize(
    ("error", "code", "line"), [*CASES, (KeyboardInterrupt(), 5, "interrupted")]
)
def test_every_error_ends_in_its_exit_code_and_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl+C that nobody handled is unsaved work."""
    assert failing(error) == code
    assert capsys.readouterr().err == f"diloco: error: {line}\n"


def test_success_is_zero_with_or_without_a_value() -> None:
    assert [guard(lambda value=value: value) for value in (None, 0, 4)] == [0, 0, 4]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_an_unusable_directory_is_a_mistake_and_not_a_bug(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(OSError(number, "No space left on device", "runs/x/model")) == 2
    text = capsys.readouterr().err
    assert text.startswith("diloco: error: runs/x/model: No space left on device;")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    "bug", [ValueError("x"), AssertionError("x"), OSError(errno.EBADF, "Bad file descriptor")]
)
def test_a_bug_prints_its_traceback_and_ends_in_one(
    bug: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(bug) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_module_imports_nothing_but_the_standard_library() -> None:
    others = "{'torch', 'click', 'pydantic', 'hydra', 'rich'}"
    code = f"import sys, diloco.process; print({others} & {{*sys.modules}})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "set()\n"


def test_what_a_peer_said_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(SwarmError("refused: \x1b]0;owned\x07\x1b[2J\u202emil|hs")) == 3
    assert capsys.readouterr().err == "diloco: error: refused: ]0;owned [2J mil|hs\n"


@pytest.mark.parametrize(
    "variables", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}]
)
def test_what_a_terminal_lacks_is_written_in_plain_characters(
    variables: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "from diloco.process import *; from diloco.text import BARS; from pathlib import Path;"
        "in_utf8(); guard(lambda: print(BARS, '\\xb1\\u2026\\xfc', chr(0xdcff)));"
        "Path('\\xfc').write_text(''); guard(lambda: Path('\\xfc/x').read_text())"
    )
    old = {"PYTHONPATH": str(PACKAGE.parent), "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment, command = {**os.environ, **old, **variables}, [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    plain = "±...ü" if "latin-1" in variables.values() else "+-...u"
    said, complaint = ended.stdout.decode("latin-1"), ended.stderr.decode("latin-1")
    assert said == f"_.-~=+*# {plain} ?\n"
    assert complaint.startswith(f"diloco: error: {plain[-1]}/x: Not a directory")
    assert list(tmp_path.iterdir()) == [tmp_path / "ü"]


def test_a_traceback_shows_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(ValueError("swarm.token=" + "Ab1" * 40)) == 1
    assert "swarm.token=(hidden)" in capsys.readouterr().err


def test_a_failed_device_is_one_line_after_its_traceback_and_ends_the_process_at_once() -> None:
    """At a usual end, tensors of such a device abort the process."""
    program = """
import atexit, os
from diloco.process import end_process, guard

def step():
    raise RuntimeError("CUDA error: unspecified launch failure\\nSearch for more")

atexit.register(os.abort)
end_process(guard(step))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 6
    assert "in step" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("diloco: error: CUDA error: unspecified launch failure; start this peer")
