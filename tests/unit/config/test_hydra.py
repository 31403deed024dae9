"""Hydra as its users know it: the commands of its documentation, folders of one's own, and what is not ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diloco.cli.main import main
from diloco.config import Config, Start, choices, compose, refuse_ignored
from diloco.config.compose import compose_tree
from diloco.config.sources import search_path, stamp
from diloco.config.sweeps import plan_sweep
from diloco.errors import ConfigError
from diloco.train.__main__ import _start
from tests.support.places import ROOT

PACKAGE = ROOT / "configs"
README = (PACKAGE / "README.md").read_text()

# Command, and a part of what it prints. With ! it is refused, and the text says what to type instead.
COMMANDS = [
    ("diloco train outer.lr=0.5 --cfg job -p outer.lr", "0.5"),
    ("diloco train +model.config.attention_dropout=0.1 --cfg job -p model.config.attention_dropout", "0.1"),
    ("diloco train +outer.lr=0.5", "! +outer.lr=0.5 adds a key, but outer.lr is there already; write outer.lr=0.5"),
    ("diloco train ++outer.lr=0.5 --cfg job -p outer.lr", "0.5"),
    ("diloco train outer=async_nesterov ~outer.lr --cfg job -p outer.lr", "0.75"),
    ("diloco train 'sim.step_s=[1,2]' local.peers=2 --cfg job -p sim.step_s", "- 1.0\n- 2.0"),
    ("diloco train 'run.dir=runs/${oc.env:LAB}-${run.id}' --cfg job -p run.dir", "runs/north-diloco"),
    ("diloco train 'run.dir=runs/${now:%Y}/${hydra:job.name}' --cfg job -p run.dir", r"runs/\d{4}/diloco"),
    ("diloco train model=14m --cfg job -p model.name", "14m"),
    ("diloco train 'experiment=[smoke,night]' --cfg job -p eval.every", "7"),
    ("diloco train train=h100 --cfg job -p train.threads", "3"),
    ("diloco train +lab=north --cfg job -p wandb.entity", "north"),
    ("diloco train lab=north", "! lab=north: lab is not in the defaults list of config.yaml; write +lab=north"),
    ("diloco train --config-dir shared wandb=team --cfg job -p wandb.project", "team"),
    ("diloco train --config-name paper --cfg job -p run.id", "paper"),
    ("diloco train --config-path conf", "! --config-path has no use with diloco; write --config-dir DIR"),
    ("diloco train --cfg hydra --package hydra.job", "# @package hydra.job\n"),
    ("diloco train --cfg hydra --resolve -p hydra.sweep.dir", r"multirun/\d{4}-"),
    ("diloco train --cfg all", r"hydra:\n(.|\n)*\nrun:\n"),
    ("diloco train --info searchpath", r"HERE/configs +\|\n(.|\n)*diloco +\| file://PACKAGE"),
    ("diloco train --info defaults-tree", "experiment: null"),
    ("diloco train --info defaults outer=two_bit", r"outer/diloco +\| outer +\| False +\| outer/two_bit"),
    ("diloco train -m outer.lr=1,-1", "! outer.lr=-1 is out of range"),
    ("diloco sweep outer.lr=0.5,0.7 'run.seed=range(0,2)' --dry-run", r"(pending .*\n){4}"),
    ("diloco sweep 'outer.lr=choice(0.5,0.7)' 'model=glob(t*)' --dry-run", r"(pending .*model=tiny.*\n){2}"),
    ("diloco sweep experiment=lr-sweep --dry-run", r"(pending .*\n){4}"),
    ("diloco sweep --config-name paper --dry-run", r"(pending .*--config-name paper.*\n){2}"),
    ("diloco local experiment=lr-sweep", "! hydra.sweeper.params is for a sweep; add --multirun, or hydra.mode=RUN"),
    ("diloco sweep hydra/sweeper=optuna 'inner.lr=interval(1e-4,1e-2)' --dry-run", "optuna chooses inner.lr"),
    ("diloco sweep outer.lr=1,2 hydra/launcher=submitit_slurm --dry-run", "members run with submitit_slurm"),
    ("diloco sweep outer.lr=1,2 hydra/launcher=joblib --dry-run", "! .*joblib .*pip install 'hydra-joblib-launcher'"),
    ("diloco sweep outer.lr=1,2 hydra.sweep.dir=there --dry-run", r"run.dir=there/1-lr2"),
    ("diloco sweep outer.lr=1,2 'hydra.sweep.subdir=${hydra:job.num}_${outer.lr}' --dry-run", r"run.dir=\S*/1_2\n"),
    (
        "diloco sweep 'hydra.sweeper.params={outer.lr: 1}'",
        "! hydra.sweeper.params is for a file; here what varies is an",
    ),
    ("diloco train hydra.run.dir=there --cfg job -p run.dir", "there"),
    ("diloco train outer.lr=1 'run.dir=r/${hydra:job.override_dirname}' --cfg job -p run.dir", "r/outer.lr=1\n"),
    ("diloco train hydra.run.dir=there run.dir=here", "! hydra.run.dir=there and run.dir=here are one setting; drop"),
    ("diloco train hydra.job.chdir=true", "! hydra.job.chdir=true has no effect .*; diloco stays in the directory"),
    ("diloco train hydra/job_logging=disabled", "! .* no effect .*; .*hydra.verbose=true shows more"),
    ("diloco train hydra.output_subdir=null", "! .* no effect .*; a run directory has config.yaml"),
    ("diloco train 'hydra.searchpath=[file://lab]'", "! .* no effect .*; name the folder with --config-dir"),
    ("diloco train --hydra-help", "! --hydra-help has no use with diloco; write --help, --cfg hydra or --info"),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that no test changes, so that what is composed there is remembered."""
    place = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        furnish()
    return place


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place: Path = request.getfixturevalue("shared") if "command" in request.fixturenames else tmp_path
    monkeypatch.chdir(place)
    monkeypatch.setenv("LAB", "north")
    if place == tmp_path:
        furnish()
    return place


