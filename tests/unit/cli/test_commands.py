"""Arguments of every command, what is printed, and with which exit code it ends."""

from __future__ import annotations

import json
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
from tests.support.exit_codes import exit_code
from tests.support.places import ROOT

COMMANDS = [
    "local",
    "train",
    "join",
    "host",
    "launch",
    "eval",
    "export",
    "generate",
    "simulate",
    "sweep",
    "compare",
    "plan",
    "doctor",
    "status",
    "dashboard",
]
OWNER = ["keygen", "invite", "revoke"]  # have no configuration, and a test of their own
HERE = ["pause", "resume"]  # the same
ADDRESS = "/ip4/127.0.0.1/tcp/4100/p2p/12D3KooWRnfo2DmvtEuqxDLLy5cqVRo84MyZswotWuhpKn7CnMGg"


class Recorder(SimpleNamespace):
    """Stands for every module that runs a command, under any name: keeps what it was called with."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    result: int | Exception

    def __getattr__(self, name: str) -> Any:
        return self.run

    def run(self, *arguments: Any, **options: Any) -> int:
        self.calls.append((arguments, options))
        if isinstance(self.result, Exception):
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


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)


def test_the_command_and_the_module_are_the_same() -> None:
    shown = run_process("-m", "diloco", "--version")
    assert (shown.returncode, shown.stdout) == (0, f"diloco, version {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS + HERE + OWNER:
        assert f"\n  {command} " in shown


def test_help_sorts_commands_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code("--help")
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    names = [word for word in words if word in cli.commands]
    assert names[:2] == ["local", "train"]
    assert names[-3:] == OWNER
    assert len(names) == len(cli.commands)


def test_no_summary_of_a_command_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code("--help")
    assert "..." not in capsys.readouterr().out.split("Options:")[1]
    assert set(cli.commands) == {*COMMANDS, *HERE, *OWNER}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_usage_examples_and_choices(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: diloco {command} ")
    assert shown.count(f"  diloco {command} ") >= 1
    if command not in ("export", "generate", "compare", "status", "dashboard"):
        for group, names in choices().items():
            assert f"  {group} " in shown and " ".join(names) in " ".join(shown.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "outer.lr=-1"],
        ["train", "--cfg", "job"],
        ["local", "--cfg", "manifest", "experiment=quickstart"],
        ["train", "--help"],
    ],
)
def test_what_does_not_train_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom diloco.cli.main import main\n"
        f"try:\n    main({arguments!r})\n"
        "finally:\n    assert not {'torch', 'transformers', 'hivemind', 'datasets', 'numpy', 'rich'} & set(sys.modules)"
    )
    shown = run_process("-c", code)
    assert "AssertionError" not in shown.stderr
    assert shown.returncode == (2 if "outer.lr=-1" in arguments else 0)


@pytest.mark.parametrize("command", ["local", "train", "host", "eval"])
def test_a_bad_setting_is_one_line_and_exit_code_two(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"host": ["--new"], "eval": ["model/"]}.get(command, [])
    assert exit_code(command, *first, "outer.learning_rate=1") == 2
    shown = capsys.readouterr()
    assert shown.err == "diloco: error: outer.learning_rate is not a setting; did you mean outer.lr?\n"
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fly"], "No such command 'fly'. See diloco --help"),
        (["train", "--fast"], "No such option"),
        (
            ["train", "--cfg", "yaml"],
            "Invalid value for '--cfg' / '-c': 'yaml' is not one of 'job', 'hydra', 'all', 'manifest', 'help'. See",
        ),
        (["eval"], "Missing argument 'MODEL_DIR'. See diloco eval --help"),
        (["generate", "m", "--tokens", "0"], "Invalid value for '--tokens': 0 is not in the range"),
        (["host"], "host needs either the ADDRESS of a peer, as it prints it, or --new"),
        (["host", ADDRESS, "--new"], "host needs either the ADDRESS of a peer, as it prints it, or --new"),
        (
            ["host", "/ip4/127.0.0.1"],
            "ADDRESS=/ip4/127.0.0.1 cannot be used: it has no port and no peer id",
        ),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_two(
    arguments: list[str], text: str, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"diloco: error: {text}")
    assert shown.count("\n") == 1
    assert recorder.calls == []


def test_cfg_job_prints_a_configuration_that_can_be_used_again(
    recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("local", "experiment=quickstart", "outer.lr=0.3", "--cfg", "job") == 0
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    assert recorder.calls == []
    assert exit_code("train", "--config", str(file), "inner.lr=0.001") == 0
    assert recorder.config == compose(["experiment=quickstart", "outer.lr=0.3", "inner.lr=0.001"])


def test_cfg_manifest_prints_json_and_its_hash_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "--cfg", "manifest", "run.id=x") == 0
    shown, manifest = capsys.readouterr(), compose(["run.id=x"]).manifest()
    assert json.loads(shown.out) == json.loads(manifest.to_json())
    assert shown.err == f"manifest hash {manifest.hash()}\n"


def test_cfg_help_lists_settings_even_where_an_argument_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("host", "--cfg", "help") == 0
    assert "  outer.lr=0.75 *\n      Outer (Nesterov) learning rate. Expects a number > 0" in capsys.readouterr().out


def test_output_into_a_closed_pipe_is_no_error() -> None:
    code = "import os, sys\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\n"
    shown = run_process("-c", f"{code}from diloco.cli.main import main\nmain(['train', '--cfg', 'help'])")
    assert (shown.returncode, shown.stderr) == (0, "")


@pytest.mark.parametrize("command", ["local", "train"])
def test_a_command_gets_the_composed_configuration(command: str, recorder: Recorder) -> None:
    assert exit_code(command, "experiment=quickstart", "run.id=mine") == 0
    assert recorder.calls == [((compose(["experiment=quickstart", "run.id=mine"]),), {})]


def test_host_takes_its_address_as_initial_peer(recorder: Recorder) -> None:
    assert exit_code("host", ADDRESS, "run.id=mine") == 0
    assert recorder.config.swarm.initial_peers == (ADDRESS,)
    assert exit_code("host", "@runs/mine/address") == 0
    assert recorder.config.swarm.initial_peers == ("@runs/mine/address",)
    assert exit_code("host", "--new", "run.id=mine") == 0
    assert not recorder.config.swarm.initial_peers
    assert recorder.config.run.id == "mine"


def test_eval_starts_from_the_configuration_of_the_run(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(compose(["data.holdout=0.1"]).to_yaml())
    (tmp_path / "model").mkdir()
    for directory in (tmp_path, tmp_path / "model"):
        assert exit_code("eval", str(directory), "eval.sequences=8") == 0
        assert recorder.calls[-1][1] == {"model": directory}
        assert (recorder.config.data.holdout, recorder.config.eval.sequences) == (0.1, 8)
    assert exit_code("eval", str(tmp_path / "elsewhere" / "model")) == 0
    assert recorder.config.data.holdout == compose().data.holdout


def test_export_and_generate_need_no_configuration(recorder: Recorder) -> None:
    assert exit_code("export", "runs/a", "out") == 0
    where = {"source": Path("runs/a"), "out": Path("out")}
    assert recorder.calls[-1] == ((), {**where, "name": None, "private": False})
    assert exit_code("export", "runs/a", "out", "--push-to-hub", "me/x", "--private") == 0
    assert recorder.calls[-1] == ((), {**where, "name": "me/x", "private": True})
    assert exit_code("export", "runs/a", "out", "--private") == 2
    assert exit_code("generate", "out", "--prompt", "def", "--tokens", "5", "--temperature", "0", "--seed", "3") == 0
    options = {"model": Path("out"), "prompt": "def", "tokens": 5, "temperature": 0.0, "seed": 3}
    assert recorder.calls[-1] == ((), options)


def test_a_setting_without_effect_is_an_error_and_a_doubtful_one_a_warning(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("train", "local.peers=3") == 2
    assert capsys.readouterr().err == (
        "diloco: error: local.peers=3 has no effect with diloco train, which is one peer; "
        "drop it, or use diloco local\n"
    )
    assert exit_code("host", ADDRESS, "outer.lr=0.5") == exit_code("doctor", ADDRESS, "model=tiny") == 2
    assert exit_code("doctor", "wandb.mode=offline") == exit_code("host", "--new", "train.threads=2") == 2
    assert not recorder.calls
    capsys.readouterr()
    assert exit_code("train", "wandb.project=x", "run.report=true") == 0, "a supervisor has said it"
    assert exit_code("local", "local.peers=3") == 0
    assert capsys.readouterr().err == ""
    assert exit_code("train", "budget.tokens=9") == 0
    assert capsys.readouterr().err.startswith("diloco: warning: budget.outer_steps=100 and budget.tokens=9 are both")


@pytest.mark.parametrize(("result", "code"), [(0, 0), (5, 5), (SwarmError("nobody answers"), 3), (KeyError("bug"), 1)])
def test_the_exit_code_is_the_one_of_the_command_or_of_its_error(
    result: int | Exception, code: int, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.result = result
    assert exit_code("train") == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)


def test_control_c_reaches_the_command_and_not_click(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "run", interrupted)
    assert exit_code("train") == 5
    assert capsys.readouterr().err == "diloco: error: interrupted\n"
