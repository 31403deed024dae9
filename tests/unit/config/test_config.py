"""Composition, errors as one line, the manifest and its hash."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from diloco.config import (
    Config,
    Manifest,
    OuterConfig,
    PeerLocal,
    RunOwned,
    choices,
    compose,
    files,
    help_text,
    refuse_ignored,
)
from diloco.config.explain import accepts, leaves
from diloco.config.sizes import fragments_for
from diloco.config.suggest import ELSEWHERE
from diloco.errors import ConfigError
from tests.support.changes import CHANGES, RUN_KEY, SECRETS, TOKEN

MODULE = import_module("diloco.config.sources")

# What a choice cannot do without; everything else loads as shipped.
COMPANIONS = {
    ("data", "text"): ["data.path=notes/"],
    ("data", "json"): ["data.path=a.jsonl"],
    ("data", "parquet"): ["data.path=a.parquet"],
    ("data", "hub"): ["model=14m"],
    ("data", "mixture"): ["data.paths.notes=notes/"],
    ("model", "pretrained"): ["model.path=checkpoint/"],
    **{("model", name): ["data.tokenizer=tokenizer/"] for name in choices()["model"] if name[0].isdigit()},
}
DEFAULT = compose()
SHIPPED = [(group, name) for group, names in choices().items() for name in names]

PEER_LOCAL = {
    *(
        "run.dir",
        "run.name",
        "run.lead",
        "run.report",
        "local.peers",
        "local.step_delay_s",
        "model.directory",
        "data.path",
        "data.paths",
        "data.tokenizer_directory",
        "data.cache",
        "data.shard",
        "data.shards",
    ),
    *(
        key
        for key in CHANGES
        if key.split(".")[0] in ("swarm", "sim", "volunteer", "train", "checkpoint", "eval", "wandb", "sweep")
    ),
}
DATA = {"data.path", "data.paths", "data.cache"}  # which need another data.source

CLOSING = {"swarm.token", "swarm.key_path"}  # whose run key is in the manifest, and they are not
OUTERS = ", ".join(choices()["outer"])

# A manifest as another implementation would write it: any key order, any spaces.
HAND_WRITTEN = """{
  "wire_version": 9,
  "run": {"seed": 3, "id": "golden"},
  "outer": {"method": "diloco", "sync_every": 25, "fragments": 4, "lr": 0.7, "momentum": 0.9,
            "codec_up": "int8", "codec_down": "e3m0"},
  "budget": {"tokens": null, "outer_steps": 16},
  "model": {"path": null, "model_type": "llama", "name": "tiny",
            "config": {"vocab_size": 256, "rms_norm_eps": 1e-05, "eos_token_id": null}},
  "inner": {"optimizer": "adamw", "lr": 3e-3, "batch_size": 8, "betas": [0.9, 0.95], "weight_decay": 0.1,
            "clip": 1.0, "schedule": "cosine", "warmup_steps": 25, "final_lr_ratio": 0.1},
  "data": {"source": "stdlib", "sequence_length": 128, "tokenizer": "bytes", "field": "text", "holdout": 0.02,
           "name": null, "subset": null, "split": "train"}
}"""
CANONICAL = (
    '{"budget":{"outer_steps":16,"tokens":null},'
    '"data":{"field":"text","holdout":0.02,"name":null,"revision":null,"sequence_length":128,"source":"stdlib","split":"train",'
    '"subset":null,"tokenizer":"bytes","tokenizer_revision":null},'
    '"inner":{"batch_size":8,"betas":[0.9,0.95],"clip":1.0,"final_lr_ratio":0.1,"lr":0.003,"muon_lr_ratio":1.0,'
    '"optimizer":"adamw","schedule":"cosine","warmup_steps":25,"weight_decay":0.1},'
    '"model":{"config":{"eos_token_id":null,"rms_norm_eps":1e-05,"vocab_size":256},"model_type":"llama","name":"tiny",'
    '"path":null,"revision":null},'
    '"outer":{"audit":0.02,"clip_factor":3.0,"codec_down":"e3m0","codec_up":"int8","delay":null,"delay_c":0.0,"dylu":false,'
    '"eager":false,"error_feedback":0.0,"flatten":0.0,'
    '"fragments":4,"grace_s":0.0,"grace_slack":0.0,"lr":0.7,"lr_by_peers":{},"merge":"mean","method":"diloco",'
    '"mixing":0.0,"momentum":0.9,"momentum_warmup":null,"optimizer":"nesterov","overlap":0,"pattern":"contiguous",'
    '"quorum":null,"robust":"auto","rounds":null,"spot_check":0.0,"staggered":false,"staleness_exponent":0.0,"staleness_limit":0,"sync_every":25,'
    '"trim":0.25,"weights":"tokens"},'
    '"run":{"id":"golden","key":null,"seed":3},"wire_version":9}'
)
GOLDEN_HASH = "3145666283abe889a0ae309d6c953a17aa44a53b37be1809204dde1f9097d962"


def message(*overrides: str, base: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, base=base)
    text = str(caught.value)
    assert text == " ".join(text.split()), "one line"
    return text


# --- composition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "name"), SHIPPED)
def test_every_shipped_choice_loads(group: str, name: str) -> None:
    overrides = [f"{group}={name}", *COMPANIONS.get((group, name), [])]
    config = compose(overrides)
    assert Manifest.from_json(config.manifest().to_json()) == config.manifest()
    assert not config.warnings()
    refuse_ignored(config, "train", overrides)


def test_every_group_of_the_contract_is_shipped() -> None:
    assert set(choices()) == {*Config.model_fields, "experiment"} - {"run"}
    assert set(choices()["model"]) >= {"tiny", "14m", "60m", "150m", "400m", "1b"}
    assert set(choices()["data"]) == {"stdlib", "text", "json", "parquet", "hub", "mixture"}


@pytest.mark.parametrize(
    ("model", "fragments"), [("tiny", 1), ("14m", 1), ("60m", 2), ("150m", 5), ("400m", 12), ("1b", 38)]
)
def test_the_number_of_fragments_follows_from_the_size_of_the_model(model: str, fragments: int) -> None:
    for preset in ("diloco", "async", "sparse"):
        assert compose([f"outer={preset}", f"model={model}"]).outer.fragments == fragments
    assert compose(["outer=diloco", f"model={model}", "outer.fragments=3"]).outer.fragments == 3
    assert compose(["outer=decoupled", f"model={model}"]).outer.fragments == 24


def test_a_model_whose_sizes_are_not_known_is_one_fragment(tmp_path: Path) -> None:
    assert compose(["model=pretrained", f"model.path={tmp_path}"]).outer.fragments == 1
    assert fragments_for({"vocab_size": "many", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 8}) == 1


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", 0.87), ("14m", 14), ("60m", 60), ("150m", 150), ("400m", 400), ("1b", 1100)]
)
def test_every_model_has_the_size_of_its_name(name: str, millions: float) -> None:
    shape: dict[str, Any] = compose([f"model={name}", "data.tokenizer=tokenizer/"]).model.config
    width, heads, shared = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    head = shape.get("head_dim", width // heads)
    layer = 2 * width * head * (heads + shared) + 3 * width * shape["intermediate_size"] + 2 * width
    embeddings = shape["vocab_size"] * width * (1 if shape["tie_word_embeddings"] else 2)
    assert (embeddings + shape["num_hidden_layers"] * layer + width) / 1e6 == pytest.approx(millions, rel=0.03)


def test_an_experiment_overrides_the_defaults_and_the_command_line_overrides_both() -> None:
    assert compose().run.id == "diloco"
    assert compose(["experiment=quickstart"]).run.id == "quickstart"
    assert compose(["run.id=mine", "experiment=quickstart"]).run.id == "mine"
    assert compose(["experiment=quickstart"]).budget != compose().budget


def test_the_last_of_two_equal_arguments_wins() -> None:
    config = compose(["outer.lr=0.1", "model=60m", "outer.lr=0.2", "model=14m", "data.tokenizer=x"])
    assert (config.outer.lr, config.model.name) == (0.2, "14m")


def test_a_value_can_refer_to_any_other_setting() -> None:
    config = compose(["run.id=seven", "run.dir=out/${run.id}-${run.seed}-${train.device}"])
    assert config.run.dir == Path("out/seven-0-auto")
    assert compose(["run.id=seven"]).run.dir == Path("runs/seven")


def test_text_may_look_like_a_number_or_hold_reserved_characters() -> None:
    config = compose(["run.id=7", "data=text", "data.path=~/a=b é"])
    assert (config.run.id, config.data.path) == ("7", ("~/a=b é",))


def test_one_text_stands_for_a_list_of_one() -> None:
    assert compose(["swarm.listen=/ip4/127.0.0.1/tcp/0"]).swarm.listen == ("/ip4/127.0.0.1/tcp/0",)


def test_any_argument_of_the_transformers_config_can_be_set() -> None:
    config = compose(["model.config.rope_scaling.factor=2", "model.config.hidden_size=64"]).model.config
    assert config["rope_scaling"] == {"factor": 2}
    assert config["hidden_size"] == 64


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        compose().outer.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("overrides", [[], ["experiment=quickstart"], ["data=hub", "model=14m", "run.name=x"]])
def test_yaml_read_back_is_the_same_configuration(overrides: list[str], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(compose(overrides).to_yaml())
    assert compose(base=file) == compose(overrides)


def test_overrides_over_a_saved_configuration_replace_settings_and_groups(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(compose(["outer.momentum=0.5", "data=text", "data.path=notes/", "run.id=kept"]).to_yaml())
    config = compose(["data=stdlib", "outer.lr=0.3"], base=file)
    assert (config.outer.lr, config.outer.momentum, config.data.path, config.run.id) == (0.3, 0.5, None, "kept")


def test_one_composition_leaves_no_trace_in_the_next(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(DEFAULT.to_yaml())
    for base in (None, tmp_path / "config.yaml"):
        compose(["model=tiny", "model.config.hidden_size=64", "inner.betas=[0.5,0.5]", "run.dir=x"], base=base)
        assert compose(["model=tiny"], base=base) == DEFAULT


def test_composing_leaves_a_hydra_application_around_it_alone(tmp_path: Path) -> None:
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    files._composed.cache_clear()

    (tmp_path / "mine.yaml").write_text("a: 1")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        compose(["outer.lr=0.3"])
        assert GlobalHydra.instance().is_initialized()
        assert hydra.compose("mine") == {"a": 1}


def test_a_missing_configs_directory_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(MODULE, "__file__", str(tmp_path / "diloco" / "config" / "sources.py"))
    assert "configs directory is missing" in message()


def test_an_installed_package_carries_its_own_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside = tmp_path / "diloco" / "_configs"
    inside.mkdir(parents=True)
    (inside / "config.yaml").touch()
    monkeypatch.setattr(MODULE, "__file__", str(tmp_path / "diloco" / "config" / "sources.py"))
    assert MODULE._package() == inside


# --- the schema -------------------------------------------------------------------------------------------------------


def test_every_setting_has_a_description_and_is_in_the_help() -> None:
    text = help_text()
    for key, field in leaves(Config):
        assert field.description, key
        assert f"  {key}=" in text
        assert field.description in text


def test_every_setting_is_owned_by_the_run_or_by_the_peer_by_type() -> None:
    manifest = dict(leaves(Manifest))
    for group, field in Config.model_fields.items():
        kind: Any = field.annotation
        for name in kind.model_fields:
            owner = next(base for base in reversed(kind.__mro__) if name in getattr(base, "model_fields", {}))
            assert issubclass(owner, RunOwned) == (f"{group}.{name}" in manifest), f"{group}.{name}"
            assert issubclass(owner, PeerLocal) != issubclass(owner, RunOwned)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("H outer.H local_steps sync_every", "outer.sync_every"),
        ("steps max_steps train.steps outer.steps budget.steps", "budget.outer_steps"),
        ("tokens max_tokens epochs", "budget.tokens"),
        ("peers num_peers workers", "local.peers"),
        ("batch_size data.batch_size train.batch_size per_device_train_batch_size", "inner.batch_size"),
        ("lr learning_rate train.lr", "inner.lr or outer.lr"),
        ("inner_lr inner.learning_rate", "inner.lr"),
        ("optimizer", "inner.optimizer or outer.optimizer"),
        ("momentum", "outer.momentum"),
        ("seq_len data.seq_len block_size model.seq_len", "data.sequence_length"),
        ("seed local.seed", "run.seed"),
        ("run_id", "run.id"),
        ("output_dir dir", "run.dir"),
        ("dtype precision", "train.precision"),
        ("eval_every eval_steps eval.steps", "eval.every"),
        ("save_steps checkpoint_every", "checkpoint.every"),
        ("grad_clip", "inner.clip"),
        ("port listen", "swarm.listen"),
        ("model.hidden_size hidden_size model.dim model.n_embd", "model.config.hidden_size"),
        ("model.layers model.n_layer model.num_hiddn_layers n_layer", "model.config.num_hidden_layers"),
        ("model.vocab_size", "model.config.vocab_size"),
    ],
)
def test_the_word_of_another_program_finds_ours(typed: str, meant: str) -> None:
    for word in typed.split():
        assert message(f"{word}=1") == f"{word} is not a setting; did you mean {meant}?"


def test_every_word_of_another_program_stands_for_a_setting() -> None:
    assert all(accepts(dict(leaves(Config)), key) for key in ELSEWHERE)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("outer.learning_rate=1", "outer.learning_rate is not a setting; did you mean outer.lr?"),
        ("outr.lr=1", "outr.lr is not a setting; did you mean outer.lr?"),
        ("lr=1", "lr is not a setting; did you mean inner.lr or outer.lr?"),
        ("inner.batchsize=1", "inner.batchsize is not a setting; did you mean inner.batch_size?"),
        ("modle=tiny", "modle is not a setting; did you mean model?"),
        ("model.confg.x=1", "model.confg.x is not a setting; did you mean model.config.x?"),
        ("qqq.zzz=1", "qqq.zzz is not a setting; --cfg help lists them all"),
        (
            "outer=foo",
            f"outer=foo is not a choice; expected one of {OUTERS}",
        ),
        (
            "outer=dilco",
            f"outer=dilco is not a choice (did you mean diloco?); expected one of {OUTERS}",
        ),
        ("outer.lr=-1", "outer.lr=-1 is out of range; expected a number > 0 and <= 10"),
        ("outer.momentum=1.0", "outer.momentum=1.0 is out of range; expected a number >= 0 and < 1"),
        (
            "inner.warmup_steps=1.5",
            "inner.warmup_steps=1.5 is not valid; expected a whole number of steps, or a part below 1",
        ),
        ("outer.lr=abc", "outer.lr=abc is not valid; expected a number > 0 and <= 10"),
        ("outer.lr=nan", "outer.lr=nan is not valid; expected a number > 0 and <= 10"),
        ("outer.lr=", 'outer.lr="" is not valid; expected a number > 0 and <= 10'),
        ("outer.fragments=2.5", "outer.fragments=2.5 is not valid; expected a whole number >= 1 and <= 65536"),
        ("outer.fragments=true", "outer.fragments=true is not valid; expected a whole number >= 1 and <= 65536"),
        (
            "outer.codec_up=int4",
            "outer.codec_up=int4 is not installed here (did you mean int8?); expected one of fp32, fp16, int8, e3m0, "
            "stat2, topk, or ask whoever started the run which package has it",
        ),
        (
            "outer.overlap=101",
            "outer.overlap=101 is more than the 100 inner steps from one exchange of a fragment to its next "
            "(outer.sync_every); lower it",
        ),
        ("outer.grace_s=1", "outer.grace_s=1.0 needs a quorum after which it begins; set outer.quorum"),
        ("outer.grace_slack=0.5", "outer.grace_slack=0.5 needs a quorum after which it begins; set outer.quorum"),
        ("outer.codec_up=topk", "outer.momentum=0.7 does not go with outer.codec_up=topk; set outer.momentum=0"),
        (
            "outer.staleness_limit=3",
            "outer.staleness_limit=3 has no effect when a version waits for every peer; set outer.quorum, or drop it",
        ),
        ("outer.delay=4", "outer.delay=4 has no effect with outer.optimizer=nesterov; drop it"),
        (
            "outer.lr_by_peers={0:1}",
            "outer.lr_by_peers has 0: 1.0; expected a number of peers and a learning rate up to 10",
        ),
        ("sim.step_s=[1,a]", "sim.step_s=[1,a] is not valid; expected a list, each a number >= 0 and <= 86400"),
        (
            "sim.events=[crash]",
            "sim.events=[crash] is not valid; expected a list, each crash:PEER@SECOND, leave:... or join:...",
        ),
        ("train.device=gpu", "train.device=gpu is not valid; expected auto, cpu, cuda[:N], xpu[:N] or mps"),
        ("train.threads=0", "train.threads=0 is out of range; expected a whole number >= 1 and <= 1024, or null"),
        ("inner.betas=[1,2,3]", "inner.betas=[1,2,3] is not valid; expected a list of 2, each a number >= 0 and < 1"),
        ("run.dir=", 'run.dir="" is not valid; expected a directory'),
        (
            "run.id=../x",
            "run.id=../x is not valid; expected 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
        ),
        (
            "swarm.listen=localhost:80",
            "swarm.listen=localhost:80 is not valid; expected a list, each a multiaddr such as /ip4/0.0.0.0/tcp/4100",
        ),
        (
            "swarm.listen=[]",
            "swarm.listen=[] is not valid; expected a list, each a multiaddr such as /ip4/0.0.0.0/tcp/4100",
        ),
        ("outer.lr", "outer.lr is not a setting; write KEY=VALUE or GROUP=CHOICE"),
        ("~outer.lrr", "outer.lrr is not a setting; did you mean outer.lr?"),
        (
            "outer.lr=0.1,0.2",
            "outer.lr=0.1,0.2 is several values; give one value, or a list in brackets: 'outer.lr=[0.1,0.2]'",
        ),
        ("run.dir=${run.idd}", "run.dir: Interpolation key 'run.idd' not found"),
        ("model.config.x=inf", "model.config holds nan or an infinity; use finite numbers"),
    ],
)
def test_a_mistake_is_one_line_with_the_key_the_value_and_the_remedy(override: str, text: str) -> None:
    assert message(override) == text


def test_a_value_that_cannot_be_parsed_is_said() -> None:
    text = message("inner.betas=[0.9,0.95")
    assert text.startswith("inner.betas=[0.9,0.95 cannot be parsed (") and text.endswith("; check brackets and quotes")


def test_an_address_without_a_peer_id_is_refused_with_an_example() -> None:
    text = message("swarm.initial_peers=[/ip4/127.0.0.1/tcp/4100]")
    assert text.startswith(
        "swarm.initial_peers=[/ip4/127.0.0.1/tcp/4100] is not valid; expected a list, each an address with a peer id"
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["budget.outer_steps=null"],
            "budget.outer_steps and budget.tokens are both null, so the run would never end; set one",
        ),
        (["local.step_delay_s=[1,2]"], "local.step_delay_s has 2 values for local.peers=4; give one per peer or []"),
        (
            ["data.path=x"],
            "data.path=x has no effect with data.source=stdlib; drop it, or add data=text, data=json or data=parquet",
        ),
        (
            ["data.path=[x,y]"],
            "data.path=[x,y] has no effect with data.source=stdlib; drop it, or add data=text, "
            "data=json or data=parquet",
        ),
        (["data=text"], "data.source=text needs files; set data.path=FILE_OR_DIRECTORY"),
        (
            ["data=text", "data.path=x", "data.name=c4"],
            "data.name=c4 has no effect with data.source=text; drop it, or use data=hub",
        ),
        (["data.source=hub"], "data.source=hub needs a dataset; set data.name=NAME, such as data.name=allenai/c4"),
        (["data.shard=0"], "data.shard and data.shards belong together; set both or neither"),
        (["data.shard=2", "data.shards=2"], "data.shard=2 does not exist with data.shards=2; expected 0 to 1"),
        (
            ["model.path=x"],
            "model.path=x together with model.config (from model=tiny) leaves open which one counts; "
            "add model=pretrained, or drop model.path",
        ),
        (
            ["model=pretrained"],
            "model.path and model.config are both empty; set model.path=DIRECTORY or choose model=NAME",
        ),
        (
            ["model.config.vocab_size=255"],
            "model.config.vocab_size=255 cannot hold bytes; data.tokenizer=bytes needs at least 256",
        ),
        (
            ["data.sequence_length=2048"],
            "data.sequence_length=2048 is longer than model.config.max_position_embeddings=1024; "
            "lower the one or raise the other",
        ),
        (
            ["inner.warmup_steps=10000"],
            "inner.warmup_steps=10000 is not over when the run ends after 10000 inner steps "
            "(budget.outer_steps x outer.sync_every); lower it, or give it as a part of the run, such as 0.25",
        ),
        (
            ["inner.warmup_steps=100", "budget.outer_steps=null", "budget.tokens=102400"],
            "inner.warmup_steps=100 is not over when the run ends after 100 inner steps (budget.tokens / "
            "(inner.batch_size x data.sequence_length)); lower it, or give it as a part of the run, such as 0.25",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], text: str) -> None:
    assert message(*overrides) == text


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["budget.tokens=9"],
            "budget.outer_steps=100 and budget.tokens=9 are both set; the first one reached ends the "
            "run (null switches one off)",
        ),
        (
            ["model=60m"],
            "data.tokenizer=bytes uses 256 of model.config.vocab_size=32000; set "
            "data.tokenizer=TinyLlama/TinyLlama_v1.1, which is on the hub, or model.config.vocab_size=256",
        ),
        (
            ["model.config.vocab_size=5000"],
            "data.tokenizer=bytes uses 256 of model.config.vocab_size=5000; set data.tokenizer=NAME or DIRECTORY, "
            "or model.config.vocab_size=256",
        ),
        (
            ["swarm.initial_peers=/ip4/203.0.113.7/tcp/1/p2p/x"],
            "swarm.initial_peers is on another machine but swarm.listen only on this one; add "
            "swarm=network, so that the others can connect to this peer",
        ),
    ],
)
def test_settings_in_doubt_are_named_once(overrides: list[str], text: str) -> None:
    assert compose(overrides).warnings() == [text]


def test_an_address_that_a_peer_will_write_into_a_file_is_not_doubted() -> None:
    assert compose(["swarm.initial_peers=@runs/mine/address"]).warnings() == []
    assert message("swarm.initial_peers=@").startswith("swarm.initial_peers=@ is not valid; expected ")


def test_a_group_of_settings_can_be_built_from_typed_values_alone() -> None:
    assert OuterConfig.parse({"method": "diloco", "sync_every": 5, "lr": 1}).lr == 1.0
    with pytest.raises(ConfigError, match=r"^lr=-1 is out of range; expected a number > 0 and <= 10$"):
        OuterConfig.parse({"method": "diloco", "sync_every": 5, "lr": -1})
    for word, meant in (("learning_rate", "lr"), ("H", "sync_every")):
        with pytest.raises(ConfigError, match=rf"^{word} is not a setting; did you mean {meant}\?$"):
            OuterConfig.parse({"method": "diloco", "sync_every": 5, word: 1})


@pytest.mark.parametrize(
    ("outer", "modes"),
    [
        ({}, {"barrier", "lockstep", "judged_together"}),
        ({"staggered": True}, {"barrier", "judged_together"}),
        ({"overlap": 5}, {"barrier", "judged_together"}),
        ({"overlap": 10}, {"barrier", "round_late", "judged_together"}),
        ({"codec_up": "fp32"}, {"barrier", "lockstep"}),
        ({"codec_up": "fp32", "robust": "clip"}, {"barrier", "lockstep", "judged_together"}),
        ({"robust": "none"}, {"barrier", "lockstep"}),
        ({"quorum": 1}, set()),
        ({"quorum": 1, "robust": "clip"}, set()),
    ],
)
def test_the_settings_of_the_outer_step_say_which_mode_they_are(outer: dict[str, Any], modes: set[str]) -> None:
    settings = OuterConfig.parse({"method": "diloco", "sync_every": 10, **outer})
    asked = ("barrier", "lockstep", "round_late", "judged_together")
    assert {mode for mode in asked if getattr(settings, mode)} == modes


def test_saved_configurations_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    missing, broken, text, old = (tmp_path / name for name in ("missing", "broken", "text", "old"))
    broken.write_text("a: b: c")
    text.write_text("just text")
    old.write_text(compose().to_yaml() + "surprise: 1\n")
    assert message(base=missing) == f"{missing} cannot be read: No such file or directory"
    assert message(base=tmp_path).startswith(f"{tmp_path} cannot be read: ")
    assert message(base=broken).startswith(f"{broken} is not YAML: ")
    assert message(base=text) == f"{text} is not a configuration; expected the config.yaml of a run directory"
    assert message(base=old).startswith("surprise is not a setting; ")
    assert message(base=old).endswith(f"; if a newer diloco wrote {old}, use that one, or delete the key from the file")


def test_a_saved_configuration_of_an_earlier_version_still_loads(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(DEFAULT.to_yaml().replace("sim:\n", "sim:\n  mode: train\n"))
    assert "mode: train" in saved.read_text()
    assert compose(base=saved) == DEFAULT
    assert message("sim.mode=toy").startswith("sim.mode is not a setting; ")


def test_several_mistakes_are_counted() -> None:
    assert message("outer.lr=-1", "inner.lr=-1").endswith(" (and 1 more)")


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_the_hash_of_a_hand_written_manifest_is_golden() -> None:
    manifest = Manifest.from_json(HAND_WRITTEN)
    assert manifest.to_json() == CANONICAL
    assert manifest.hash() == hashlib.sha256(CANONICAL.encode()).hexdigest() == GOLDEN_HASH


@given(st.randoms(use_true_random=False))
def test_the_hash_does_not_depend_on_the_order_of_keys(random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffled(value[key]) for key in keys}

    text = json.dumps(shuffled(json.loads(HAND_WRITTEN)))
    assert Manifest.from_json(text).hash() == GOLDEN_HASH


def test_the_hash_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = "from diloco.config import compose; print(compose(['experiment=quickstart']).manifest().hash())"
    environment = {"PYTHONHASHSEED": "123", "PYTHONPATH": ":".join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.strip() == compose(["experiment=quickstart"]).manifest().hash()


def test_json_for_people_has_the_same_hash() -> None:
    manifest = compose().manifest()
    assert Manifest.from_json(manifest.to_json(indent=2)) == manifest


def test_every_setting_has_a_change_to_test_with() -> None:
    assert set(CHANGES) == {key for key, _ in leaves(Config)}
    assert set(CHANGES) - PEER_LOCAL == {key for key, _ in leaves(Manifest)} - {"wire_version"}


@pytest.mark.parametrize("key", [key for key in CHANGES if key not in PEER_LOCAL and CHANGES[key]])
def test_every_run_owned_change_changes_the_hash_and_is_named(key: str) -> None:
    before, after = DEFAULT.manifest(), compose(CHANGES[key]).manifest()
    assert after.hash() != before.hash()
    assert any(line.startswith(key) for line in after.differences(before))


@settings(max_examples=8)
@given(st.sets(st.sampled_from(sorted(PEER_LOCAL - DATA - {"local.peers"} - CLOSING)), min_size=1))
@example(PEER_LOCAL - DATA - {"local.step_delay_s"} - CLOSING)
def test_no_peer_local_change_reaches_the_manifest(keys: set[str]) -> None:
    overrides = [override for key in sorted(keys) for override in CHANGES[key]]
    config = compose(overrides)
    assert config != DEFAULT
    assert config.manifest() == DEFAULT.manifest()
    assert config.manifest().hash() == DEFAULT.manifest().hash()


@pytest.mark.parametrize(
    "override",
    [f"swarm.token={TOKEN.to_text()}", *CHANGES["swarm.token"], *CHANGES["swarm.key_path"]],
    ids=["token", "token file", "key"],
)
def test_an_invitation_and_the_private_key_both_say_what_the_run_key_is(override: str) -> None:
    assert compose([override]).run.key == RUN_KEY.public.hex() == compose([override, override]).run.key
    with pytest.raises(
        ConfigError, match=rf"run\.key=0123.* is not the key of swarm\..*, which is {RUN_KEY.public.hex()}"
    ):
        compose([override, *CHANGES["run.key"]])


def test_a_token_is_used_and_never_written_down() -> None:
    config = compose([f"swarm.token={TOKEN.to_text()}"])
    assert config.swarm.token == TOKEN.to_text() == config.adopt(config.manifest()).swarm.token
    written = (config.to_yaml(), repr(config), str(config), str(config.model_dump(mode="json")))
    assert not any(TOKEN.to_text()[-20:] in text for text in written)
    assert f"token: '@{SECRETS.name}/token'" in compose(CHANGES["swarm.token"]).to_yaml()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("run.key=abc", "run.key=abc is not valid; expected 64 hexadecimal digits"),
        ("swarm.token=a,b", "several values"),
        ("swarm.token=a b", "is not valid; expected the token of an invitation"),
        ("swarm.token=abc", "the token of the invitation cannot be read"),
        (f"swarm.token={TOKEN.to_text()[:-1]}", "the token of the invitation cannot be read"),
        ("swarm.token=@missing", "swarm.token=@missing cannot be read: No such file"),
        ("swarm.key_path=missing", "swarm.key_path=missing cannot be read: No such file"),
        ("swarm.key_path=README.md", "swarm.key_path=README.md"),
    ],
)
def test_what_is_no_key_or_invitation_is_refused_in_one_line(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_the_path_of_the_data_is_not_in_the_manifest() -> None:
    first, second = (compose(["data=text", f"data.path={path}"]).manifest() for path in ("mine/", "[theirs/,more/]"))
    assert first.hash() == second.hash()
    assert "mine/" not in first.to_json()


def test_differences_name_each_key_with_both_values() -> None:
    here = compose(["outer.lr=0.7", "model.config.rope_theta=5000", "run.id=a"]).manifest()
    there = compose(["outer.lr=0.4", "inner.betas=[0.9,0.99]", "run.id=b"]).manifest()
    assert here.differences(there) == [
        "inner.betas: [0.9, 0.95] here, [0.9, 0.99] there",
        "model.config.rope_theta: 5000 here, not set there",
        "outer.lr: 0.7 here, 0.4 there",
        "run.id: a here, b there",
    ]
    assert here.differences(here) == []


def test_a_joiner_adopts_the_run_and_keeps_its_own_half() -> None:
    mine = compose(["train.threads=2", "run.dir=mine", "outer.lr=0.1", "run.seed=9"])
    theirs = compose(["experiment=quickstart"]).manifest()
    joined = mine.adopt(theirs)
    assert joined.manifest() == theirs
    assert (joined.train.threads, joined.run.dir) == (2, Path("mine"))
    with pytest.raises(ConfigError, match=r"does not fit this peer: data.source=text needs files"):
        mine.adopt(compose(["data=text", "data.path=x"]).manifest())


# --- a manifest from somebody else ------------------------------------------------------------------------------------


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Manifest.from_json(text)
    shown = str(caught.value)
    assert shown.isprintable() and len(shown) < 700
    return shown


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    content = json.loads(HAND_WRITTEN)
    edit(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "manifest is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "manifest is not a JSON object"),
        ("[" * 60000, "manifest is not JSON: "),
        ("1" * 60000, "manifest is not JSON: "),
        (" " * 70000, "manifest has 70000 characters; at most 65536 are accepted"),
        ('{"wire_version": NaN}', "manifest is not JSON: NaN is not a number"),
        ("{}", "manifest has wire version null, this diloco speaks 9; install the same version on all peers"),
        (edited(lambda it: it.update(wire_version=1)), "manifest has wire version 1, this diloco speaks 9; install"),
        (
            edited(lambda it: it.update(wire_version=True)),
            "manifest has wire version true, this diloco speaks 9; install",
        ),
        (
            edited(lambda it: it.update(wire_version=5.0)),
            "manifest has wire version 5.0, this diloco speaks 9; install",
        ),
        (edited(lambda it: it.pop("outer")), "manifest: outer is missing; expected a group of settings"),
        (
            edited(lambda it: it["outer"].pop("method")),
            "manifest: outer.method is missing; expected one of diloco, data_parallel",
        ),
        (edited(lambda it: it["outer"].update(surprise=1)), "manifest: outer.surprise is not a setting; "),
        (edited(lambda it: it["run"].update(dir="/etc")), "manifest: run.dir is not a setting; "),
        (edited(lambda it: it["run"].update(id="a\x1b[31m\n")), 'manifest: run.id="a\\u001b[31m\\n" is not valid; '),
        (edited(lambda it: it["run"].update(id="x" * 60000)), "manifest: run.id=xxx"),
        (edited(lambda it: it["inner"].update(lr="1")), "manifest: inner.lr=1 is not valid; "),
        (
            edited(lambda it: it["outer"].update(fragments=10**9)),
            "manifest: outer.fragments=1000000000 is out of range; ",
        ),
        (edited(lambda it: it["data"].update(name="a\x1b\nb")), "manifest: "),
        (HAND_WRITTEN.replace("3e-3", "1e999"), "manifest: inner.lr="),
        (HAND_WRITTEN.replace("1e-05", "1e999"), "manifest: model.config holds nan or an infinity"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_reason(text: str, expected: str) -> None:
    assert refused(text).startswith(expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.text())
def test_arbitrary_text_is_no_manifest(text: str) -> None:
    refused(text)


@given(st.sampled_from([key for key, _ in leaves(Manifest)]), JSON)
@settings(max_examples=300)
def test_a_manifest_with_any_value_anywhere_is_accepted_whole_or_refused_cleanly(key: str, value: object) -> None:
    group, _, name = key.rpartition(".")
    text = edited(lambda it: (it[group] if group else it).update({name: value}))
    try:
        manifest = Manifest.from_json(text)
    except ConfigError as error:
        assert str(error).isprintable()
    else:
        assert Manifest.from_json(manifest.to_json()).hash() == manifest.hash()


@given(st.lists(st.sampled_from(["run", "outer", "lr", "config", "model", "x\n", "é", ""]), max_size=3), JSON)
def test_a_manifest_with_any_key_anywhere_is_accepted_whole_or_refused_cleanly(path: list[str], value: object) -> None:
    def edit(content: dict[str, Any]) -> None:
        node = content
        for part in path:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                break
            node = child
        node["new"] = value

    try:
        Manifest.from_json(edited(edit))
    except ConfigError as error:
        assert str(error).isprintable()
    else:
        assert path[:2] == ["model", "config"], "the one place that takes any key"


@pytest.mark.parametrize("data", ["data=stdlib", "data=text data.path=notes", "data=hub"])
def test_a_model_of_somebody_else_brings_its_tokenizer(data: str) -> None:
    commit = "a1" * 20

    def tokenizer(*overrides: str) -> tuple[str, str | None]:
        return compose(["model=pretrained", *data.split(), *overrides]).data.tokenizer_place

    assert tokenizer("model.path=saved/") == ("saved/", None)
    assert tokenizer(f"model.path=org/model@{commit}") == ("org/model", commit)
    assert tokenizer("model.path=org/model", f"model.revision={commit}") == ("org/model", commit)
    assert tokenizer("model.path=saved/", "data.tokenizer=bytes") == ("bytes", None)
    assert compose(data.split()).data.tokenizer == ("TinyLlama/TinyLlama_v1.1" if data == "data=hub" else "bytes")
