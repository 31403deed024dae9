"""The base of an adapter, which a joiner that has only an address gets from peers in parts."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco import model as models
from diloco.config import Config, compose
from diloco.errors import ConfigError, SwarmError, TermsError
from diloco.rundir import base_files
from diloco.swarm.rpc import watch
from diloco.swarm.wire.streams import Traffic
from diloco.train import start_files
from tests.support.errors import error_text
from tests.support.models import small_model
from tests.support.stub_hub import COMMIT, go_online, stub_hub
from tests.support.stub_wire import Transport

pytestmark = pytest.mark.usefixtures("own_home")
PART_BYTES = 2**14


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A peer that has started a run from a directory, in parts that are small."""
    monkeypatch.setattr(base_files, "PART_BYTES", PART_BYTES)
    models.save(small_model(max_position_embeddings=256), tmp_path / "model")
    return begun(tmp_path / "model", tmp_path / "starter")


def begun(path: Path | str, run_dir: Path) -> Config:
    names = [f"model.path={path}", "data.tokenizer=bytes", f"run.dir={run_dir}"]
    config = start_files.resolved(compose(["model=pretrained", "adapter=lora", *names]))
    start_files.keep(config, models.build(config.model, 0))
    return config


class Swarm:
    """Peers by name, and the digests that each was asked for; `breaks` tells which calls fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **peers: Config) -> None:
        self.asked: dict[str, list[str]] = {name: [] for name in peers}
        self.breaks: Callable[[int], bool] = lambda call: False
        self._calls = 0
        self.seeds, self._servers = (*peers,), {}
        for name, config in peers.items():
            gate = SimpleNamespace(memory=SimpleNamespace(seal=""))
            context: Any = SimpleNamespace(gate=gate, traffic=Traffic(), now=lambda: 0.0)
            context.files = base_files.served(config)
            self._servers[name] = watch.InfoServer(context)

        async def visit(*where: Any) -> Swarm:
            return self

        monkeypatch.setattr("diloco.swarm.wire.libp2p.Libp2p.client", visit)

    async def open(self, peer: str, protocol: str) -> Any:
        async def answer(stream: Any, request: watch.InfoRequest) -> None:
            self.asked[peer].append(request.what)
            await self._servers[peer].answer(stream, request)

        self._calls += 1
        if self.breaks(self._calls):
            raise ConnectionError("it broke")
        return await Transport(answer).open(peer, protocol)

    async def aclose(self) -> None: ...


def joiner(starter: Config, run_dir: Path) -> Config:
    return compose([f"run.dir={run_dir}"]).adopt(starter.manifest())


def parts_of(config: Config) -> list[str]:
    index = base_files.saved_index(config)
    assert index is not None
    return [digest for digest, _ in base_files.parts_of(index, Path())]


def test_parts_come_from_several_peers_and_a_wrong_one_from_another(
    starter: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Path(str(starter.model.directory))
    false = Path(shutil.copytree(there, tmp_path / "false"))
    (false / "model.safetensors").write_bytes(bytes((there / "model.safetensors").stat().st_size))
    placed = starter.model.model_copy(update={"directory": str(false)})
    liar = starter.model_copy(update={"model": placed})
    swarm = Swarm(monkeypatch, liar=liar, donor=starter, other=starter)
    seen = list[tuple[int, int]]()
    told = lambda done, total: seen.append((done, total))  # noqa: E731
    config = start_files.fetch_start_files(
        joiner(starter, tmp_path / "joiner"), ["@x"], on_progress=told
    )
    here = Path(str(config.model.directory))
    assert here == tmp_path / "joiner" / "origin" / "base"
    for file in there.iterdir():
        assert (here / file.name).read_bytes() == file.read_bytes()
    start_files.keep(config, models.build(config.model, 0))
    wrong, donors = {*parts_of(config)[2:]}, [swarm.asked["donor"], swarm.asked["other"]]
    assert wrong & {*swarm.asked["liar"]} and wrong <= {*donors[0], *donors[1]}
    assert donors[0][0] != donors[1][0], "each begins with another part"
    assert base_files.served(config).keys() == base_files.served(starter).keys()
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 2**16
    moved = (tmp_path / "joiner").rename(tmp_path / "moved")
    assert start_files.with_origin(config, moved).model.directory == f"{moved}/origin/base"


def test_a_fetch_that_broke_goes_on(
    starter: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, swarm = joiner(starter, tmp_path / "joiner"), Swarm(monkeypatch, donor=starter)
    swarm.breaks = lambda call: call > 4  # after the index and three parts
    with pytest.raises(SwarmError, match=r"^no peer there gives .*\(it broke\); try another addr"):
        start_files.fetch_start_files(mine, ["@x"])
    first = swarm.asked["donor"][1:]
    swarm = Swarm(monkeypatch, donor=starter)
    swarm.breaks = lambda call: call % 3 > 0  # twice in a row
    start_files.fetch_start_files(mine, ["@x"])
    assert len(first) == 3 and sorted(first + swarm.asked["donor"]) == sorted(parts_of(starter))


def test_the_size_of_a_base_is_known_before_anything_of_an_earlier_run_goes(
    starter: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = joiner(starter, tmp_path / "joiner"), Swarm(monkeypatch, donor=starter)
    base_files.index_place(mine).parent.mkdir(parents=True)
    base_files.index_place(mine).write_text("of an earlier run")
    place = Path(str(starter.model.directory))
    nbytes = sum((place / name).stat().st_size for name in base_files.saved_index(starter) or ())
    assert start_files.base_bytes(mine, ["@x"], Any, tmp_path) == nbytes > 0
    assert base_files.index_place(mine).read_text() == "of an earlier run"


SHA = "ab" * 32


@pytest.mark.parametrize(
    "index",
    [
        {"../model.safetensors": [9, [SHA]]},
        {"/tmp/model.safetensors": [9, [SHA]]},
        {"run.py": [9, [SHA]]},
        {"model.safetensors": [0, []]},
        {"model.safetensors": [PART_BYTES + 1, [SHA]]},
        {"model.safetensors": [2**60, [SHA]]},
        {"model.safetensors": [9, ["../x"]]},
        {"config.json": [PART_BYTES + 1, [SHA, SHA]]},
        ["model.safetensors"],
    ],
    ids=str,
)
def test_an_index_that_lists_anything_else_is_refused(
    index: Any, starter: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.dumps(index).encode()
    changed = {"base": sha256(content).hexdigest(), "directory": None}
    model = starter.model.model_copy(update=changed)
    mine = joiner(starter.model_copy(update={"model": model}), tmp_path / "joiner")
    base_files.index_place(mine).parent.mkdir(parents=True)
    base_files.index_place(mine).write_bytes(content)
    Swarm(monkeypatch, donor=starter)
    text = error_text(SwarmError, start_files.fetch_start_files, mine, ["@x"])
    assert text.startswith("model.base of the run lists no files of a model (")
    assert [*base_files.index_place(mine).parent.iterdir()] == [base_files.index_place(mine)]


def test_a_base_for_which_there_is_no_room_is_not_begun(
    starter: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Swarm(monkeypatch, donor=starter)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=7))
    mine = joiner(starter, tmp_path / "joiner")
    said = rf"^run\.dir={tmp_path}/joiner has room for 7 bytes, and the base needs \d+; free some"
    with pytest.raises(ConfigError, match=said):
        start_files.fetch_start_files(mine, ["@x"])
    assert not (tmp_path / "joiner" / "origin" / "base").exists()


def test_a_config_of_another_model_is_refused(starter: Config) -> None:
    place = Path(str(starter.model.directory)) / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"model\.directory=.* holds another model"):
        models.build(starter.model, 0)


def test_a_base_of_the_hub_comes_from_peers_only_if_the_hub_is_silent(
    starter: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub_hub(Path(str(starter.model.directory))) as hub:
        go_online(monkeypatch, hub.url, tmp_path / "cache")
        first = begun(f"org/model@{COMMIT}", tmp_path / "first")
        swarm, mine = Swarm(monkeypatch, donor=first), joiner(first, tmp_path / "joiner")
        assert start_files.fetch_start_files(mine, ["@x"]).model.directory == first.model.directory
        assert swarm.asked == {"donor": []}
        go_online(monkeypatch, hub.url, tmp_path / "no cache")
        hub.gated = True
        with pytest.raises(TermsError, match="accept them at"):
            start_files.fetch_start_files(mine, ["@x"])
        hub.gated, hub.broken = False, True
        config = start_files.fetch_start_files(mine, ["@x"])
    assert config.model.directory == str(tmp_path / "joiner" / "origin" / "base")
    start_files.keep(config, models.build(config.model, 0))
