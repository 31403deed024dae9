"""The table of what training takes of memory: by hand, and how it depends on the settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diloco import model as models
from diloco.config import Config, compose
from diloco.errors import ConfigError
from diloco.fit.volunteer import with_settings
from diloco.model.cross_entropy import CHUNK_BYTES
from diloco.train.inner import inner_optimizer, moment_numel
from diloco.train.island import Island
from diloco.train.machine import GIB, Machine
from diloco.train.memory import Row, Split, fit_micro_batch, fitted, memory_need, memory_rows, sequence_bytes

PLAIN = ["outer.robust=none", "outer.codec_up=fp32", "outer.codec_down=fp32", "inner=adamw", "outer.fragments=4"]
ROOMY = Machine(torch.device("cuda"), "GPU", 2, 2, 80 * GIB, 80 * GIB, "fp32")


def table(config: Config, peers: int = 4, split: Split | None = None) -> dict[str, float]:
    rows = memory_rows(config, peers, split or Split())
    return {row.what: row.per_parameter for row in rows if row.per_parameter is not None and row.where != "spare"}


def total(rows: dict[str, float]) -> float:
    return sum(rows.values())


def test_the_bytes_of_four_peers_with_a_fragment_each() -> None:
    assert table(compose(PLAIN)) == {
        "weights": 4, "gradients": 4, "inner optimizer": 8, "anchors": 4, "master and momentum of fragments held": 2,
        "contributions to them": 1, "updates of them": 1, "momentum of fragments backed up": 1,
    }  # fmt: skip


def test_a_peer_alone_holds_everything_and_many_peers_hold_one_fragment() -> None:
    held = "master and momentum of fragments held"
    by_peers = {peers: table(compose(PLAIN), peers) for peers in (1, 2, 3, 4, 100)}
    assert {peers: rows[held] for peers, rows in by_peers.items()} == {1: 8, 2: 4, 3: 4, 4: 2, 100: 2}
    assert "momentum of fragments backed up" not in by_peers[1], "nobody else holds anything"


@pytest.mark.parametrize(
    ("overrides", "what", "more"),
    [
        (["outer.robust=clip", "outer.audit=0"], "contributions to them", 3.0),
        (["outer.robust=clip"], "contributions kept for audits", 8.0),
        (["outer.quorum=1"], "anchors of the round under way", 4.0),
        (["outer.overlap=5"], "payloads that are sent while training goes on", 4.0),
        (["outer.overlap=5", "outer.staggered=true"], "payloads that are sent while training goes on", 1.0),
        (["outer.optimizer=fedbuff", "outer.delay=4"], "master and momentum of fragments held", 1.0),
        (["outer.flatten=0.5"], "flattening", 1.0),
        (["train.precision=bf16"], "weights in bf16", 2.0),
    ],
)
def test_what_a_setting_adds(overrides: list[str], what: str, more: float) -> None:
    changed = table(compose([*PLAIN, *overrides]))
    assert changed[what] - table(compose(PLAIN)).get(what, 0.0) == pytest.approx(more)


def test_fsdp_divides_what_is_trained_and_gathers_one_layer() -> None:
    config = compose(["model=60m", *PLAIN])
    one, four = table(config), table(config, split=Split(4, sharded=True))
    for what in ("weights", "gradients", "inner optimizer"):
        assert four[what] == one[what] / 4
    assert 0 < four["layers that are gathered"] < 8
    assert table(config, split=Split(4)) == one, "each process of ddp has all of it"


def on_accelerator(*overrides: str, split: Split | None = None) -> dict[str, Row]:
    return {row.what: row for row in memory_rows(compose([*PLAIN, *overrides]), 4, split or Split(), accelerator=True)}


def test_an_accelerator_that_trains_on_has_a_copy_of_one_fragment() -> None:
    copy, buffers = "a copy of the fragment that is sent", "staging buffers, pinned"
    for overlap in (["outer.overlap=5"], ["outer.overlap=5", "outer.staggered=true"]):
        rows = on_accelerator(*overlap)
        assert (rows[copy].where, rows[copy].per_parameter) == ("device", 4 / 4)
        assert (rows[buffers].where, rows[buffers].nbytes) == ("main", 4 * 2**20)
    late = "outer.overlap=${outer.sync_every}"
    assert copy not in on_accelerator() | on_accelerator(late), "training waits"
    assert copy not in on_accelerator("outer.overlap=5", split=Split(2, sharded=True)), "ranks hand their rows over"
    on_cpu = {row.what for row in memory_rows(compose([*PLAIN, "outer.overlap=5"]), 4, accelerator=False)}
    assert not {copy, buffers} & on_cpu


def test_data_parallel_takes_nothing_of_main_memory_for_each_parameter() -> None:
    assert set(table(compose(["outer=data_parallel"]))) == {"weights", "gradients", "inner optimizer"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizers_state_has_the_predicted_size(name: str) -> None:
    config = compose(["experiment=smoke", f"inner={name}"])
    model = models.build(config.model, 0)
    optimizer = inner_optimizer(model, config.inner)
    models.loss(model, torch.zeros(1, 8, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    parts = getattr(optimizer, "parts", [optimizer])
    kept = [value for part in parts for state in part.state.values() for value in state.values() if value.ndim]
    assert sum(value.numel() for value in kept) == moment_numel(model, config.inner)


def test_the_need_is_the_sum_of_the_table() -> None:
    config = compose([*PLAIN, "train.precision=fp32"])
    rows: list[Row] = memory_rows(config, 4, accelerator=True)
    need = memory_need(config, ROOMY, 4)
    assert need.device_bytes == sum(row.nbytes for row in rows if row.where == "device")
    assert need.main_bytes == sum(row.nbytes for row in rows if row.where == "main")
    [copy] = [row for row in rows if row.where == "spare"]
    assert need.spare_bytes == copy.nbytes and copy.per_parameter == 4 + 2 + 8, "anchors, a fragment held, AdamW"
    waiting = memory_need(compose([*PLAIN, "checkpoint.background=false"]), ROOMY, 4)
    assert waiting == replace(need, spare_bytes=0.0)


def test_a_large_vocabulary_takes_a_chunk_of_logits_and_a_small_one_none() -> None:
    config = ["model=60m", "data.sequence_length=1024", "inner.batch_size=64"]
    [chunk] = [row for row in memory_rows(compose(config), 4) if row.what == "logits of a chunk"]
    assert (chunk.where, chunk.nbytes) == ("device", 2.5 * CHUNK_BYTES)
    assert not any(row.what == "logits of a chunk" for row in memory_rows(compose(PLAIN), 4))


def test_layers_that_are_recomputed_keep_their_inputs_only() -> None:
    config = compose(["model=60m", "data.sequence_length=512"])
    kept, recomputed = sequence_bytes(config), sequence_bytes(with_settings(config, {"train.checkpointing": True}))
    shape = config.model.config
    inputs = 1.5 * 4 * 512 * int(shape["hidden_size"]) * int(shape["num_hidden_layers"])
    assert inputs < recomputed < kept / 2, "one of three layers exists whole at a time"


def test_what_would_fit_is_said() -> None:
    config = compose(["model=1b"])
    small = Machine(torch.device("cuda"), "GPU", 2, 2, 8 * GIB, 80 * GIB, "fp32")
    with pytest.raises(ConfigError, match=r"GiB too little; .* or join a run of at most some [\de+.]+M parameters$"):
        fit_micro_batch(memory_need(config, small), small, 8)


def test_a_micro_batch_is_found_before_training_unless_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["model=60m", *PLAIN, "swarm.min_peers=4"])
    need = memory_need(config, Machine(torch.device("cpu"), "CPU", 2, 2, GIB, GIB, "fp32"), 4)
    free = need.device_bytes + need.main_bytes + 3.5 * need.sequence_bytes
    machine = Machine(torch.device("cpu"), "CPU", 2, 2, free, free, "fp32")
    monkeypatch.setattr("diloco.train.memory.machine_at", lambda *_: machine)
    island = Island(torch.device("cpu"))
    assert fitted(config, island).train.micro_batch == 3
    assert not fitted(config, island).checkpoint.background, "there is no room for a copy"
    roomy = replace(machine, device_bytes=1e12, main_bytes=1e12)
    monkeypatch.setattr("diloco.train.memory.machine_at", lambda *_: roomy)
    assert fitted(config, island) == config
    monkeypatch.setattr("diloco.train.memory.machine_at", lambda *_: machine)
    chosen = compose(["model=60m", *PLAIN, "swarm.min_peers=4", "train.micro_batch=2"])
    assert fitted(chosen, island).train == chosen.train
    smaller = Machine(torch.device("cpu"), "CPU", 2, 2, GIB, GIB, "fp32")
    monkeypatch.setattr("diloco.train.memory.machine_at", lambda *_: smaller)
    with pytest.raises(ConfigError, match="this machine is too small for the run"):
        fitted(config, island)
