"""Hydra as its users know it: the commands of its documentation, folders of one's own, and what is
not ours."""

import re
import shlex
from pathlib import Path

import pytest

from diloco.config import ConfigSource, compose
from diloco.config.files import search_path
from diloco.errors import ConfigError
from diloco.train.__main__ import _start
from tests.support.command_line import exit_code
from tests.support.errors import error_text
from tests.support.places import ROOT

PACKAGE = ROOT / "configs"
README = (PACKAGE / "README.md").read_text()

DROPOUT = "model.config.attention_dropout"
# Command, and a part of what it prints. With ! it is refused, and the text says what to type
# instead.
COMMANDS = [
    ("diloco train outer.lr=0.5 --cfg job -p outer.lr", "0.5"),
    (f"diloco train +{DROPOUT}=0.1 --cfg job -p {DROPOUT}", "0.1"),
    ("diloco train 'sim.step_s=[1,2]' local.peers=2 --cfg job -p sim.step_s", "- 1.0\n- 2.0"),
    ("diloco train 'run.dir=runs/${oc.env:LAB}-${run.id}' --cfg job -p run.dir", "north-diloco"),
    ("diloco train model=14m --cfg job -p model.name", "14m"),
    ("diloco train 'experiment=[smoke,night]' --cfg job -p eval.every", "7"),
    ("diloco train train=h100 --cfg job -p train.threads", "3"),
    ("diloco train --config-dir shared wandb=team --cfg job -p wandb.project", "team"),
    ("diloco local outer.lr=1,2", "! outer.lr=1,2 is several values; give one value, or a list"),
    ("diloco local -m outer.lr=1,-1", "! outer.lr=-1 is out of range"),
    ("diloco sweep outer.lr=0.5,0.7 'run.seed=range(0,2)' --dry-run", r"(to run .*\n){4}"),
    (
        "diloco sweep 'outer.lr=choice(0.5,0.7)' 'model=glob(t*)' --dry-run",
        r"(to run .*model=tiny.*\n){2}",
    ),
    ("diloco sweep experiment=lr-sweep --dry-run", r"(to run .*\n){4}"),
    ("diloco local hydra.run.dir=x", "! hydra.run.dir has no effect; drop it .diloco sweep tries "),
]


def write(name: str, text: str) -> Path:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def furnish(place: Path) -> None:
    """Makes it the working directory of a researcher, with settings of their own."""
    write(f"{place}/configs/train/h100.yaml", "threads: 3\n")
    write(f"{place}/configs/experiment/night.yaml", "# @package _global_\neval:\n  every: 7\n")
    write(f"{place}/shared/wandb/team.yaml", "project: team\n")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    furnish(place := tmp_path_factory.mktemp("lab"))
    return place


