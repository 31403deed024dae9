"""The table of what training takes of memory: by hand, and how it depends on the settings."""

from dataclasses import replace

import pytest
import torch

from diloco import model as models
from diloco.attach.ranks import RankGroup
from diloco.config import Config, compose
from diloco.errors import ConfigError
from diloco.train.machine import GIB, Machine, Row, fit_to_memory, memory_need, memory_rows
from diloco.train.optimizer import inner_optimizer, moment_numel

PLAIN = ["outer.robust=none", "outer.codec_up=fp32", "outer.codec_down=fp32"]
PLAIN += ["inner=adamw", "outer.fragments=4"]
ROOMY = Machine(torch.device("cuda"), "GPU", 2, 80 * GIB, 80 * GIB, "fp32")


def table(
    config: Config, peers: int = 4, ranks: int = 1, sharded: bool = False
) -> dict[str, float]:
    rows = [row for row in memory_rows(config, peers, ranks, sharded) if row.where != "spare"]
    return {row.what: row.per_parameter for row in rows if row.per_parameter is not None}


def test_the_bytes_of_peers_with_a_fragment_each() -> None:
    held = "master and momentum as author"
    by_peers = {peers: table(compose(PLAIN), peers) for peers in (1, 2, 3, 4, 100)}
    assert by_peers[4] == {
        "weights": 4,
        "gradients": 4,
        "inner optimizer": 8,
        "anchors": 4,
        held: 2,
        "payloads that are sent": 4,
        "contributions, encoded": 4,
        "newest updates": 4,
        "momentum as the next author": 1,
    }
    assert [rows[held] for rows in by_peers.values()] == [8, 4, 4, 2, 2]
    assert "momentum as the next author" not in by_peers[1], "nobody else is there"
    parallel = table(compose(["outer=data_parallel"]))
    assert parallel.keys() == {"weights", "gradients", "inner optimizer"}


def test_what_a_setting_adds() -> None:
    plain, late = table(compose(PLAIN)), "payloads that are sent"
    for overrides, what, more in (
        ("outer.codec_up=int8", "contributions, encoded", (1 + 1 / 4096) - 4.0),
        ("outer.quorum=1", "anchors of the round under way", 4.0),
        ("outer.staggered=true", late, -3.0),
        ("outer.optimizer=delayed_nesterov outer.delay=4", "master and momentum as author", 1.0),
        ("outer.flatten=0.5", "flattening", 1.0),
        ("train.precision=bf16", "weights in bf16", 2.0),
    ):
        changed = table(compose([*PLAIN, *overrides.split()]))
        assert changed[what] - plain.get(what, 0.0) == pytest.approx(more), overrides


def test_fsdp_divides_what_is_trained_and_gathers_one_layer() -> None:
    config = compose(["model=60m", *PLAIN])
    one, four = table(config), table(config, ranks=4, sharded=True)
    for what in ("weights", "gradients", "inner optimizer"):
        assert four[what] == one[what] / 4
    assert 0 < four["layers that are gathered"] < 8
    assert table(config, ranks=4) == one, "each process of ddp has all of it"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizers_state_has_the_predicted_size(name: str) -> None:
    config = compose(["experiment=smoke", f"inner={name}"])
    model = models.build(config.model, 0)
    optimizer = inner_optimizer(model, config.inner)
    models.loss(model, torch.zeros(1, 8, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    parts = getattr(optimizer, "parts", [optimizer])
    values = [value for part in parts for state in part.state.values() for value in state.values()]
    kept = sum(value.numel() for value in values if value.ndim)
    assert kept == moment_numel(model, config.inner)


def test_the_need_is_the_sum_of_the_table() -> None:
    config = compose([*PLAIN, "train.precision=fp32"])
    rows: list[Row] = memory_rows(config, 4, accelerator=True)
    need = memory_need(config, ROOMY, 4)
    for where in ("device", "main", "spare"):
        told = sum(row.nbytes for row in rows if row.where == where)
        assert getattr(need, f"{where}_bytes") == told
    [copy] = [row for row in rows if row.where == "spare"]
    assert copy.per_parameter == 4 + 2 + 8, "anchors, a fragment held, AdamW"
    waiting = memory_need(compose([*PLAIN, "checkpoint.background=false"]), ROOMY, 4)
    assert waiting == replace(need, spare_bytes=0.0)


def test_a_micro_batch_is_found_unless_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(free: float) -> Machine:
        found = Machine(torch.device("cpu"), "CPU", 2, free, free, "fp32")
        monkeypatch.setattr("diloco.train.machine.machine_at", lambda *_: found)
        return found

    config, ranks = compose([*PLAIN, "swarm.min_peers=4"]), RankGroup(torch.device("cpu"))
    need = memory_need(config, machine(GIB), 4)
    room = need.device_bytes + need.main_bytes
    machine(room + 3.5 * need.sequence_bytes)
    assert fit_to_memory(config, ranks).train.micro_batch == 3
    assert not fit_to_memory(config, ranks).checkpoint.background, "there is no room for a copy"
    chosen = compose([*PLAIN, "swarm.min_peers=4", "train.micro_batch=2"])
    assert fit_to_memory(chosen, ranks).train == chosen.train
    machine(1e12)
    assert fit_to_memory(config, ranks) == config
    machine(room)
    with pytest.raises(ConfigError, match="this machine is too small for the run"):
        fit_to_memory(config, ranks)