def furnish() -> None:
    """Puts settings of a researcher's own into the working directory."""
    write("configs/train/h100.yaml", "threads: 3\n")
    write("configs/lab/north.yaml", "# @package _global_\nwandb:\n  entity: north\n")
    write("configs/experiment/night.yaml", "# @package _global_\neval:\n  every: 7\n")
    paper = "defaults: [config, _self_]\nrun: {id: paper}\nhydra: {sweeper: {params: {outer.lr: '0.5,0.7'}}}\n"
    write("configs/paper.yaml", paper)
    write("shared/wandb/team.yaml", "project: team\n")


def write(name: str, text: str) -> Path:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def words(command: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r"'([^']*)'|(\S+)", command)]


def diloco(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def complaint(*overrides: str, start: Start | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, start)
    text = str(caught.value)
    assert text == " ".join(text.split()), "one line"
    return text


# --- The list ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_of_hydras_documentation(
    command: str, expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = diloco(*words(command)[1:])
    shown = capsys.readouterr()
    pattern = expected.removeprefix("! ").replace("HERE", re.escape(str(here))).replace("PACKAGE", str(PACKAGE))
    pattern = re.sub(r"\+(?=outer|lab)", r"\\+", pattern)
    if expected.startswith("! "):
        assert (code, shown.out) == (2, "")
        assert shown.err.count("\n") == 1
        assert re.match(f"diloco: error: {pattern}", shown.err), shown.err
    else:
        assert code == 0, shown.err
        assert re.search(pattern, shown.out), shown.out


def test_the_table_of_the_readme_has_every_command() -> None:
    rows = re.findall(r"^\| `(diloco [^`]*)`", README, flags=re.MULTILINE)
    assert rows == [command for command, _ in COMMANDS]


def test_the_sweep_of_the_readme_is_planned_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert found is not None
    write("configs/experiment/page.yaml", found[1])
    assert diloco("sweep", "simulate", "experiment=page", "--dry-run") == 0
    assert "outer.codec_up=int8,e3m0" in (shown := capsys.readouterr().out) and "with submitit_slurm" in shown
    settings = plan_sweep(["experiment=page"], Start())[1].block.settings
    assert settings["sweeper.n_trials"] == 40 and settings["launcher.partition"] == "gpu"


def test_torchrun_takes_the_same_options() -> None:
    start, others = _start(["experiment=smoke", "-cd", "shared", "~outer.lr", "--config-name", "paper", "+lab=north"])
    assert start == Start(folder=Path("shared"), name="paper")
    assert others == ["experiment=smoke", "~outer.lr", "+lab=north"]
    with pytest.raises(ConfigError, match=r"^--config: expected one argument$"):
        _start(["--config"])


# --- Where files are looked for ---------------------------------------------------------------------------------------


def test_the_working_directory_comes_first_then_the_folder_then_the_package(here: Path) -> None:
    write("configs/outer/diloco.yaml", "method: diloco\nsync_every: 11\n")
    write("shared/outer/diloco.yaml", "method: diloco\nsync_every: 12\n")
    both = Start(folder=Path("shared"))
    assert search_path(both) == (here / "configs", here / "shared", PACKAGE)
    assert compose([], both).outer.sync_every == 11
    Path("configs/outer/diloco.yaml").unlink()
    assert compose([], both).outer.sync_every == 12
    assert compose().outer.sync_every == 100


def test_a_choice_that_is_not_there_says_where_it_was_looked_for(here: Path) -> None:
    assert complaint("wandb=team") == (
        "wandb=team is not a choice; expected one of default, offline, online; "
        f"looked in {here / 'configs' / 'wandb'}, {PACKAGE / 'wandb'}"
    )
    assert complaint("experiment=./mine.yaml").endswith("or give --config ./mine.yaml")
    assert complaint(start=Start(folder=Path("nowhere"))) == (
        "--config-dir=nowhere is no directory; make it, or drop the option"
    )
    assert complaint(start=Start(name="nothing")).startswith("--config-name=nothing is not there; looked for nothing.y")


@pytest.mark.parametrize(
    "files",
    [
        {"trainer/default.yaml": "gpus: 4", "callbacks/none.yaml": "x: 1"},
        {"config.yaml": "defaults: [model: resnet]\nlr: 1", "model/resnet.yaml": "depth: 18"},
        {"train/default.yaml": "max_epochs: 3\n_target_: os.system", "eval/default.yaml": "ckpt: last"},
        {"data/stdlib.yaml": "- a list"},
    ],
)
def test_a_configs_folder_of_another_program_changes_nothing(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = compose()
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    for name, text in files.items():
        write(f"configs/{name}", text)
    assert compose() == usual == compose(["outer=diloco", "train=default"])
    assert search_path(Start())[0] == PACKAGE


def test_a_config_of_ones_own_takes_the_place_of_ours_if_it_has_the_schema() -> None:
    ours = (PACKAGE / "config.yaml").read_text()
    write("configs/config.yaml", ours.replace("id: diloco", "id: house"))
    assert compose().run.id == "house"


def test_a_guest_takes_nothing_from_the_working_directory_that_was_not_typed() -> None:
    write("configs/train/default.yaml", "threads: 9\n")
    assert compose().train.threads == 9
    guest = Start(guest=True)
    assert compose([], guest).train.threads is None
    assert compose(["train=h100"], guest).train.threads == 3


def test_a_change_of_a_file_is_seen() -> None:
    assert compose(["train=h100"]).train.threads == 3
    before = stamp(search_path(Start()))
    write("configs/train/h100.yaml", "threads: 12\n")
    assert stamp(search_path(Start())) != before
    assert compose(["train=h100"]).train.threads == 12


def test_choices_in_folders_below_a_group_have_their_path_as_name() -> None:
    write("configs/experiment/north/one.yaml", "# @package _global_\nrun:\n  id: one\n")
    assert "north/one" in choices()["experiment"]
    assert compose(["experiment=north/one"]).run.id == "one"


def test_a_typed_choice_of_ones_own_without_effect_is_refused() -> None:
    write("configs/train/h100.yaml", "log_every: 3\n")
    with pytest.raises(ConfigError, match=r"^train=h100 has no effect with diloco plan"):
        refuse_ignored(compose(["train=h100"]), "plan", ["train=h100"])


# --- Files of --config ------------------------------------------------------------------------------------------------


def test_a_file_with_some_settings_lies_over_the_defaults_and_below_what_is_typed() -> None:
    part = write("part.yaml", "outer: {lr: 0.33}\nmodel: {config: {hidden_size: 64}}\n")
    config = compose(base=part)
    assert config.outer.lr == 0.33 and config.outer.sync_every == 100
    assert config.model.config["hidden_size"] == 64 and config.model.config["vocab_size"] == 256
    assert compose(["experiment=smoke"], base=part).model.config["hidden_size"] == 32
    assert compose(["outer=streaming"], base=part).outer.lr == 0.75
    assert compose(["outer.lr=0.2"], base=part).outer.lr == 0.2


def test_an_experiment_lies_over_a_run_and_brings_its_groups() -> None:
    run = write("run.yaml", compose(["model=14m", "data.tokenizer=x", "outer=two_bit", "run.dir=r"]).to_yaml())
    config = compose(["experiment=[smoke,night]"], base=run)
    assert (config.model.name, config.data.tokenizer, config.eval.every) == ("smoke", "bytes", 7)
    assert "head_dim" not in config.model.config
    assert (config.outer.codec_up, config.run.dir) == ("stat2", Path("r"))


def test_the_model_of_a_run_is_not_mixed_with_the_default_one() -> None:
    run = write("run.yaml", compose(["model=60m", "data.tokenizer=x"]).to_yaml())
    assert "bos_token_id" not in compose(base=run).model.config


def test_a_file_with_a_defaults_list_is_told_how_to_be_used() -> None:
    file = write("lists/mine.yaml", "defaults: [config]\nouter: {lr: 1}\n")
    assert complaint(start=Start(base=file)) == (
        f"{file} has a defaults list; start from it with --config-dir lists --config-name mine"
    )


def test_no_file_of_a_peer_is_interpolated_anywhere() -> None:
    for text in ("outer: {lr: '${oc.env:HOME}'}", "hydra: {sweeper: {params: {outer.lr: '${oc.env:HOME}'}}}"):
        assert "holds ${...}" in complaint(start=Start(base=write("part.yaml", text)))


# --- Files that are wrong ---------------------------------------------------------------------------------------------


def test_yaml_that_is_wrong_names_file_and_line(here: Path) -> None:
    file = write("configs/experiment/broken.yaml", "# @package _global_\nouter:\n  lr: [\n")
    assert complaint("experiment=broken").startswith(f"{here / file}, line 4: ")
    assert complaint(start=Start(base=file)).startswith(f"{file} is not YAML: line 4: ")


def test_an_experiment_without_its_first_line_is_told_so() -> None:
    write("configs/experiment/bare.yaml", "outer:\n  lr: 1\n")
    assert complaint("experiment=bare") == (
        "experiment=bare holds no settings of a run; its file begins with the line # @package _global_"
    )


@pytest.mark.parametrize(
    ("name", "text", "start", "told"),
    [
        (
            "experiment/tin",
            "defaults: [{override /model: tinny}, _self_]",
            Start(),
            "model=tinny is not a choice (did you ",
        ),
        (
            "experiment/tin",
            "defaults:\n  - smok\n  - _self_",
            Start(),
            "experiment=smok is not a choice (did you mean smoke",
        ),
        (
            "tin",
            "defaults: [config, {override /model: tinny}, _self_]",
            Start(name="tin"),
            "model=tinny is not a choice (did",
        ),
    ],
)
def test_a_choice_that_a_file_makes_and_that_is_not_there_names_the_file(
    name: str, text: str, start: Start, told: str, here: Path
) -> None:
    write("configs/experiment/other.yaml", "# @package _global_\ndefaults: [{override /model: tinny}, _self_]")
    file = write(f"configs/{name}.yaml", f"# @package _global_\n{text}")
    said = complaint(*(["experiment=tin"] if "/" in name else []), start=start)
    assert said.startswith(f"{here / file}: {told}") and "; expected one of " in said


def test_an_experiment_with_both_directories_of_hydra_is_run_and_swept(capsys: pytest.CaptureFixture[str]) -> None:
    places = "hydra: {run: {dir: 'one/${now:%Y}'}, sweep: {dir: many, subdir: 'm${hydra:job.num}'}}"
    write("configs/experiment/both.yaml", f"# @package _global_\ndefaults: [smoke, _self_]\n{places}")
    assert str(compose(["experiment=both"]).run.dir).startswith("one/2")
    assert diloco("local", "experiment=both", "--cfg", "job", "-p", "run.dir") == 0
    assert diloco("sweep", "experiment=both", "run.seed=1,2", "--dry-run") == 0
    assert re.findall("run.dir=(.*)", capsys.readouterr().out) == ["many/m0", "many/m1"]
    assert diloco("sweep", "experiment=both", "run.seed=1,2", "hydra.run.dir=x") == 2
    assert "hydra.run.dir=x has no effect in a sweep; set hydra.sweep.dir" in capsys.readouterr().err
    assert diloco("train", "experiment=both", "hydra.sweep.dir=x") == 2
    assert "hydra.sweep.dir is for a sweep; add --multirun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("subdir", "told"),
    [
        ("x", "hydra.sweep.subdir calls two members x; add ${hydra:job.num} to it"),
        ("a/${hydra:job.num}", "hydra.sweep.subdir=a/0: members lie side by side in hydra.sweep.dir; write a name of "),
        ("..", "hydra.sweep.subdir=..: members lie side by side"),
        ("${nothing}", "hydra.sweep.subdir: Interpolation key 'nothing' not found"),
    ],
)
def test_a_name_of_members_that_cannot_work_is_refused(
    subdir: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diloco("sweep", "run.seed=1,2", f"hydra.sweep.subdir={subdir}", "--dry-run") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"diloco: error: {told}") and said.count("\n") == 1


def test_a_directory_named_by_what_was_typed_has_choices_and_settings() -> None:
    named = compose(["model=14m", "outer.lr=0.5", "run.dir=r/${hydra:job.override_dirname}", "~outer.momentum"]).run.dir
    assert str(named) == "r/model=14m,outer.lr=0.5,~outer.momentum"


def test_a_file_to_begin_with_that_has_no_defaults_is_told_so() -> None:
    write("configs/bare.yaml", "outer:\n  lr: 1\n")
    assert complaint(start=Start(name="bare")).endswith("; does bare.yaml begin with defaults: [config, _self_]?")


def test_a_setting_of_a_newer_version_says_what_to_do() -> None:
    file = write("run.yaml", compose().to_yaml().replace("outer:\n", "outer:\n  telepathy: true\n"))
    assert complaint(start=Start(base=file)) == (
        "outer.telepathy is not a setting; did you mean outer.delay? "
        f"If a newer diloco wrote {file}, use that one, or delete the key from the file"
    )


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ("job: {chdir: true}", "hydra.job.chdir=true has no effect with diloco; diloco stays in the directory"),
        ("job: {name: x}", "hydra.job.name=x has no effect with diloco; set run.id"),
        ("callbacks: {a: {_target_: os.getcwd}}", "hydra.callbacks.a._target_=os.getcwd is not a setting here"),
        ("sweeper: {_target_: os.getcwd}", "hydra.sweeper._target_=os.getcwd is not a setting here; choose hydra/sw"),
    ],
)
@pytest.mark.parametrize("where", ["experiment", "part"])
def test_a_hydra_block_has_an_effect_or_is_refused(block: str, text: str, where: str) -> None:
    if where == "part":
        start = Start(base=write("part.yaml", f"hydra: {{{block}}}\n"))
        assert complaint(start=start).startswith(text)
    else:
        write("configs/experiment/mine.yaml", f"# @package _global_\nhydra: {{{block}}}\n")
        assert complaint("experiment=mine").startswith(text)


