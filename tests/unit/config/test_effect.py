"""Every setting has an effect or is refused: in every command, in every mode, and in truth."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from diloco.config import Config, compose, refuse_ignored, refuse_run_owned
from diloco.config.base import Settings
from diloco.config.effect import COMMANDS
from diloco.config.explain import leaves
from diloco.errors import ConfigError
from tests.support.changes import CHANGES
from tests.support.errors import error_text

COMMAND_NAMES = ("local", "train", "join", "host", "simulate", "plan", "doctor", "eval")
LETTERS = {name[0]: name for name in COMMAND_NAMES}
# Of the run, when nothing else is said than the mode.
MODES = {"b": [], "q": ["outer.quorum=1"], "d": ["outer=data_parallel"]}

# The commands that read a setting (beside the settings that it needs), then the modes in which it has an effect by
# itself: barrier, quorum, data parallel. A dot is a refusal. For each such row the settings that it holds for.
ROWS = {
    "lt.hspd. bqd": "run.id budget.outer_steps budget.tokens model.name model.model_type model.path model.revision "
    "model.config model.weights model.frozen model.generation inner.optimizer inner.lr inner.muon_lr_ratio "
    "inner.betas inner.weight_decay inner.clip inner.schedule inner.warmup_steps inner.final_lr_ratio outer.method "
    "outer.sync_every",
    "lt.hspde bqd": "run.seed data.source data.sequence_length data.tokenizer data.tokenizer_revision "
    "data.tokenizer_files data.field data.holdout data.name data.revision data.subset data.split data.mixture "
    "inner.batch_size",
    "lt.h.pd. bq.": "run.key",
    "ltjhs.d. bqd": "run.dir",
    ".tjh.... bqd": "run.name",
    ".tj..... bqd": "run.lead run.report",
    "l...sp.. ...": "local.peers",
    "l....... ...": "local.step_delay_s",
    "ltjhspd. bqd": "model.directory",
    "ltjhspde bqd": "data.path data.paths data.tokenizer_directory",
    "ltj.s..e bqd": "data.cache eval.sequences",
    ".tj..... bq.": "data.shard data.shards",
    "lt.hspd. bq.": "outer.fragments outer.staggered outer.overlap outer.mixing outer.quorum outer.weights "
    "outer.merge outer.flatten outer.clip_factor outer.optimizer outer.lr outer.lr_by_peers outer.momentum "
    "outer.momentum_warmup outer.rounds outer.error_feedback outer.codec_up outer.codec_down outer.robust",
    "lt.hspd. ...": "outer.pattern outer.grace_slack outer.staleness_exponent outer.delay outer.delay_c",
    "lt.hspd. .q.": "outer.grace_s outer.staleness_limit outer.dylu",
    "lt.hspd. b..": "outer.audit",
    "lt...... bq.": "swarm.initial_peers",
    "ltjh..d. bq.": "swarm.listen swarm.announce swarm.token swarm.key_path",
    "ltjh.... bq.": "swarm.reachable swarm.min_peers",
    ".tjh..d. bq.": "swarm.identity_path",
    "ltjhs... bq.": "swarm.upload_limit swarm.heartbeat_s",
    "ltj..... bq.": "wandb.aggregate",
    "ltj.s... bq.": "swarm.inner_state",
    "....s... ...": "sim.step_s sim.jitter sim.bandwidth sim.latency_s sim.loss sim.events sim.attack",
    "ltj.spde bqd": "train.device",
    "ltj..... bqd": "train.parallel train.tf32 train.attention train.checkpointing train.compile train.step_delay_s "
    "checkpoint.every checkpoint.background wandb.mode wandb.project wandb.entity",
    "ltj.s... bqd": "train.micro_batch train.log_every eval.every",
    "ltj.spd. bqd": "train.threads",
    "ltj.sp.e bqd": "train.precision",
    "ltj...d. bqd": "checkpoint.keep",
    "........ ...": "sweep.jobs sweep.objective sweep.plot",
}
EFFECT = {key: row for row, keys in ROWS.items() for key in keys.split()}
composed = lru_cache(maxsize=4)(lambda *overrides: compose(overrides))


def refusal(command: str, typed: str, config: Config) -> str | None:
    """What is said of a typed setting of this configuration; None if it is taken."""
    try:
        if command == "join":
            refuse_run_owned([typed])
        refuse_ignored(config, command, [typed])
    except ConfigError as error:
        return str(error)
    return None


def is_taken(typed: str, others: list[str]) -> bool:
    """Whether a run has a use for a typed setting, beside others that a preset may say."""
    try:
        return refusal("train", typed, composed(*others, typed)) is None
    except ConfigError:  # they contradict each other
        return False


def test_every_setting_declares_where_it_has_an_effect() -> None:
    assert sorted(" ".join(ROWS.values()).split()) == sorted(key for key, _ in leaves(Config))
    assert set(LETTERS.values()) == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("key", EFFECT)
def test_commands_and_modes_refuse_what_they_do_not_read(key: str) -> None:
    typed, *needed = CHANGES[key]
    config = composed(*needed, typed)
    said = {letter: refusal(command, typed, config) for letter, command in LETTERS.items()}
    commands = "".join("." if said[letter] else letter for letter in LETTERS)
    for letter, text in said.items():
        assert text is None or (text.startswith(key) and ("; " in text) and (letter == "j" or LETTERS[letter] in text))
    others = [one for one in needed if not one.startswith("outer.")]
    modes = "".join(letter if is_taken(typed, [*mode, *others]) else "." for letter, mode in MODES.items())
    assert f"{commands} {modes}" == EFFECT[key]


@pytest.mark.slow
def test_a_simulation_reads_just_the_settings_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco.sim.run import simulate

    small = ["outer.sync_every=2", "budget.outer_steps=2", "eval.sequences=2", "sim.events=[join:2@3]"]
    config = compose(["experiment=smoke", *small, f"run.dir={tmp_path / 'run'}"])
    groups = {field.annotation: name for name, field in Config.model_fields.items()}
    read: set[str] = set()
    plain = Settings.__getattribute__

    def noting(self: Settings, name: str) -> object:
        if type(self) in groups and name in type(self).model_fields:
            read.add(f"{groups[type(self)]}.{name}")
        return plain(self, name)

    monkeypatch.setattr(Settings, "__getattribute__", noting)
    simulate(config, lambda message: None)
    monkeypatch.undo()
    # The rate of Muon, what late contributions count, a clip of several
    # contributions, and where files and their tokens are: these depend on others.
    conditional = {"inner.muon_lr_ratio", "outer.staleness_exponent", "outer.clip_factor"}
    conditional |= {"data.mixture", "data.paths", "data.cache", "model.directory"}
    # These it reads after it has given each peer its own, and in order to know that there are no strangers.
    replaced = {"run.name", "run.lead", "run.key", "checkpoint.every", "checkpoint.keep", "train.step_delay_s"}
    replaced |= {"swarm.min_peers", "swarm.token", "swarm.key_path", "swarm.initial_peers"}
    taken = {key for key, row in EFFECT.items() if "s" in row.split()[0]}
    assert taken - conditional <= read
    assert read - taken <= replaced


# A command and what is typed; * in the text is the first setting of it.
REFUSALS = {
    "train outer.lr=0.5 outer=data_parallel": "* has no effect with outer.method=data_parallel, which has no outer "
    "steps and no swarm; drop it, or choose another outer",
    "train inner.final_lr_ratio=0.2 inner.schedule=constant": "* has no effect with inner.schedule=constant; drop it, "
    "or set inner.schedule=cosine",
    "train data.field=content": "* has no effect with data.source=stdlib, which has no columns; drop it",
    "train data.split=test": "* has no effect with data.source=stdlib, which has no splits; drop it, or use data=hub",
    "train model.model_type=gpt2 model=pretrained model.path=x": "* has no effect with model.path, whose directory "
    "says it; drop it",
    "train wandb.project=x +wandb.entity=y": "* has no effect with wandb.mode=disabled; drop it, or set "
    "wandb.mode=online or offline (and 1 more)",
    "train outer.lr=0.5 outer.lr_by_peers={1:0.4}": "* has no effect with outer.lr_by_peers, which says it for every "
    "number of peers; drop it",
    "train swarm=network swarm.reachable=no": "* has no effect with swarm.reachable=no, which listens nowhere; drop it",
    "simulate swarm=network": "* has no effect with diloco simulate, whose network has neither addresses nor "
    "strangers; drop it",
    "simulate checkpoint.every=5": "* has no effect with diloco simulate, which writes no checkpoints; drop it",
    "plan sim.bandwidth=1e6": "* has no effect with diloco plan, which only computes; give --step-s, --bandwidth and "
    "--latency-ms",
    "eval outer=streaming": "* has no effect with diloco eval, which trains nothing; drop it",
    "eval model.config.hidden_size=8": "* has no effect with diloco eval, which is given a MODEL_DIR; drop it",
}


@pytest.mark.parametrize("typed", REFUSALS)
def test_a_refusal_names_the_setting_the_reason_and_the_remedy(typed: str) -> None:
    command, *overrides = typed.split()
    text = error_text(ConfigError, refuse_ignored, compose(overrides), command, overrides)
    assert text == REFUSALS[typed].replace("*", overrides[0])


def test_a_run_keeps_its_settings_and_a_preset_may_say_more() -> None:
    refuse_run_owned(["train.threads=2", "data.path=notes/", "run.dir=x"])
    for typed in ("outer.lr=1", "model=tiny", "+model.config.hidden_size=8", "experiment=smoke", "run.id=x"):
        with pytest.raises(ConfigError, match=r"belongs to the run and comes from the swarm; drop it, or start your"):
            refuse_run_owned([typed])
    refuse_run_owned(["run.id=x"], {"run.id"})
    preset = ["experiment=quickstart", "outer=data_parallel"]  # what it says without effect is nobody's mistake
    refuse_ignored(compose(preset), "local", preset)
