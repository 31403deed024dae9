"""Completion in a shell: what may follow on a command line, and the script that asks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.cli.completion import VARIABLE
from tests.support.command_line import Typed

Offer = Callable[[str], list[str]]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> Offer:
    """Says what may follow on a command line, as fish and zsh ask for it: the last word is being typed."""

    def ask(line: str) -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        monkeypatch.setenv(VARIABLE, "bash_complete")
        return [line.partition(",")[2] for line in typed().split()]

    return ask


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("diloco tr", ["train"]),
        ("diloco train --cfg ma", ["manifest"]),
        ("diloco train out", ["outer=", "outer."]),
        ("diloco train run", ["run."]),
        ("diloco train outer.l", ["outer.lr=", "outer.lr_by_peers="]),
        ("diloco train outer.lr=0.5 outer=str", ["outer=streaming"]),
        ("diloco train outer.codec_up=e3", ["outer.codec_up=e3m0"]),
        ("diloco train train.compile=", ["train.compile=true", "train.compile=false"]),
        ("diloco train ++outer.lr_", ["++outer.lr_by_peers="]),
        ("diloco train outer.lr=", []),
        ("diloco train nothing=", []),
        ("diloco sweep si", ["simulate", "sim=", "sim."]),
        ("diloco sweep simulate swe", ["sweep=", "sweep."]),
        ("diloco join /ip4/127.0.0.1/tcp/1 train.dev", ["train.device="]),
        ("diloco doctor model=20", ["model=20m"]),
        ("diloco train --config-dir nowhere out", []),
        # bash makes three words of outer=str, and replaces the last one
        ("diloco train outer.lr = 0.5 outer = str", ["streaming"]),
        ("diloco doctor model = 20", ["20m"]),
        ("diloco train train.compile =", ["true", "false"]),
    ],
)
def test_what_may_follow(line: str, expected: list[str], offered: Offer) -> None:
    assert offered(line) == expected


def test_choices_of_ones_own_are_offered(offered: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("configs/train/h100.yaml", "shared/train/h200.yaml"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("threads: 3\n")
    assert offered("diloco train train=h") == ["train=h100"]
    assert offered("diloco train -cd shared train=h") == ["train=h100", "train=h200"]


def test_bash_completes_by_the_script_without_torch(tmp_path: Path) -> None:
    program = tmp_path / "diloco"
    check = "import sys; from diloco.cli.main import _invoke; _invoke(sys.argv[1:]); assert 'torch' not in sys.modules"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{check}" "$@"\n')
    program.chmod(0o700)
    asked = (
        f'PATH={tmp_path}:$PATH; eval "$(diloco -sc install=bash)"; '
        "COMP_WORDS=(diloco train outer = two); COMP_CWORD=4; _diloco_completion diloco; "
        'echo "${COMPREPLY[@]}"; complete -p'
    )
    done = subprocess.run(["bash", "--norc", "-c", asked], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == ["two_bit", "complete -o nosort -F _diloco_completion diloco"], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_hydras_way_and_clicks_way_print_the_same_script(
    shell: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = typed("-sc", f"install={shell}")
    assert "_diloco_completion" in script and f"{VARIABLE}={shell}_complete" in script
    nospace = {"bash": "[[ $value == *[=.] ]] && compopt -o nospace", "zsh": "compadd -S '' -U"}
    assert nospace.get(shell, "") in script
    monkeypatch.setenv(VARIABLE, f"{shell}_source")
    assert typed() == script


@pytest.mark.parametrize("line", ["-sc install=tcsh", "-sc", "-sc uninstall=bash", "train -sc install=bash"])
def test_what_cannot_be_done_says_what_to_type(line: str, typed: Typed) -> None:
    hint = 'write eval "$(diloco -sc install=bash)", or install=zsh; with fish diloco -sc install=fish | source'
    assert typed.refused(*line.split()).endswith(f"; {hint}\n")