# --- Hydra's meaning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("+model=14m", "+model=14m adds a group, but model is there already; write model=14m"),
        ("++model=14m", "++model=14m adds a group, but model is there already; write model=14m"),
        ("~model.config.nothing", "~model.config.nothing deletes nothing: model.config.nothing is not there; drop it"),
        ("~outer.lr=3", "~outer.lr=3 deletes nothing: outer.lr has another value; drop it"),
        ("~inner.lr", "inner.lr is missing; expected a number > 0 and <= 10"),
        ("hydra.sweeper.n_trials=3", "hydra.sweeper.n_trials is not a setting of Hydra here; see --cfg hydra, or wr"),
        ("hydra/sweeper=ax", "hydra/sweeper=ax is a plugin of Hydra that is not installed: pip install 'hydra-ax-sw"),
    ],
)
def test_what_hydra_refuses_is_refused_in_one_line(override: str, text: str) -> None:
    assert complaint(override).startswith(text)


def test_a_deletion_brings_the_default_of_the_schema_back() -> None:
    usual = compose()
    changed = compose(
        ["wandb=offline", "~wandb", "~model.config.tie_word_embeddings", "outer=async_nesterov", "~outer.lr"]
    )
    assert changed.wandb == usual.wandb and changed.outer.lr == 0.75
    assert "tie_word_embeddings" not in changed.model.config