@pytest.fixture(autouse=True)
def here(lab: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which no test changes, so that what is composed there is
    remembered."""
    monkeypatch.chdir(lab)
    monkeypatch.setenv("LAB", "north")
    return lab


@pytest.fixture
def own(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another working directory, which this test may change."""
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(*overrides: str, start: ConfigSource | None = None) -> str:
    return error_text(ConfigError, compose, overrides, start)


# --- The list -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_command_of_hydra(
    command: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = exit_code(*shlex.split(command)[1:])
    shown = capsys.readouterr()
    if expected.startswith("! "):
        assert (code, shown.out, shown.err.count("\n")) == (2, "", 1)
        assert re.match(f"diloco: error: {expected[2:]}", shown.err), shown.err
    else:
        assert code == 0, shown.err
        assert re.search(expected, shown.out), shown.out


def test_the_readme_has_every_command() -> None:
    rows = re.findall(r"^\| `(diloco [^`]*)`", README, flags=re.MULTILINE)
    assert rows == [command for command, _ in COMMANDS]


def test_torchrun_takes_the_same_options() -> None:
    line = "experiment=smoke -cd shared outer.lr=1 --config mine.yaml"
    start, others = _start(line.split())
    assert start == ConfigSource(Path("mine.yaml"), Path("shared"))
    assert others == ["experiment=smoke", "outer.lr=1"]
    with pytest.raises(ConfigError, match=r"^--config: expected one argument$"):
        _start(["--config"])


# --- Where files are looked for -------------------------------------------------------------------
def test_a_folder_that_is_named_comes_before_the_package_and_the_working_directory_last(
    own: Path,
) -> None:
    write("configs/outer/diloco.yaml", "method: diloco\nsync_every: 11\n")
    write("shared/outer/diloco.yaml", "method: diloco\nsync_every: 12\n")
    named = ConfigSource(folder=Path("shared"))
    assert search_path(named) == (own / "shared", PACKAGE, own / "configs")
    assert (compose([], named).outer.sync_every, compose().outer.sync_every) == (12, 100)


def test_a_choice_that_is_not_there_says_where_it_was_looked_for(here: Path) -> None:
    looked = f"looked in {PACKAGE / 'wandb'}, {here / 'configs' / 'wandb'}"
    wrong = "wandb=team is not a choice; expected one of default, offline, online"
    assert complaint("wandb=team") == f"{wrong}; {looked}"
    assert complaint("experiment=./mine.yaml").endswith("or give --config ./mine.yaml")
    nowhere = "--config-dir=nowhere is no directory; make it, or drop the option"
    assert complaint(start=ConfigSource(folder=Path("nowhere"))) == nowhere


# --- Files of --config ----------------------------------------------------------------------------
def test_a_file_lies_between_the_defaults_and_what_is_typed(tmp_path: Path) -> None:
    part = write(f"{tmp_path}/part.yaml", "outer: {lr: 0.33}\nmodel: {config: {hidden_size: 64}}\n")
    config = compose(base=part)
    assert config.outer.lr == 0.33 and config.outer.sync_every == 100
    assert config.model.config["hidden_size"] == 64 and config.model.config["vocab_size"] == 256
    assert compose(["experiment=smoke"], base=part).model.config["hidden_size"] == 32
    for typed, lr in (("outer=streaming", 0.75), ("outer.lr=0.2", 0.2)):
        assert compose([typed], base=part).outer.lr == lr


def test_an_experiment_lies_over_a_run_and_brings_its_groups(tmp_path: Path) -> None:
    saved = compose(["model=14m", "data.tokenizer=x", "outer=two_bit", "run.dir=r"])
    run = write(f"{tmp_path}/run.yaml", saved.to_yaml())
    assert compose(base=run) == saved, "the default model is not mixed with that of the run"
    config = compose(["experiment=[smoke,night]"], base=run)
    assert (config.model.name, config.data.tokenizer, config.eval.every) == ("smoke", "bytes", 7)
    assert (config.outer.codec_up, config.run.dir) == ("stat2", Path("r"))
    assert "head_dim" not in config.model.config


# --- Files that are wrong -------------------------------------------------------------------------

GLOBAL = "# @package _global_\n"
DEFAULTS = f"{GLOBAL}defaults: [{{override /model: tinny}}, _self_]"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{GLOBAL}outer:\n  lr: [\n", "FILE, line 4: "),
        ("outer:\n  lr: 1\n", "an experiment holds no settings of a run; its file begins with"),
        (DEFAULTS, "Could not find 'model/tinny'"),
    ],
)
def test_a_file_that_is_wrong_is_told_so(text: str, told: str, own: Path) -> None:
    file = write("configs/experiment/x.yaml", text)
    said = complaint("experiment=x")
    assert told in said.replace(str(own / file), "FILE") and "\n" not in said, said


# --- Hydra's meaning ---
def test_text_may_hold_what_hydra_would_parse() -> None:
    for text in ("~/a=b é", "it's", "C:\\notes\\", "a b'c\\"):
        assert compose(["data=text", f"data.path={text}"]).data.path == (text,)


def test_a_hydra_application_around_us_is_left_alone(tmp_path: Path) -> None:
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    write(f"{tmp_path}/mine.yaml", "a: 1")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose().run.dir == Path("runs/diloco")
        assert GlobalHydra.instance().is_initialized()
        assert hydra.compose("mine") == {"a": 1}
