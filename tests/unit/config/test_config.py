"""Composition, errors as one line, the manifest and its hash."""

import hashlib
import json
import re
import shlex
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.admission import RunKey, issue
from diloco.config import (
    Config,
    ConfigSource,
    Manifest,
    choices,
    compose,
    help_text,
)
from diloco.config.explain import description, setting_fields
from diloco.config.manifest import hash_of, planned, raised
from diloco.errors import ConfigError
from diloco.protocol import WIRE_VERSION
from diloco.text import rate_bytes, rate_text
from tests.support.errors import error_text

# What a choice cannot do without; everything else loads as shipped.
COMPANIONS = {
    ("data", "text"): ["data.path=notes/"],
    ("data", "chat"): ["data.path=a.jsonl"],
    ("data", "json"): ["data.path=a.jsonl"],
    ("data", "parquet"): ["data.path=a.parquet"],
    ("data", "tokens"): ["data.path=a.npy"],
    ("data", "hub"): ["model=14m"],
    ("data", "mixture"): ["data.paths.notes=notes/"],
    ("model", "pretrained"): ["model.path=checkpoint/"],
}
for name in choices()["model"]:
    if name[0].isdigit():
        COMPANIONS["model", name] = ["data.tokenizer=tokenizer/"]
DEFAULT = compose()
SHIPPED = [(group, one) for group, names in choices().items() for one in names if one != "default"]

SECRETS = TemporaryDirectory(prefix="diloco-test-")
RUN_KEY = RunKey.create(Path(SECRETS.name) / "run.key")
TOKEN = issue(RUN_KEY, "diloco", "worker", 2_000_000_000)
(Path(SECRETS.name) / "token").write_text(TOKEN.to_text())
(Path(SECRETS.name) / "token").chmod(0o600)
OUTERS = ", ".join(choices()["outer"])

# A manifest as another implementation would write it: any key order, any spaces.
HAND_WRITTEN = """{
  "wire_version": 13,
  "run": {"seed": 3, "id": "golden"},
  "outer": {"method": "diloco", "sync_every": 25, "fragments": 4, "lr": 0.7, "momentum": 0.9,
            "codec_up": "int8", "codec_down": "e3m0"},
  "budget": {"tokens": null, "outer_steps": 16},
  "model": {"path": null, "model_type": "llama", "name": "tiny",
            "config": {"vocab_size": 256, "rms_norm_eps": 1e-05, "eos_token_id": null}},
  "inner": {"optimizer": "adamw", "lr": 3e-3, "batch_size": 8, "betas": [0.9, 0.95],
            "weight_decay": 0.1,
            "clip": 1.0, "schedule": "cosine", "warmup_steps": 25, "final_lr_ratio": 0.1},
  "data": {"source": "stdlib", "sequence_length": 128, "tokenizer": "bytes", "field": "text",
           "holdout": 0.02, "name": null, "subset": null, "split": "train"},
  "swarm": {"admit": "invited"}
}"""
GOLDEN_HASH = "b6016f2683c9f9db36f9696966abeceaeedb643b39ad2a469748a7e96a10248b"


def message(*overrides: str, base: Path | None = None) -> str:
    return error_text(ConfigError, compose, overrides, base=base)


def is_like(pattern: str, text: str) -> bool:
    """Whether they are equal, where … in the pattern stands for anything."""
    return re.fullmatch(re.escape(pattern).replace("…", ".*"), text) is not None


# --- composition ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("group", "name"), SHIPPED)
def test_every_shipped_choice_loads(group: str, name: str) -> None:
    overrides = [f"{group}={name}", *COMPANIONS.get((group, name), [])]
    config = compose(overrides)
    assert Manifest.from_json(config.manifest().to_json()) == config.manifest()
    assert not config.warnings()


