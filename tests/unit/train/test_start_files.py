"""A run that starts from a checkpoint: what of it is in the manifest, and what a peer builds that
has the manifest."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco import model as models
from diloco.config import Config, Manifest, compose
from diloco.config.manifest import check_foreign, sources_of
from diloco.data import load_tokenizer
from diloco.errors import CheckpointError, ConfigError, DataError, SwarmError
from diloco.rundir.files import files_of, origin_of
from diloco.swarm.client.ask import parse_manifest
from diloco.train import start_files
from tests.support.errors import error_text
from tests.support.models import small_model
from tests.support.origins import BIAS, experts
from tests.support.stub_hub import COMMIT, go_online, stub_hub

pytestmark = pytest.mark.usefixtures("own_home")


def config_of(path: Path | str, tokenizer: Path | str | None = None, *more: str) -> Config:
    names = [f"model.path={path}", "data.sequence_length=32", "train.device=cpu"]
    names += [f"data.tokenizer={tokenizer}"] if tokenizer else []
    return compose(["model=pretrained", *names, *more])


def started(path: Path | str, *more: str) -> Config:
    return start_files.resolved(config_of(path, None, *more))


def test_a_run_from_a_directory_has_a_manifest_without_it(saved: Path, tmp_path: Path) -> None:
    config = started(saved)
    text = config.manifest().to_json()
    assert str(saved) not in text and str(saved) in config.to_yaml() and not config.names_files
    manifest = parse_manifest(text)
    assert (manifest.model.path, manifest.model.model_type) == (None, "glm4_moe")
    assert [source.kind for source in sources_of(manifest)] == ["model", "tokenizer"]
    assert manifest.model.generation.items() >= {"eos_token_id": [0, 9], "top_k": 5}.items()
    assert list(manifest.model.frozen) == [BIAS]
    assert {"tokenizer.json", "chat_template.jinja"} <= manifest.data.tokenizer_files.keys()
    shutil.copytree(saved, tmp_path / "copy")
    assert started(tmp_path / "copy").manifest().hash() == manifest.hash()
    assert start_files.resolved(config) == config  # a saved configuration is not looked up again


def trained() -> nn.Module:
    model = experts()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    return model


def test_what_another_checkpoint_differs_in_is_named(saved: Path, tmp_path: Path) -> None:
    other = shutil.copytree(saved, tmp_path / "other")
    changed = {f"model.frozen.{BIAS}: ": experts(shift=1.0), "model.weights: ": trained()}
    for what, model in changed.items():
        models.save(model, tmp_path / "again")
        shutil.copy(tmp_path / "again" / "model.safetensors", other)
        [difference] = started(saved).manifest().differences(started(other).manifest())
        assert difference.startswith(what)


def test_a_run_from_the_hub_names_it(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_hub(saved) as hub:
        go_online(monkeypatch, hub.url, tmp_path / "cache")
        config = started(f"org/model@{COMMIT}")
    manifest = parse_manifest(config.manifest().to_json())
    assert (manifest.model.path, manifest.model.revision) == ("org/model", COMMIT)
    assert (manifest.data.tokenizer, manifest.data.tokenizer_revision) == ("org/model", COMMIT)
    here = started(saved).manifest()
    assert manifest.model.weights == here.model.weights
    assert manifest.data.tokenizer_files == here.data.tokenizer_files
    models.outline(joiner(manifest, tmp_path).model)  # the hub is gone


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"../../.bashrc": "ab" * 32}, "is not valid"),
        ({"run.py": "ab" * 32}, "data.tokenizer_files.run.py of the run is no file of a tokenizer"),
        ({}, "data.tokenizer=files is of a manifest; give the directory of the files"),
    ],
)
def test_a_manifest_that_names_other_files_is_refused(
    saved: Path, files: dict[str, str], why: str
) -> None:
    content = json.loads(started(saved).manifest().to_json())
    content["data"]["tokenizer_files"] = files
    with pytest.raises(ConfigError, match=why) as caught:
        check_foreign(Manifest.from_json(json.dumps(content)))
    assert "\n" not in str(caught.value)


def test_files_that_no_run_can_start_from_are_one_line(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    no_tokenizer = "empty has no tokenizer; set it to bytes, or to a directory"
    nowhere, length = tmp_path / "nowhere", "data.sequence_length=128"
    for kind, config, why in (
        (DataError, config_of(saved, tmp_path / "empty"), no_tokenizer),
        (CheckpointError, config_of(nowhere, "bytes"), f"model.path: {nowhere} is no directory; "),
        (ConfigError, config_of(saved, None, length), f"{length} is longer than model.config.max"),
    ):
        assert why in error_text(kind, start_files.resolved, config)


def joiner(manifest: Manifest, directory: Path, given: dict[str, Path] | None = None) -> Config:
    """The configuration of a volunteer that has the manifest, and the files `given` by digest."""
    config = compose([f"run.dir={directory / 'run'}"]).adopt(manifest)
    for digest, place in (given or {}).items():
        to = files_of(config)[digest]
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(place, to)
    return start_files.with_origin(config)


def test_a_peer_without_the_files_builds_the_same_model(saved: Path, tmp_path: Path) -> None:
    config = started(saved, f"run.dir={tmp_path / 'first'}")
    model: Any = models.build(config.model, config.run.seed)
    start_files.keep(config, model)
    kept = files_of(config)
    next(iter(kept.values())).write_bytes(b"of another run that was here")
    start_files.keep(config, model)
    assert all(sha256(file.read_bytes()).hexdigest() == digest for digest, file in kept.items())
    other = joiner(config.manifest(), tmp_path, kept)
    built: Any = models.build(other.model, other.run.seed)
    start_files.keep(other, built)
    assert torch.equal(built.get_buffer(BIAS), torch.arange(4.0))
    about = dict.fromkeys(("architectures", "_name_or_path", "dtype"))
    assert {**built.config.to_dict(), **about} == {**model.config.to_dict(), **about}
    assert built.generation_config.to_dict() == model.generation_config.to_dict()
    assert load_tokenizer(*other.data.tokenizer_place).digest == load_tokenizer(str(saved)).digest
    start_files.check_start(other, model)
    with pytest.raises(SwarmError, match=r"^the run starts from weights .*, and the swarm sent ot"):
        start_files.check_start(other, built)
    built.load_state_dict(model.state_dict())
    for place, one in (("a", model), ("b", built)):
        models.save(one, tmp_path / place, load_tokenizer(str(saved)))
    names = "model.safetensors", "generation_config.json", "tokenizer.json", "chat_template.jinja"
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "b" / name).read_text())["eos_token_id"] == [0, 9]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["pad_token_id"] == 7


def test_a_tensor_or_a_file_that_is_not_the_runs_is_named(saved: Path, tmp_path: Path) -> None:
    config = started(saved, f"run.dir={tmp_path / 'first'}")
    shifted: Any = models.build(config.model, 0)
    shifted.get_buffer(BIAS).add_(1)
    origin = start_files.with_origin(config)
    for settings, model, why in (
        (config, shifted, f"model.frozen.{BIAS} is not what the run starts from; use the f"),
        (origin, small_model(), f"model.frozen.{BIAS} is here or in the run, and not in both"),
        (config, trained(), "has other weights than "),
    ):
        assert why in error_text(CheckpointError, start_files.keep, settings, model)
    words = shutil.copytree(saved, tmp_path / "words")
    (words / "chat_template.jinja").write_text("another")
    elsewhere = config.data.model_copy(update={"tokenizer_directory": str(words)})
    changed = config.model_copy(update={"data": elsewhere})
    why = r"^data\.tokenizer_files\.chat_template\.jinja is not what the run star"
    with pytest.raises(CheckpointError, match=why):
        start_files.keep(changed, models.build(config.model, 0))
    assert not (origin_of(config) / "tokenizer" / "chat_template.jinja").exists()


def test_a_wrong_file_of_a_frozen_tensor_is_refused(saved: Path, tmp_path: Path) -> None:
    config = started(saved)
    [digest] = config.model.frozen.values()
    other = joiner(config.manifest(), tmp_path)
    place = files_of(other)[digest]
    with pytest.raises(CheckpointError, match=rf"^model\.frozen\.{BIAS}: .* does not have it"):
        models.build(other.model, 0)
    place.parent.mkdir(parents=True)
    for content, why in (
        (models.tensor_bytes("x", torch.zeros(4)), "its file holds no such tensor"),
        (b"nonsense", "its file holds no such tensor"),
        (models.tensor_bytes(BIAS, torch.zeros(5)), r"the model has no such tensor of \[5\]"),
    ):
        place.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"^model\.frozen\.{BIAS}: {why}"):
            models.build(other.model, 0)
