"""The exception tree, and how an error becomes one line and an exit code."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from diloco import errors
from diloco.errors import DilocoError, SwarmError, guard
from diloco.protocol.messages import Refusal, decode, encode

EXIT_CODES = {
    "DilocoError": 1,
    "ConfigError": 2,
    "DataError": 2,
    "CheckpointError": 2,
    "SwarmError": 3,
    "JoinError": 3,
    "DivergedError": 4,
    "UnsavedError": 5,
    "PayloadError": 1,
}


def failing(error: BaseException) -> int:
    def function() -> int:
        raise error

    return guard(function)


@pytest.mark.parametrize("name", EXIT_CODES)
def test_every_error_ends_in_its_exit_code_and_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, DilocoError)
    assert failing(kind("outer.lr=-1 is out of range")) == EXIT_CODES[name]
    assert capsys.readouterr().err == "diloco: error: outer.lr=-1 is out of range\n"


def test_the_table_of_exit_codes_is_complete() -> None:
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, DilocoError)}
    assert kinds == set(EXIT_CODES)


def test_the_docstring_draws_every_error_with_its_exit_code() -> None:
    drawn = [
        line.replace("├──", "").replace("└──", "").replace("│", "").split() for line in str(errors.__doc__).splitlines()
    ]
    assert {words[0]: int(words[1]) for words in drawn if words[1:] and words[1].strip(";").isdigit()} == EXIT_CODES


def test_an_error_that_spans_lines_is_still_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    failing(errors.ConfigError("first\n  second"))
    assert capsys.readouterr().err == "diloco: error: first second\n"


def test_success_is_zero_with_or_without_a_value() -> None:
    assert guard(lambda: None) == 0
    assert guard(lambda: 0) == 0
    assert guard(lambda: 4) == 4


def test_control_c_that_nobody_handled_is_unsaved_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(KeyboardInterrupt()) == 5
    assert capsys.readouterr().err == "diloco: error: interrupted\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_an_unusable_directory_is_a_mistake_and_not_a_bug(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(OSError(number, "No space left on device", "runs/x/model")) == 2
    text = capsys.readouterr().err
    assert text.startswith("diloco: error: runs/x/model: No space left on device;")
    assert text.count("\n") == 1


@pytest.mark.parametrize("bug", [ValueError("x"), AssertionError("x"), OSError(errno.EBADF, "Bad file descriptor")])
def test_a_bug_prints_its_traceback_and_ends_in_one(bug: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(bug) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_module_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, diloco.errors; print(sorted({'torch', 'click', 'pydantic', 'hydra', 'rich'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_what_a_peer_said_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\u202emil|hs"
    refusal = decode(encode(Refusal(reason=hostile)))
    assert isinstance(refusal, Refusal)
    for said in (refusal.reason, hostile):
        assert failing(SwarmError(f"the swarm refused this peer: {said}")) == 3
        assert capsys.readouterr().err == "diloco: error: the swarm refused this peer: ]0;owned [2J mil|hs\n"
    assert refusal.reason.isprintable()
