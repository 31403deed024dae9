"""Every setting has an effect or is refused: in every command, in every mode, and in truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config import Config, compose, refuse_ignored, refuse_run_owned
from diloco.config.base import Settings
from diloco.config.effect import COMMANDS
from diloco.config.explain import leaves
from diloco.errors import ConfigError
from tests.support.changes import CHANGES

LETTERS = {
    "l": "local",
    "t": "train",
    "j": "join",
    "h": "host",
    "s": "simulate",
    "p": "plan",
    "d": "doctor",
    "e": "eval",
}
# Of the run, when nothing else is said than the mode.
MODES = {"b": [], "q": ["outer.quorum=1"], "d": ["outer=data_parallel"]}

# For every setting the commands that read it (beside the settings that it needs), then the modes in which it has an
# effect by itself: barrier, quorum, data parallel. A dot is a refusal.
EFFECT = {
    "run.id": "lt.hspd. bqd",
    "run.seed": "lt.hspde bqd",
    "run.key": "lt.h.pd. bq.",
    "run.dir": "ltjhs.d. bqd",
    "run.name": ".tjh.... bqd",
    "run.lead": ".tj..... bqd",
    "run.report": ".tj..... bqd",
    "budget.outer_steps": "lt.hspd. bqd",
    "budget.tokens": "lt.hspd. bqd",
    "local.peers": "l...sp.. ...",
    "local.step_delay_s": "l....... ...",
    "model.name": "lt.hspd. bqd",
    "model.model_type": "lt.hspd. bqd",
    "model.path": "lt.hspd. bqd",
    "model.revision": "lt.hspd. bqd",
    "model.config": "lt.hspd. bqd",
    "model.weights": "lt.hspd. bqd",
    "model.frozen": "lt.hspd. bqd",
    "model.generation": "lt.hspd. bqd",
    "model.directory": "ltjhspd. bqd",
    "data.source": "lt.hspde bqd",
    "data.sequence_length": "lt.hspde bqd",
    "data.tokenizer": "lt.hspde bqd",
    "data.tokenizer_revision": "lt.hspde bqd",
    "data.tokenizer_files": "lt.hspde bqd",
    "data.field": "lt.hspde bqd",
    "data.holdout": "lt.hspde bqd",
    "data.name": "lt.hspde bqd",
    "data.revision": "lt.hspde bqd",
    "data.subset": "lt.hspde bqd",
    "data.split": "lt.hspde bqd",
    "data.mixture": "lt.hspde bqd",
    "data.path": "ltjhspde bqd",
    "data.paths": "ltjhspde bqd",
    "data.tokenizer_directory": "ltjhspde bqd",
    "data.cache": "ltj.s..e bqd",
    "data.shard": ".tj..... bq.",
    "data.shards": ".tj..... bq.",
    "inner.optimizer": "lt.hspd. bqd",
    "inner.lr": "lt.hspd. bqd",
    "inner.muon_lr_ratio": "lt.hspd. bqd",
    "inner.batch_size": "lt.hspde bqd",
    "inner.betas": "lt.hspd. bqd",
    "inner.weight_decay": "lt.hspd. bqd",
    "inner.clip": "lt.hspd. bqd",
    "inner.schedule": "lt.hspd. bqd",
    "inner.warmup_steps": "lt.hspd. bqd",
    "inner.final_lr_ratio": "lt.hspd. bqd",
    "outer.method": "lt.hspd. bqd",
    "outer.sync_every": "lt.hspd. bqd",
    "outer.fragments": "lt.hspd. bq.",
    "outer.pattern": "lt.hspd. ...",
    "outer.staggered": "lt.hspd. bq.",
    "outer.overlap": "lt.hspd. bq.",
    "outer.eager": "lt.hspd. ...",
    "outer.mixing": "lt.hspd. bq.",
    "outer.quorum": "lt.hspd. bq.",
    "outer.grace_s": "lt.hspd. .q.",
    "outer.grace_slack": "lt.hspd. ...",
    "outer.staleness_limit": "lt.hspd. .q.",
    "outer.staleness_exponent": "lt.hspd. ...",
    "outer.weights": "lt.hspd. bq.",
    "outer.merge": "lt.hspd. bq.",
    "outer.flatten": "lt.hspd. bq.",
    "outer.robust": "lt.hspd. b..",
    "outer.clip_factor": "lt.hspd. bq.",
    "outer.trim": "lt.hspd. ...",
    "outer.spot_check": "lt.hspd. b..",
    "outer.audit": "lt.hspd. b..",
    "outer.optimizer": "lt.hspd. bq.",
    "outer.lr": "lt.hspd. bq.",
    "outer.lr_by_peers": "lt.hspd. bq.",
    "outer.momentum": "lt.hspd. bq.",
    "outer.momentum_warmup": "lt.hspd. bq.",
    "outer.rounds": "lt.hspd. bq.",
    "outer.delay": "lt.hspd. ...",
    "outer.delay_c": "lt.hspd. ...",
    "outer.dylu": "lt.hspd. .q.",
    "outer.error_feedback": "lt.hspd. bq.",
    "outer.codec_up": "lt.hspd. bq.",
    "outer.codec_down": "lt.hspd. bq.",
    "swarm.initial_peers": "lt...... bq.",
    "swarm.listen": "ltjh..d. bq.",
    "swarm.announce": "ltjh..d. bq.",
    "swarm.reachable": "ltjh.... bq.",
    "swarm.identity_path": ".tjh..d. bq.",
    "swarm.token": "ltjh..d. bq.",
    "swarm.key_path": "ltjh..d. bq.",
    "swarm.min_peers": "ltjh.... bq.",
    "swarm.upload_limit": "ltjhs... bq.",
    "swarm.upload_per_day": "ltj..... bq.",
    "swarm.heartbeat_s": "ltjhs... bq.",
    "swarm.inner_state": "ltj.s... bq.",
    "sim.step_s": "....s... ...",
    "sim.jitter": "....s... ...",
    "sim.bandwidth": "....s... ...",
    "sim.latency_s": "....s... ...",
    "sim.loss": "....s... ...",
    "sim.events": "....s... ...",
    "sim.attack": "....s... ...",
    "volunteer.pause_when": "ltj..... bq.",
    "volunteer.busy_load": "ltj..... bq.",
    "volunteer.idle_s": "ltj..... bq.",
    "volunteer.settle_s": "ltj..... bq.",
    "train.device": "ltj.spde bqd",
    "train.parallel": "ltj..... bqd",
    "train.micro_batch": "ltj.s... bqd",
    "train.threads": "ltj.spd. bqd",
    "train.precision": "ltj.sp.e bqd",
    "train.tf32": "ltj..... bqd",
    "train.attention": "ltj..... bqd",
    "train.checkpointing": "ltj..... bqd",
    "train.compile": "ltj..... bqd",
    "train.step_delay_s": "ltj..... bqd",
    "train.log_every": "ltj.s... bqd",
    "checkpoint.every": "ltj..... bqd",
    "checkpoint.keep": "ltj...d. bqd",
    "checkpoint.background": "ltj..... bqd",
    "eval.every": "ltj.s... bqd",
    "eval.sequences": "ltj.s..e bqd",
    "wandb.mode": "ltj..... bqd",
    "wandb.project": "ltj..... bqd",
    "wandb.entity": "ltj..... bqd",
    "wandb.aggregate": "ltj..... bq.",
    "sweep.jobs": "........ ...",
    "sweep.objective": "........ ...",
    "sweep.plot": "........ ...",
}


def refusal(command: str, typed: str, others: list[str]) -> str | None:
    """What is said of a typed setting, beside others that a preset may say; None if it is taken."""
    try:
        if command == "join":
            refuse_run_owned([typed])
        refuse_ignored(compose([*others, typed]), command, [typed])
    except ConfigError as error:
        return str(error)
    return None


def test_every_setting_declares_where_it_has_an_effect() -> None:
    assert list(EFFECT) == [key for key, _ in leaves(Config)]
    assert set(LETTERS.values()) == set(COMMANDS)


@pytest.mark.parametrize("key", EFFECT)
def test_a_command_takes_the_settings_that_it_reads_and_refuses_the_others(key: str) -> None:
    typed, *needed = CHANGES[key]
    said = {letter: refusal(command, typed, needed) for letter, command in LETTERS.items()}
    assert "".join("." if said[letter] else letter for letter in LETTERS) == EFFECT[key].split()[0]
    for letter, text in said.items():
        assert text is None or (text.startswith(key) and ("; " in text) and (letter == "j" or LETTERS[letter] in text))


@pytest.mark.parametrize("key", EFFECT)
def test_a_mode_takes_the_settings_that_it_reads_and_refuses_the_others(key: str) -> None:
    typed, *needed = CHANGES[key]
    others = [one for one in needed if not one.startswith("outer.")]
    said = {letter: refusal("train", typed, [*mode, *others]) for letter, mode in MODES.items()}
    assert "".join("." if said[letter] else letter for letter in MODES) == EFFECT[key].split()[1]


def test_a_simulation_reads_what_it_takes_and_nothing_that_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diloco.sim.run import simulate

    config = compose(["experiment=smoke", "sim.events=[join:2@5]", f"run.dir={tmp_path / 'run'}"])
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
    # These depend on others: the rate of Muon, what late contributions count, how much a trimmed mean leaves out, a
    # clip of several contributions, and where files and their tokens are.
    conditional = {"inner.muon_lr_ratio", "outer.staleness_exponent", "outer.trim", "outer.clip_factor"}
    conditional |= {"data.mixture", "data.paths", "data.cache", "model.directory"}
    # These it reads after it has given each peer its own, and in order to know that there are no strangers.
    replaced = {"run.name", "run.lead", "run.key", "checkpoint.every", "checkpoint.keep", "train.step_delay_s"}
    replaced |= {"swarm.min_peers", "swarm.token", "swarm.key_path", "swarm.initial_peers"}
    taken = {key for key, row in EFFECT.items() if "s" in row.split()[0]}
    assert taken - conditional <= read
    assert read - taken <= replaced


@pytest.mark.parametrize(
    ("command", "overrides", "text"),
    [
        (
            "train",
            ["outer=data_parallel", "outer.lr=0.5"],
            "outer.lr=0.5 has no effect with outer.method=data_parallel, which has no outer steps and no swarm; "
            "drop it, or choose another outer",
        ),
        (
            "train",
            ["inner.schedule=constant", "inner.final_lr_ratio=0.2"],
            "inner.final_lr_ratio=0.2 has no effect with inner.schedule=constant; "
            "drop it, or set inner.schedule=cosine",
        ),
        (
            "train",
            ["data.field=content"],
            "data.field=content has no effect with data.source=stdlib, which has no columns; drop it",
        ),
        (
            "train",
            ["data.split=test"],
            "data.split=test has no effect with data.source=stdlib, which has no splits; drop it, or use data=hub",
        ),
        (
            "train",
            ["model=pretrained", "model.path=x", "model.model_type=gpt2"],
            "model.model_type=gpt2 has no effect with model.path, whose directory says it; drop it",
        ),
        (
            "train",
            ["wandb.project=x", "+wandb.entity=y"],
            "wandb.project=x has no effect with wandb.mode=disabled; drop it, or set wandb.mode=online or offline "
            "(and 1 more)",
        ),
        (
            "train",
            ["outer.lr_by_peers={1:0.4}", "outer.lr=0.5"],
            "outer.lr=0.5 has no effect with outer.lr_by_peers, which says it for every number of peers; drop it",
        ),
        (
            "train",
            ["outer.robust=trimmed_mean", "outer.weights=uniform"],
            "outer.weights=uniform has no effect with outer.robust=trimmed_mean, in which all peers count alike; "
            "drop it",
        ),
        (
            "train",
            ["swarm.reachable=no", "swarm=network"],
            "swarm=network has no effect with swarm.reachable=no, which listens nowhere; drop it",
        ),
        (
            "simulate",
            ["swarm=network"],
            "swarm=network has no effect with diloco simulate, whose network has neither addresses nor strangers; "
            "drop it",
        ),
        (
            "simulate",
            ["checkpoint.every=5"],
            "checkpoint.every=5 has no effect with diloco simulate, which writes no checkpoints; drop it",
        ),
        (
            "plan",
            ["sim.bandwidth=1e6"],
            "sim.bandwidth=1e6 has no effect with diloco plan, which only computes; give "
            "--step-s, --bandwidth and --latency-ms",
        ),
        ("eval", ["outer=streaming"], "outer=streaming has no effect with diloco eval, which trains nothing; drop it"),
        (
            "eval",
            ["model.config.hidden_size=8"],
            "model.config.hidden_size=8 has no effect with diloco eval, which is given a MODEL_DIR; drop it",
        ),
    ],
)
def test_the_refusal_names_the_setting_the_reason_and_the_remedy(command: str, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_ignored(compose(overrides), command, overrides)
    assert str(caught.value) == text


def test_what_a_preset_says_without_effect_is_not_held_against_the_user() -> None:
    overrides = ["experiment=quickstart", "outer=data_parallel"]
    refuse_ignored(compose(overrides), "local", overrides)


def test_a_run_that_is_there_already_keeps_its_settings() -> None:
    refuse_run_owned(["train.threads=2", "data.path=notes/", "run.dir=x"])
    for typed in ("outer.lr=1", "model=tiny", "+model.config.hidden_size=8", "experiment=smoke", "run.id=x"):
        with pytest.raises(ConfigError, match=r"belongs to the run and comes from the swarm; drop it, or start your"):
            refuse_run_owned([typed])
    refuse_run_owned(["run.id=x"], {"run.id"})
