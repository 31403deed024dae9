"""Arguments of every command, what is printed, and with which exit code it ends."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco import __version__
from diloco.cli.commands.common import WORKERS
from diloco.cli.main import cli
from diloco.config import Config, choices, compose
from diloco.errors import SwarmError
from tests.support.command_line import Typed
from tests.support.places import ROOT

COMMANDS = ("local train join host eval export generate simulate sweep compare plan doctor status dashboard").split()
OWNER = ["keygen", "invite", "revoke"]  # have no configuration, and a test of their own
ADDRESS = "/ip4/127.0.0.1/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"


class Recorder(SimpleNamespace):
    """Stands for every module that runs a command, under any name: keeps what it was called with."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    result: int | BaseException

    def __getattr__(self, name: str) -> Any:
        return self.run

    def run(self, *arguments: Any, **options: Any) -> int:
        self.calls.append((arguments, options))
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    @property
    def config(self) -> Config:
        config = self.calls[-1][0][0]
        assert isinstance(config, Config)
        return config


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    module = Recorder(calls=[], result=0)
    for command in COMMANDS:
        name = WORKERS.get(command, command).partition(".")[0]
        monkeypatch.setitem(sys.modules, f"diloco.cli.{name}", module)
    return module


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["diloco", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("diloco", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"diloco, version {__version__}\n")


def test_help_lists_every_command_by_what_it_is_for(typed: Typed) -> None:
    shown = typed()
    assert shown == typed("--help") == typed("-h")
    words = [line.split()[0] for line in shown.splitlines() if line.startswith("  ")]
    names = [word for word in words if word in cli.commands]
    assert sorted(names) == sorted(cli.commands) == sorted([*COMMANDS, *OWNER])
    assert names[:2] == ["local", "train"] and names[-3:] == OWNER
    assert "..." not in shown.split("Options:")[1], "no summary is cut off"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_usage_examples_and_choices(command: str, typed: Typed) -> None:
    shown = typed(command, "--help")
    assert shown.startswith(f"Usage: diloco {command} ") and f"  diloco {command} " in shown
    if command not in ("export", "generate", "compare", "status", "dashboard"):
        for group, names in choices().items():
            assert f"  {group} " in shown and " ".join(names) in " ".join(shown.split())


LIGHT = {
    "train --cfg help": 0,
    "--help": 0,
    "train outer.lr=-1": 2,
    "local --cfg manifest experiment=quickstart": 0,
}
HEAVY = {"torch", "transformers", "hivemind", "datasets", "numpy", "rich"}


def test_what_does_not_train_imports_nothing_heavy() -> None:
    """And output into a closed pipe is no error."""
    code = (
        "import os, sys\nread, write = os.pipe()\nos.close(read)\n"
        "from diloco.cli.main import main\n"
        f"for line in {list(LIGHT)}:\n"
        "    os.dup2(write, 1)\n"
        "    try:\n        main(line.split())\n    except SystemExit as ended:\n        code = ended.code\n"
        f"    print(code, sorted({HEAVY} & set(sys.modules)), line, file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    said = [line for line in shown.stderr.splitlines() if line[:1].isdigit()]
    assert shown.returncode == 0 and said == [f"{code} [] {line}" for line, code in LIGHT.items()], shown.stderr


def test_a_shell_completes_commands_and_options(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_DILOCO_COMPLETE", "bash_source")
    assert "_DILOCO_COMPLETE=bash_complete" in typed()
    monkeypatch.setenv("_DILOCO_COMPLETE", "bash_complete")
    for line, offered in (("diloco tr", "plain,train\n"), ("diloco plan --tar", "plain,--target\n")):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        assert typed() == offered


EITHER = "host needs either the ADDRESS of a peer, as it prints it, or --new"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("fly", "No such command 'fly'. See diloco --help"),
        ("train --fast", "No such option"),
        (
            "train --cfg yaml",
            "Invalid value for '--cfg' / '-c': 'yaml' is not one of 'job', 'manifest', 'help'. See",
        ),
        ("eval", "Missing argument 'MODEL_DIR'. See diloco eval --help"),
        ("join run.dir=x", "join needs the ADDRESS of a peer"),
        ("host", EITHER),
        ("host /ip4/127.0.0.1", "ADDRESS=/ip4/127.0.0.1 cannot be used: it is damaged"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_two(line: str, text: str, recorder: Recorder, typed: Typed) -> None:
    assert typed.refused(*line.split()).startswith(f"diloco: error: {text}")
    assert recorder.calls == []


def test_cfg_shows_what_can_be_used_again(recorder: Recorder, tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(typed("local", "experiment=quickstart", "outer.lr=0.3", "--cfg", "job"))
    assert recorder.calls == []
    typed("train", "--config", str(file), "inner.lr=0.001")
    assert recorder.config == compose(["experiment=quickstart", "outer.lr=0.3", "inner.lr=0.001"])
    manifest = compose(["run.id=x"]).manifest()
    assert json.loads(typed("train", "--cfg", "manifest", "run.id=x")) == json.loads(manifest.to_json())
    assert typed.err == f"manifest hash {manifest.hash()}\n"
    # Settings are listed even where an argument is missing.
    text = "  outer.lr=0.75 *\n      Outer (Nesterov) learning rate. Expects a number > 0"
    assert text in typed("host", "--cfg", "help")


def test_a_command_gets_the_composed_configuration(recorder: Recorder, typed: Typed) -> None:
    for command in ("local", "train"):
        typed(command, "experiment=quickstart", "run.id=mine")
        assert recorder.calls.pop() == ((compose(["experiment=quickstart", "run.id=mine"]),), {})
    for where, peers in ((ADDRESS, (ADDRESS,)), ("@runs/mine/address", ("@runs/mine/address",)), ("--new", ())):
        typed("host", where, "run.id=mine")
        assert recorder.config.swarm.initial_peers == peers and recorder.config.run.id == "mine"


def test_eval_starts_from_the_configuration_of_the_run(recorder: Recorder, tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "config.yaml").write_text(compose(["data.holdout=0.1"]).to_yaml())
    (tmp_path / "model").mkdir()
    for directory in (tmp_path, tmp_path / "model"):
        typed("eval", str(directory), "eval.sequences=8")
        assert recorder.calls[-1][1] == {"model": directory}
        assert (recorder.config.data.holdout, recorder.config.eval.sequences) == (0.1, 8)
    typed("eval", str(tmp_path / "elsewhere" / "model"))
    assert recorder.config.data.holdout == compose().data.holdout


def test_a_private_model_is_one_that_is_uploaded(recorder: Recorder, typed: Typed) -> None:
    assert "--private has no effect without --push-to-hub" in typed.refused("export", "runs/a", "out", "--private")
    typed("export", "runs/a", "out", "--push-to-hub", "me/x", "--private")
    assert recorder.calls[-1][1] == {"source": Path("runs/a"), "out": Path("out"), "name": "me/x", "private": True}


def test_a_guest_takes_the_settings_of_the_run_from_the_swarm(recorder: Recorder, typed: Typed) -> None:
    for one in ("outer.lr=1", "model=tiny", "+model.config.hidden_size=8", "experiment=smoke"):
        for command in ("join", "host", "doctor"):
            said = typed.refused(command, ADDRESS, one)
            assert "belongs to the run and comes from the swarm; drop it, or start your own swarm" in said
    typed.refused("join", ADDRESS, "run.id=x")
    assert not recorder.calls
    typed("host", ADDRESS, "run.id=x", "train.threads=2", "run.dir=x")


def test_a_setting_in_doubt_is_a_warning(recorder: Recorder, typed: Typed) -> None:
    typed("train", "model.config.vocab_size=5000", "run.report=true")
    assert typed.err == "", "a supervisor has said it"
    typed("local", "local.peers=3")
    assert typed.err == ""
    typed("train", "model.config.vocab_size=5000")
    assert typed.err.startswith("diloco: warning: data.tokenizer=bytes uses 256 of model.config.vocab_size=5000")


def test_the_exit_code_is_that_of_the_command_or_its_error(recorder: Recorder, typed: Typed) -> None:
    for recorder.result, code, said in (
        (0, 0, ""),
        (5, 5, ""),
        (SwarmError("nobody answers"), 3, "diloco: error: nobody answers\n"),
        (KeyboardInterrupt(), 5, "diloco: error: interrupted\n"),
    ):
        typed("train", code=code)
        assert typed.err == said
    recorder.result = KeyError("bug")
    typed("train", code=1)
    assert "Traceback" in typed.err