def test_the_size_of_a_model_says_the_number_of_fragments() -> None:
    sizes = {"tiny": 1, "14m": 1, "60m": 2, "150m": 5, "400m": 12, "1b": 38}
    assert {model: compose([f"model={model}"]).outer.fragments for model in sizes} == sizes
    for preset, fragments in (("async", 5), ("sparse", 5), ("decoupled", 24)):
        assert compose([f"outer={preset}", "model=150m"]).outer.fragments == fragments
    assert compose(["model=150m", "outer.fragments=3"]).outer.fragments == 3
    assert compose(["model=pretrained", "model.path=unknown/"]).outer.fragments == 1


@pytest.mark.parametrize(
    ("model", "peers", "more", "fragments"),
    [
        ("tiny", 4, "", 4),
        ("tiny", 64, "", 6),  # of 2**17 parameters and more
        ("20m", 8, "", 8),
        ("150m", 4, "", 8),  # five are as few as the size allows, and two for each author
        ("150m", 16, "", 16),
        ("1b", 1000, "", 64),
        ("20m", 8, "adapter=lora", 1),
        ("20m", 8, "outer.pattern=strided", 1),
        ("20m", 8, "outer.staggered=true outer.sync_every=4", 1),
        ("20m", 8, "outer.fragments=3", 3),
        ("tiny", 4, "experiment=quickstart outer.fragments=1", 1),
        ("tiny", 8, "outer=streaming", 4),
    ],
)
def test_authors_share_the_load_of_a_new_run(
    model: str, peers: int, more: str, fragments: int
) -> None:
    overrides = [f"model={model}", "data.tokenizer=x/", *more.split()]
    alone = compose([*overrides, f"swarm.min_peers={peers}"])
    here = compose([*overrides, f"local.peers={peers}"], ConfigSource(together=True))
    assert alone.outer.fragments == here.outer.fragments == fragments
    assert compose([*overrides, f"local.peers={peers}"]).outer == compose(overrides).outer


def test_a_run_that_is_resumed_keeps_its_fragments(tmp_path: Path) -> None:
    own = [f"run.dir={tmp_path}", "swarm.min_peers=4"]
    (tmp_path / "manifest.json").write_text(compose().manifest().to_json())
    assert compose(own).outer.fragments == 4, "there is no checkpoint, so the run begins anew"
    (tmp_path / "checkpoints" / "p0" / "step-1").mkdir(parents=True)
    assert compose(own).outer.fragments == 1
    assert compose([*own, "outer.fragments=2"]).outer.fragments == 2
    (tmp_path / "manifest.json").write_text("{")
    assert compose(own).outer.fragments == 4


@settings(max_examples=300)
@given(st.floats(1, 1e15))
@example(100_000 / 3)
def test_a_rate_reads_back_exactly_as_it_is_written(bytes_per_s: float) -> None:
    assert rate_bytes(rate_text(bytes_per_s)) == bytes_per_s


RATES = {
    "50Mbit": (6.25e6, "50 Mbit/s"),
    "100 kbit": (12.5e3, "100 kbit/s"),
    "6MB/s": (6e6, "48 Mbit/s"),
    "1Gbps": (1.25e8, "1 Gbit/s"),
    "1.6Mb/s": (2e5, "1.6 Mbit/s"),
    ".5Tbit/s": (6.25e10, "500 Gbit/s"),
    "2e3B": (2e3, "16 kbit/s"),
}


