"""The Hugging Face hub by name and commit: what is fetched, what is refused in which words, and
what is uploaded."""

import re
import shutil
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from unittest.mock import Mock

import pytest

from diloco import hub
from diloco import model as models
from diloco.cli import model as commands
from diloco.config import ModelConfig, compose
from diloco.data import load_tokenizer
from diloco.errors import CheckpointError, ConfigError, DataError
from diloco.model.build import directory_of
from tests.support.errors import error_text
from tests.support.models import small_model
from tests.support.stub_hub import COMMIT, StubHub, go_online, stub_hub

OTHER = "b1" * 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "model"
    models.save(small_model(), directory, load_tokenizer("bytes"))
    return directory


@pytest.fixture
def online(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with stub_hub(saved) as stub:
        go_online(monkeypatch, stub.url, tmp_path / "cache")
        yield stub


def fetch(name: str = "org/model", commit: str = COMMIT) -> Path:
    return hub.files_at("model.path", name, commit, hub.MODEL_FILES)


@pytest.mark.parametrize(
    ("key", "commit", "group"),
    [
        ("model.path", "model.revision", "model=pretrained"),
        ("data.tokenizer", "data.tokenizer_revision", "data=stdlib"),
        ("data.name", "data.revision", "data=hub"),
    ],
)
def test_a_name_with_its_commit_is_both(key: str, commit: str, group: str) -> None:
    whole = f"{key}=org/thing@{COMMIT}"
    config = compose([group, whole])
    assert attrgetter(key, commit)(config) == ("org/thing", COMMIT)
    assert config == compose([group, f"{key}=org/thing", f"{commit}={COMMIT}"])
    with pytest.raises(ConfigError, match=f"^{whole} and {commit}={OTHER} differ"):
        compose([group, whole, f"{commit}={OTHER}"])


def test_a_branch_is_refused_with_the_commit_that_it_is_now(online: StubHub) -> None:
    # directories
    for path in ("./org/model@main", "/org/model@main", "~/model@main", "a/b/c@main"):
        assert compose(["model=pretrained", f"model.path='{path}'"]).model.path == path
    for typed in (["model.path=org/model@main"], ["model.path=org/model", "model.revision=main"]):
        online.broken = False
        said = f"{typed[-1]} names no commit, and what is not a commit can change; write "
        with pytest.raises(ConfigError, match=f"^{said}org/model@{COMMIT}, which it is now$"):
            compose(["model=pretrained", *typed])
        online.broken = True
        with pytest.raises(ConfigError, match="; write the 40 hexadecimal digits that the hub sh"):
            compose(["model=pretrained", *typed])
    online.broken = False
    with pytest.raises(CheckpointError, match=f"hub, write org/model@{COMMIT}, the newest$"):
        directory_of(ModelConfig(name="x", path="org/model"))


def test_what_was_fetched_once_is_there_without_a_network(
    saved: Path, online: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = fetch()
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {file.name for file in place.iterdir()} == names
    assert all((place / name).read_bytes() == (saved / name).read_bytes() for name in names)
    online.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch() == place and not online.asked
    with pytest.raises(DataError, match="org/model at b1b1b1b1b1b1 is not in the cache, and HF_H"):
        fetch(commit=OTHER)


def test_what_the_hub_refuses_is_one_line_with_a_remedy(online: StubHub, tmp_path: Path) -> None:
    def refusal(name: str = "org/model", commit: str = COMMIT) -> str:
        with pytest.raises(DataError) as caught:
            fetch(name, commit)
        assert "\n" not in str(caught.value)
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
        return str(caught.value)

    no_model, login = "'org/modle' is no model that the Hugging Face hub shows", "`hf auth login`"
    said = refusal("org/modle")
    assert no_model in said and said.endswith(f"; check the name, or log in with {login}")
    newest = f"has no commit {OTHER}; the newest one is {COMMIT}"
    assert refusal(commit=OTHER) == f"model.path: 'org/model' {newest}"
    online.gated = True
    terms = "is shown only to those who accept its terms; accept them at"
    place = f"{online.url}/org/model"
    assert refusal() == f"model.path: 'org/model' {terms} {place}, and log in with {login}"
    online.gated, online.broken = False, True
    assert re.search(r"the Hugging Face hub has a fault \(.*503.*\); try again later$", refusal())
    online.broken = False
    online.files["pytorch_model.bin"] = online.files.pop("model.safetensors")
    assert "has no *.safetensors, but pytorch_model.bin; other formats are not read" in refusal()


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    """A run directory that holds its final model only."""
    place = tmp_path / "run"
    place.mkdir()
    (place / "config.yaml").write_text(compose(["experiment=smoke"]).to_yaml())
    lines = ['{"version": 2, "eval_loss": 1.5}', '{"version": 3, "eval_loss": 1.25}']
    (place / "metrics.jsonl").write_text("\n".join(lines))
    (place / "summary.json").write_text('{"outer_steps": 3, "tokens": {"applied": 12345}}')
    shutil.copytree(saved, place / "model")
    return place


def test_an_export_is_uploaded_with_a_card(
    run_dir: Path,
    online: StubHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    go_online(monkeypatch, online.url, tmp_path / "cache", token="hf_secret")
    commands.export.callback(run_dir, tmp_path / "out", "me/smoke", True, False)
    assert online.made["name"] == "smoke" and online.made["visibility"] == "private"
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert online.uploaded == written
    card = online.uploaded["README.md"].decode()
    manifest = compose(["experiment=smoke"]).manifest().hash()
    assert card.startswith("---\nlibrary_name: transformers\n")
    rows = ["run | smoke", f"manifest | {manifest}", "outer step | 3", "tokens | 12.3k"]
    assert all(f"| {row} |" in card for row in rows)
    assert "| held-out loss | 1.2500 nats per token, at outer step 3 |" in card
    assert capsys.readouterr().out.splitlines()[-1] == f"{online.url}/me/smoke"


def test_an_export_appears_with_its_card_or_not_at_all(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(commands, "_model_card", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            commands.export.callback(run_dir, tmp_path / "out", None, False, False)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
    commands.export.callback(run_dir, tmp_path / "out", None, False, False)
    assert (tmp_path / "out" / "README.md").is_file()


def test_nothing_is_uploaded_or_written_when_it_cannot_be(
    run_dir: Path, online: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def refusal(name: str = "me/smoke") -> str:
        return error_text(DataError, commands.export.callback, run_dir, out, name, False, False)

    nobody = refusal()
    assert nobody.startswith("--push-to-hub=me/smoke: nobody is logged in ")
    assert nobody.endswith("; run `hf auth login`")
    assert refusal("a b").startswith("--push-to-hub=a b is no name on the hub (")
    go_online(monkeypatch, online.url, tmp_path / "cache", token="hf_secret")
    assert not out.exists() and not online.asked
    online.broken = True
    assert refusal().startswith("--push-to-hub=me/smoke: the Hugging Face hub refuses it (")
    assert (out / "README.md").is_file() and not online.uploaded  # what was exported is good
