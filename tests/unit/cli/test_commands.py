"""Arguments of every command, what is printed, and with which exit code it ends."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from diloco import __version__
from diloco.cli.main import cli
from diloco.config import Config, choices, compose
from diloco.errors import SwarmError
from diloco.rundir.summary import Summary
from tests.support.command_line import Typed
from tests.support.places import ROOT

COMMANDS = (
    "local train join host start stop logs eval export generate simulate sweep compare plan doctor"
    " status dashboard"
).split()
OWNER = ["keygen", "invite", "revoke"]  # have no configuration, and a test of their own
ADDRESS = "/ip4/127.0.0.1/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What one peer ends with, or raises, where nothing is trained."""
    ends: list[Any] = [Summary()]

    def run(config: Config, listen: Any) -> Summary:
        if isinstance(ends[0], BaseException):
            raise ends[0]
        return ends[0]

    monkeypatch.setitem(sys.modules, "diloco.train.run", SimpleNamespace(run=run))
    return ends


def test_the_module_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    if command not in ("export", "generate", "compare", "status", "dashboard", "stop", "logs"):
        for group, names in choices().items():
            assert f"  {group} " in shown and " ".join(names) in " ".join(shown.split())


LIGHT = {
    "train --cfg help": 0,
    "--help": 0,
    "train outer.lr=-1": 2,
    "local --cfg manifest experiment=quickstart": 0,
}
CODE = f"""
import os, sys
read, write = os.pipe()
os.close(read)
from diloco.cli.main import main
for line in {list(LIGHT)}:
    os.dup2(write, 1)
    try:
        main(line.split())
    except SystemExit as ended:
        print(ended.code, sorted(HEAVY & set(sys.modules)), line, file=sys.stderr)
"""
HEAVY = {"torch", "transformers", "hivemind", "datasets", "numpy", "rich"}


def test_what_does_not_train_imports_nothing_heavy() -> None:
    code = f"HEAVY = {HEAVY}\n{CODE}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    said = [line for line in shown.stderr.splitlines() if line[:1].isdigit()]
    assert said == [f"{code} [] {line}" for line, code in LIGHT.items()], shown.stderr


def test_a_shell_completes_commands_and_options(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_DILOCO_COMPLETE", "bash_source")
    assert "_DILOCO_COMPLETE=bash_complete" in typed()
    monkeypatch.setenv("_DILOCO_COMPLETE", "bash_complete")
    offers = {"diloco tr": "plain,train\n", "diloco plan --tar": "plain,--target\n"}
    for line, offered in offers.items():
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        assert typed() == offered


EITHER = "host needs either the ADDRESS of a peer, as it prints it, or --new"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("fly", "No such command 'fly'. See diloco --help"),
        ("train --fast", "No such option"),
        ("train --cfg yaml", "Invalid value for '--cfg' / '-c': 'yaml' is not one of 'job', 'man"),
        ("eval", "Missing argument 'MODEL_DIR'. See diloco eval --help"),
        ("join run.dir=x", "join needs the ADDRESS of a peer"),
        ("host", EITHER),
        ("host /ip4/127.0.0.1", "ADDRESS=/ip4/127.0.0.1 cannot be used: it is damaged"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_two(line: str, text: str, typed: Typed) -> None:
    assert typed.refused(*line.split()).startswith(f"diloco: error: {text}")


def test_cfg_shows_what_can_be_used_again(tmp_path: Path, typed: Typed) -> None:
    file = tmp_path / "config.yaml"
    text = typed("local", "experiment=quickstart", "outer.lr=0.3", "--cfg", "job")
    file.write_text(text)
    again = typed("train", "--config", str(file), "inner.lr=0.001", "--cfg", "job")
    both = ["experiment=quickstart", "outer.lr=0.3", "inner.lr=0.001"]
    assert again == typed("train", *both, "--cfg", "job") != text
    manifest = compose(["run.id=x"]).manifest()
    shown = json.loads(typed("train", "--cfg", "manifest", "run.id=x"))
    assert shown == json.loads(manifest.to_json())
    assert typed.err == f"manifest hash {manifest.hash()}\n"
    # Settings are listed even where an argument is missing.
    text = "  outer.lr=0.75 *\n      Outer (Nesterov) learning rate. Expects a number > 0"
    assert text in typed("host", "--cfg", "help")
    assert "--package goes with --cfg" in typed.refused("train", "-p", "outer")


def test_eval_starts_from_the_configuration_of_the_run(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "config.yaml").write_text(compose(["data.holdout=0.1"]).to_yaml())
    for name, holdout in ((".", 0.1), ("model", 0.1), ("other/model", 0.02)):
        directory = tmp_path / name
        config = yaml.safe_load(typed("eval", str(directory), "eval.sequences=8", "--cfg", "job"))
        assert (config["data"]["holdout"], config["eval"]["sequences"]) == (holdout, 8)


def test_a_private_model_is_one_that_is_uploaded(typed: Typed) -> None:
    said = typed.refused("export", "runs/a", "out", "--private")
    assert "--private has no effect without --push-to-hub" in said


def test_a_guest_takes_the_settings_of_the_run_from_the_swarm(typed: Typed) -> None:
    for one in ("outer.lr=1", "model=tiny", "+model.config.hidden_size=8", "experiment=smoke"):
        for command in ("join", "host", "doctor"):
            said = typed.refused(command, ADDRESS, one)
            assert "belongs to the run and comes from the swarm; drop it, or start your own" in said
    typed.refused("join", ADDRESS, "run.id=x")
    for where in (ADDRESS, "@runs/mine/address", "--new"):
        config = yaml.safe_load(typed("host", where, "run.id=mine", "--cfg", "job"))
        peers = [] if where == "--new" else [where]
        assert config["swarm"]["initial_peers"] == peers and config["run"]["id"] == "mine"


def test_a_setting_in_doubt_is_a_warning(runs: list[Any], typed: Typed) -> None:
    typed("train")
    assert typed.err == ""
    typed("train", "model.config.vocab_size=5000")
    doubt = "data.tokenizer=bytes uses 256 of model.config.vocab_size=5000"
    assert typed.err.startswith(f"diloco: warning: {doubt}")


def test_the_exit_code_is_that_of_the_command_or_its_error(runs: list[Any], typed: Typed) -> None:
    for runs[0], code, said in (
        (Summary(exit=5), 5, ""),
        (SwarmError("nobody answers"), 3, "diloco: error: nobody answers\n"),
        (KeyboardInterrupt(), 5, "diloco: error: interrupted\n"),
    ):
        typed("train", code=code)
        assert typed.err == said
    runs[0] = KeyError("bug")
    typed("train", code=1)
    assert "Traceback" in typed.err