@pytest.mark.parametrize("key", ["sim.bandwidth", "swarm.upload_limit"])
def test_a_rate_has_a_unit_and_is_written_as_it_can_be_typed(key: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for text, (bytes_per_s, shown) in RATES.items():
        config = compose([f"{key}={text}"])
        assert attrgetter(key)(config) == bytes_per_s
        assert f": {shown}\n" in config.to_yaml()
        file.write_text(config.to_yaml())
        assert compose(base=file) == config == config.adopt(config.manifest())
    for text in ("2e5", "200000", "'200000.0'"):
        assert message(f"{key}={text}") == (
            f"{key}={text} could be bits or bytes per second; write 200kB (which is 1.6 Mbit/s)"
            " or 200kbit"
        )
    assert compose([f"{key}=200kB"]) == compose([f"{key}=1.6Mbit"])
    file.write_text(f"{key.replace('.', ': {')}: 200000}}")
    assert "write 200kB (which" in message(base=file)
    for text in ("0", "-1", "0Mbit", "true", "50mbit", "10Mbit/h", "Mbit", "1e999", "[1Mbit]"):
        assert message(f"{key}={text}").startswith(f"{key}={text} is no rate above 0; write it lik")
    for text in ("1e99Mbit", "7bit"):
        assert "is out of range; expected a rate such as" in message(f"{key}={text}")


TYPED: dict[str, dict[str, object]] = {
    "": {"run.id": "diloco", "run.dir": Path("runs/diloco")},
    "experiment=quickstart": {"run.id": "quickstart"},
    "run.id=mine experiment=quickstart": {"run.id": "mine"},
    "outer.lr=0.1 outer.lr=0.2": {"outer.lr": 0.2},
    "model=60m model=14m data.tokenizer=x": {"model.name": "14m"},
    "run.id=seven": {"run.dir": Path("runs/seven")},
    "run.id=a run.dir=out/${run.id}-${run.seed}-${train.device}": {"run.dir": Path("out/a-0-auto")},
    "run.id=7": {"run.id": "7"},
    "model.config={} model.config.vocab_size=300": {"model.config": {"vocab_size": 300}},
    "swarm.listen=/ip4/127.0.0.1/tcp/0": {"swarm.listen": ("/ip4/127.0.0.1/tcp/0",)},
}


@pytest.mark.parametrize("overrides", TYPED)
def test_what_is_typed_is_what_is_set(overrides: str) -> None:
    config = compose(overrides.split())
    assert {key: attrgetter(key)(config) for key in TYPED[overrides]} == TYPED[overrides]


def test_yaml_read_back_is_the_same_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    lines = [[], ["data=hub", "model=14m"], ["outer.momentum=0.5", "data=text", "data.path=x"]]
    for overrides in lines:
        file.write_text(compose(overrides).to_yaml())
        assert compose(base=file) == compose(overrides)
    both = compose(["outer.momentum=0.5", "outer.lr=0.3"])
    assert compose(["data=stdlib", "outer.lr=0.3"], base=file) == both


# --- the schema -----------------------------------------------------------------------------------
def test_every_setting_has_a_description_and_is_in_the_help() -> None:
    text = help_text()
    for key, _ in setting_fields(Config):
        assert f"  {key}=" in text
        assert (meaning := description(Config, key)) and meaning in text, key


# --- errors ---------------------------------------------------------------------------------------

WORDS = {
    "data.batch_size inner.batchsize": "inner.batch_size",
    "lr train.lr": "inner.lr or outer.lr",
    "outer.lrr": "outer.lr",
    "seed local.seed": "run.seed",
    "eval_every": "eval.every",
    "modle": "model",
    "sync_evry": "outer.sync_every",
}


@pytest.mark.parametrize(("typed", "meant"), WORDS.items())
def test_a_typing_mistake_or_a_missing_group_finds_the_setting(typed: str, meant: str) -> None:
    for word in typed.split():
        said = message(f"{word}=1")
        assert said == f"{word} is not a setting; did you mean {meant}?"


# Arguments, and what is said of them: * is the first of them, and … is anything.
MISTAKES = {
    "qqq.zzz=1": "qqq.zzz is not a setting; --cfg help lists them all",
    "outer=dilco": f"* is not a choice (did you mean diloco?); expected one of {OUTERS}",
    "outer.lr=-1": "* is out of range; expected a number > 0 and <= 10",
    "inner.warmup_steps=1.5": "* is not valid; expected a whole number of steps, or a part below 1",
    "outer.lr=abc": "* is not valid; expected a number > 0 and <= 10",
    "outer.lr=-1 inner.lr=-1": "… (and 1 more)",
    "outer.codec_up=int4": "* is not installed here (did you mean int8?); expected one of fp32…",
    "outer.overlap=100": "* is not less than outer.sync_every=100; lower it",
    "outer.grace_s=1": "*.0 needs a quorum after which it begins; set outer.quorum",
    "outer.codec_up=topk": "outer.momentum=0.7 does not go with *; set outer.momentum=0",
    "outer.lr_by_peers={0:1}": "outer.lr_by_peers has 0: 1.0; expected a number of peers and a l…",
    "sim.events=[crash]": "* is not valid; expected a list, each crash:PEER@SECOND, leave:... or …",
    "train.device=gpu": "* is not valid; expected auto, cpu, cuda[:N], xpu[:N] or mps",
    "inner.betas=[0.9,0.95": "* cannot be parsed (…); check brackets and quotes",
    "run.id=../x": "* is not valid; expected 1 to 64 letters, digits, '.', '_' or '-', the first…",
    "swarm.initial_peers=[/ip4/1.2.3.4/tcp/1]": "* is not valid; expected a list, each an address…",
    "outer.lr": "* is not a setting; write KEY=VALUE or GROUP=CHOICE",
    "~wandb": "*: no setting can be deleted; set wandb to its default, as --cfg help shows it",
    "outer.lr=1,2": "* is several values; give one value, or a list in brackets: 'outer.lr=[1,2]'",
    "model.config.x=inf": "model.config holds nan or an infinity; use finite numbers",
    "run.key=abc": "…* is not valid; expected 64 hexadecimal digits…",
    "swarm.token=abc": "…the token of the invitation cannot be read…",
    # Settings that contradict each other.
    "budget.outer_steps=null": "budget.outer_steps and budget.tokens are both null, so the run wo…",
    "local.step_delay_s=[1,2]": "local.step_delay_s has 2 values for local.peers=4; give one per …",
    "data.path=x": "* has no effect with data.source=stdlib; drop it, or add data=text, data=json…",
    "data.name=c4 data=text data.path=x": "* has no effect with data.source=text; drop it, or use…",
    "data.source=hub": "* needs a dataset; set data.name, such as allenai/c4",
    "data.shard=0": "data.shard and data.shards belong together; set both or neither",
    "model.path=x": "* together with model.config (from model=tiny) leaves open which one counts;…",
    "model=pretrained": "model.path and model.config are both empty; set model.path=DIRECTORY or …",
    "model.config.vocab_size=255": "* cannot hold bytes; data.tokenizer=bytes needs at least 256",
    "inner.warmup_steps=10000": "* is not over when the run ends after 10000 inner steps (…); low…",
}


@pytest.mark.parametrize(("typed", "expected"), MISTAKES.items())
def test_a_mistake_is_one_line_with_value_and_remedy(typed: str, expected: str) -> None:
    overrides = shlex.split(typed)
    said = message(*overrides)
    assert is_like(expected.replace("*", overrides[0]), said), said


def test_a_setting_in_doubt_is_named_once() -> None:
    [doubt] = compose(["model=60m"]).warnings()
    assert doubt.startswith("data.tokenizer=bytes uses 256 of model.config.vocab_size=32000; set d")


def test_saved_files_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"

    def said(text: str) -> str:
        file.write_text(text)
        return message(base=file).replace(str(file), "FILE")

    assert message(base=tmp_path / "no").endswith("/no cannot be read: No such file or directory")
    assert message(base=tmp_path).startswith(f"{tmp_path} cannot be read: ")
    assert said("outer:\n  lr: [\n").startswith("FILE is not YAML: line 3: ")
    defaults = "FILE has a defaults list; make it DIR/experiment/file, of --config-dir DIR"
    assert said("defaults: [config]\nouter: {lr: 1}\n") == defaults
    no_settings = "FILE is not a configuration; expected the config.yaml of a run directory"
    assert said("just text") == no_settings
    newer = "f another diloco wrote FILE, use that one, or delete the key from the file"
    saved = DEFAULT.to_yaml()
    assert is_like(f"surprise is not a setting; …; i{newer}", said(f"{saved}surprise: 1\n"))
    telepathy = said(saved.replace("outer:\n", "outer:\n  telepathy: true\n"))
    assert telepathy == f"outer.telepathy is not a setting; --cfg help lists them all; i{newer}"
    assert message("sim.mode=toy").startswith("sim.mode is not a setting; ")


# --- the manifest ---------------------------------------------------------------------------------
def test_the_hash_of_a_manifest_is_golden() -> None:
    """So it is the same in every process, and does not depend on the order of keys."""
    manifest = Manifest.from_json(HAND_WRITTEN)
    hashed = manifest.to_json().replace('"outer_steps":16', '"outer_steps":0')
    assert manifest.hash() == hashlib.sha256(hashed.encode()).hexdigest() == GOLDEN_HASH
    assert Manifest.from_json(manifest.to_json(indent=2)) == manifest
    backwards = json.loads(HAND_WRITTEN, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert Manifest.from_json(json.dumps(backwards)).hash() == GOLDEN_HASH


def test_a_schedule_has_a_short_name_and_a_decay_that_counts_where_it_is_said() -> None:
    """So that other runs have the hash that they had before there was a decay."""
    for typed in ("schedule=wsd", "+schedule=wsd", "inner.schedule=wsd"):
        assert compose(["experiment=lr-sweep", typed]).inner.schedule == "wsd"
    default = compose(["schedule=wsd"]).manifest()
    long = compose(["schedule=wsd", "inner.decay_ratio=0.5"]).manifest()
    assert "decay_ratio" not in default.to_json() and default.hash() != long.hash()
    assert Manifest.from_json(long.to_json()).inner.decay_ratio == 0.5
    assert message("schedule=step").startswith("inner.schedule=step is not a choice; expected one")


def test_how_long_a_run_is_may_differ_and_rises_but_not_by_what_it_ends() -> None:
    short, long = compose(["budget.outer_steps=10"]), compose(["budget.outer_steps=20"])
    assert short.manifest().hash() == long.manifest().hash() and short.outer.rounds == 10
    assert raised(short, planned(long.manifest())) == long == raised(long, planned(short))
    other = compose(["budget.outer_steps=null", "budget.tokens=9000"])
    assert other.manifest().hash() != long.manifest().hash()
    assert raised(other, planned(long)) == other
    no_manifest = '{"budget": 3}'
    assert hash_of(no_manifest) == hashlib.sha256(no_manifest.encode()).hexdigest()


def test_what_a_peer_sets_for_itself_does_not_reach_the_manifest() -> None:
    own = "run.dir=x run.name=a train.device=cuda:1 swarm.min_peers=2 data.shard=1 data.shards=2"
    # how many peers are expected only says how many fragments a new run has
    assert compose([*own.split(), "outer.fragments=1"]).manifest() == DEFAULT.manifest()
    assert compose(["model.config.hidden_size=64"]).manifest().hash() != DEFAULT.manifest().hash()
    kinds = ("data.path=mine/", "data.path=[theirs/,more/]", "data.path=mine/ data.cache=tokens/")
    assert len({compose(["data=text", *kind.split()]).manifest().hash() for kind in kinds}) == 1


SAYING_KEY = {
    "token": f"swarm.token={TOKEN.to_text()}",
    "token file": f"swarm.token=@{SECRETS.name}/token",
    "key": f"swarm.key_path={SECRETS.name}/run.key",
}


@pytest.mark.parametrize("override", SAYING_KEY.values(), ids=SAYING_KEY)
def test_an_invitation_and_the_private_key_say_the_run_key(override: str) -> None:
    key = RUN_KEY.public.hex()
    assert compose([override]).run.key == key == compose([override, override]).run.key
    said = message(override, f"run.key={'0123456789abcdef' * 4}")
    assert is_like(f"run.key=0123… is not the key of swarm.…, which is {key}…", said)


def test_a_token_is_used_and_never_written_down() -> None:
    token, file = TOKEN.to_text(), f"@{SECRETS.name}/token"
    config = compose([f"swarm.token={token}"])
    assert config.swarm.token == token == config.adopt(config.manifest()).swarm.token
    written = (config.to_yaml(), repr(config), str(config), str(config.model_dump(mode="json")))
    assert not any(token[-20:] in text for text in written)
    assert f"token: '{file}'" in compose([f"swarm.token={file}"]).to_yaml()


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


# --- a manifest from somebody else ----------------------------------------------------------------
def edited(key: str, *value: object) -> str:
    """The hand-written manifest with this value of a key, or without the key."""
    content = json.loads(HAND_WRITTEN)
    group, _, name = key.rpartition(".")
    node = content[group] if group else content
    node.pop(name, None)
    node.update([(name, one) for one in value])
    return json.dumps(content)


NOT_OURS = f"this diloco speaks {WIRE_VERSION}; install the same version on all peers"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", " is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (" " * 70000, " has 70000 characters; at most 65536 are accepted"),
        ('{"wire_version": NaN}', " is not JSON: NaN is not a number"),
        ("{}", f" has wire version null, {NOT_OURS}"),
        (edited("wire_version", 1), f" has wire version 1, {NOT_OURS}"),
        (edited("outer"), ": outer is missing; expected a group of settings"),
        (edited("outer.surprise", 1), ": outer.surprise is not a setting; "),
        (edited("run.id", "a\x1b[31m\n"), ': run.id="a\\u001b[31m\\n" is not valid; '),
        (edited("outer.fragments", 10**9), ": outer.fragments=1000000000 is out of range; "),
        (HAND_WRITTEN.replace("3e-3", "1e999"), ": inner.lr="),
    ],
    ids=lambda text: text[:40],
)
def test_an_invalid_manifest_is_refused_with_the_reason(text: str, expected: str) -> None:
    shown = error_text(ConfigError, Manifest.from_json, text)
    assert shown.startswith(f"manifest{expected}") and len(shown) < 700


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
MAPPINGS = partial(st.dictionaries, st.text(max_size=8), max_size=3)
JSON = st.recursive(LEAVES, lambda one: st.lists(one, max_size=3) | MAPPINGS(one), max_leaves=6)
SETTINGS = [key for key, _ in setting_fields(Manifest)]


@given(st.sampled_from(SETTINGS), JSON)
@settings(max_examples=300)
def test_any_value_anywhere_is_taken_whole_or_refused(key: str, value: object) -> None:
    try:
        manifest = Manifest.from_json(edited(key, value))
    except ConfigError as error:
        assert str(error).isprintable()
    else:
        assert Manifest.from_json(manifest.to_json()).hash() == manifest.hash()


@pytest.mark.parametrize("data", ["data=stdlib", "data=hub"])
def test_a_model_of_somebody_else_brings_its_tokenizer(data: str) -> None:
    commit, pretrained = "a1" * 20, ["model=pretrained", data]
    for typed, place in (
        ("model.path=saved/", ("saved/", None)),
        (f"model.path=org/model@{commit}", ("org/model", commit)),
        (f"model.path=org/model model.revision={commit}", ("org/model", commit)),
        ("model.path=saved/ data.tokenizer=bytes", ("bytes", None)),
    ):
        assert compose([*pretrained, *typed.split()]).data.tokenizer_place == place
    shipped = "TinyLlama/TinyLlama_v1.1" if data == "data=hub" else "bytes"
    assert compose([data]).data.tokenizer == shipped