def test_text_that_hydra_would_not_parse_is_taken_as_it_is() -> None:
    for text in ("~/a=b é", "it's", "C:\\notes\\", "a b'c\\"):
        assert compose(["data=text", f"data.path={text}"]).data.path == (text,)


def test_a_hydra_application_around_us_keeps_its_configuration() -> None:
    from hydra.core.hydra_config import HydraConfig

    state = HydraConfig.instance()
    before = state.cfg
    assert compose(["run.dir=${hydra:job.name}"]).run.dir == Path("diloco")
    assert state.cfg is before


# --- Sweeps in a file -------------------------------------------------------------------------------------------------


def test_an_argument_counts_more_than_the_sweep_of_a_file() -> None:
    parsed, _ = plan_sweep(["experiment=lr-sweep", "outer.lr=0.6"], Start())
    assert [str(one) if isinstance(one, str) else one.key for one in parsed] == [
        "experiment=lr-sweep",
        "outer.lr=0.6",
        "run.seed",
    ]


@pytest.mark.parametrize("value", ["", "null", "'  '"])
def test_a_sweep_without_values_is_refused(value: str) -> None:
    write(
        "configs/experiment/mine.yaml",
        f"# @package _global_\nhydra:\n  sweeper:\n    params:\n      outer.lr: {value}\n",
    )
    with pytest.raises(ConfigError, match=r"^hydra.sweeper.params has no values for outer.lr; list some"):
        plan_sweep(["experiment=mine"], Start())


