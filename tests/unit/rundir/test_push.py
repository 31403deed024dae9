"""Models go to a directory or a store once per version, as a whole, and training never waits for
it."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from diloco.config import compose
from diloco.errors import ConfigError
from diloco.rundir.push import COMPLETE, Pusher
from diloco.train.run import run
from tests.support.errors import error_text

MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "deep/er.txt": b"x"}


class Writes:
    """Writes a model, and counts how often; `hold` waits in the middle."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __call__(self, version: int, place: Path) -> None:
        self.versions.append(version)
        self.begun.set()
        assert self.go_on.wait(30)
        for name, content in MODEL.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)


@pytest.fixture(params=["{}/here", "file://{}/there", "memory://{}/models"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield request.param.format(tmp_path)


def content(url: str) -> dict[str, bytes]:
    """Every file that is there, by its name below the URL."""
    files, root = fsspec.url_to_fs(url)
    return {one.removeprefix(f"{root}/"): files.cat_file(one) for one in sorted(files.find(root))}


def pushed(pusher: Pusher, *versions: int, final: bool = False) -> None:
    for version in versions:
        pusher.begin(version, version, final)
        pusher.wait(30)


def test_what_is_there_is_the_model_and_the_mark_comes_last(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher = Pusher(url, str, Writes())
    assert content(url) == {}, "the probe is gone"
    order: list[str] = []
    pipe = pusher._files.pipe_file

    def seen(path: str, data: bytes) -> None:
        if path.endswith(COMPLETE):
            order.extend(content(url))
        pipe(path, data)

    monkeypatch.setattr(pusher._files, "pipe_file", seen)
    pushed(pusher, 12)
    names = {f"step-00000012/{name}" for name in MODEL}
    assert set(order) == names | {"step-00000012/claim"}
    there = content(url)
    assert there.keys() == names | {"step-00000012/claim", f"step-00000012/{COMPLETE}"}
    assert all(there[f"step-00000012/{name}"] == value for name, value in MODEL.items())


def test_of_several_peers_one_pushes_a_version(url: str) -> None:
    writes = Writes()
    first, second, third = (Pusher(url, str, writes, retry_s=[0.0]) for _ in range(3))
    writes.go_on.clear()
    first.begin(1, 1)
    assert writes.begun.wait(30)
    pushed(second, 1)
    assert writes.versions == [1], "the first is at it"
    writes.go_on.set()
    first.wait(30)
    pushed(third, 1, final=True)
    pushed(second, 1, 2)
    assert writes.versions == [1, 2]
    files, root = fsspec.url_to_fs(url)
    files.rm_file(f"{root}/step-00000002/{COMPLETE}")  # its peer died
    pushed(third, 2)
    assert writes.versions == [1, 2]
    pushed(third, 2, final=True)
    assert writes.versions == [1, 2, 2] and f"step-00000002/{COMPLETE}" in content(url)


def test_a_number_that_another_training_had_is_pushed_anew(url: str) -> None:
    writes = Writes()
    pushed(Pusher(url, str, writes), 1)
    before = content(url)
    pusher = Pusher(url, str, writes)
    pusher.begin(1, 7)
    pusher.wait(30)
    assert writes.versions == [1, 7] and content(url) != before
    assert content(url).keys() == before.keys()
    files, root = fsspec.url_to_fs(url)
    files.rm_file(f"{root}/step-00000001/{COMPLETE}")
    pushed(pusher, 1)
    assert writes.versions == [1, 7, 1], "a claim to other values is none"


def test_training_waits_for_nothing_and_of_what_waits_the_newest_is_pushed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writes = Writes()
    pusher = Pusher(str(tmp_path), str, writes)
    writes.go_on.clear()
    for version in range(1, 6):
        pusher.begin(version, version)
        assert writes.begun.wait(30)
    pusher.wait(0.0)
    assert "is not at" in caplog.text
    writes.go_on.set()
    pusher.wait(30)
    assert writes.versions == [1, 5]


def test_a_store_that_fails_is_tried_again_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pusher = Pusher(str(tmp_path / "models"), str, Writes(), retry_s=[0.0, 0.0])
    put, fails, tries = pusher._files.put_file, True, 0

    def put_file(here: str, there: str) -> None:
        nonlocal tries
        tries += 1
        if fails:
            raise PermissionError("no")
        put(here, there)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(pusher._files, "put_file", put_file)
        pushed(pusher, 1, 2)
        assert tries == 2 * 3
        fails = False
        pushed(pusher, 3, 4)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(";")[0].replace(str(tmp_path), "") for line in said] == [
        "checkpoint.push: outer step 1 is not at /models (no)",
        "checkpoint.push: /models takes models again, from outer step 3 on",
    ]


PLACES = {"s3://bucket/models": "Install s3fs", "/dev/null/models": "Not a directory"}


@pytest.mark.parametrize(("url", "said"), [*PLACES.items(), ("nowhere://x", "Protocol not known")])
def test_a_place_that_cannot_be_written_is_one_line_before_training(url: str, said: str) -> None:
    text = error_text(ConfigError, Pusher, url, str, Writes())
    assert text.startswith(f"checkpoint.push={url} cannot be written (") and said in text


@pytest.mark.parametrize(
    "url", ["s3://key:geheim@bucket/x", "sftp://me:geheim@host/x", "az://box/x?sig=geheim"]
)
def test_a_password_is_refused_and_not_shown(url: str) -> None:
    text = error_text(ConfigError, compose, [f"checkpoint.push={url}"])
    assert text.startswith("checkpoint.push has a password") and "geheim" not in text
    fine = "hf://owner/name@main/x"
    assert compose([f"checkpoint.push={fine}"]).checkpoint.push == fine


def test_a_run_pushes_what_it_saves_and_ends_where_others_end(tmp_path: Path) -> None:
    settings = ["experiment=smoke", "outer=data_parallel"]
    settings += ["outer.sync_every=2", "budget.outer_steps=2"]

    def ended(name: str, *more: str) -> str | None:
        config = compose([*settings, f"run.dir={tmp_path / name}", *more])
        return run(config, lambda report: None).peers[0].anchor_digest

    url = f"memory://{tmp_path}/pushed"
    assert ended("plain") == ended("pushing", f"checkpoint.push={url}")
    there, model = content(url), tmp_path / "pushing" / "model"
    assert f"step-00000001/{COMPLETE}" in there or f"step-00000002/{COMPLETE}" in there
    names = {one.name for one in model.iterdir()}
    assert {name.partition("/")[2] for name in there} == names | {"claim", COMPLETE}
    for name in names:
        assert there[f"step-00000002/{name}"] == (model / name).read_bytes(), name