def test_a_sweeper_of_a_file_that_is_not_installed_is_said() -> None:
    write("configs/experiment/mine.yaml", "# @package _global_\ndefaults:\n  - override /hydra/sweeper: nevergrad\n")
    assert "pip install 'hydra-nevergrad-sweeper'" in complaint("experiment=mine")


def test_every_section_but_the_run_is_a_group_with_a_default() -> None:
    for section in set(Config.model_fields) - {"run", "model", "data", "inner", "outer"}:
        assert "default" in choices()[section]
        write(f"configs/{section}/mine.yaml", "")
        assert compose_tree([f"{section}=mine"], Start()).tree.hydra.runtime.choices[section] == "mine"


def test_what_is_typed_for_hydra_is_seen_by_the_loggers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging

    monkeypatch.setattr("diloco.cli.commands.common.implementation", lambda command: lambda config: 0)
    root, level = logging.getLogger(), logging.getLogger().level
    handlers, one = root.handlers[:], logging.getLogger("lab")
    try:
        root.handlers.clear()
        assert diloco("simulate", "experiment=smoke", "hydra.verbose=[lab]") == 0
        assert one.level == logging.DEBUG and root.level == logging.WARNING
        root.handlers.clear()
        assert diloco("simulate", "experiment=smoke", "hydra.verbose=true") == 0
        assert root.level == logging.DEBUG
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        one.setLevel(logging.NOTSET)
