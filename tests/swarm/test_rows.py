"""What a peer sends and takes does not depend on how many processes it has, nor on which one has
which rows."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from diloco.attach.parameters import (
    TrainedParams,
    full_tensor,
    has_row_layout,
    local_tensor,
    restored_after,
    row_range,
    sharded_like,
)
from diloco.attach.ranks import RankGroup, ShardedParams
from diloco.config import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.fragments import CHUNK, partition
from diloco.outer.local import AtOnce, Staging
from diloco.outer.replica import Replica
from tests.support.peers import command
from tests.support.slow import slow

SHAPES = {"even": (8, 3), "uneven": (3, 5), "one": (1, 3)}
SHAPES |= {"cut": (7, 4099), "long": (300, 1000), "vector": (6,)}
SETTINGS = OuterConfig(method="diloco", sync_every=1, fragments=2)


class Model(nn.Module):
    """Parameters whose rows can be shared evenly, unevenly, and so that some processes have none;
    one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.tied = self.get_parameter("cut")


def learned(parameters: dict[str, Tensor]) -> None:
    """As if every value had been trained: each moves by another length."""
    generator = torch.Generator().manual_seed(1)
    for name, shape in SHAPES.items():
        parameter = parameters[name].detach()
        step = sharded_like(1e-3 * torch.randn(shape, generator=generator), parameter)
        local_tensor(parameter).sub_(local_tensor(step))


def outcome(replica: Replica) -> dict[str, Tensor]:
    """What rank 0 sends, and what it would publish alone."""
    found: dict[str, Tensor] = {}
    for fragment in range(2):
        if replica.local.can_copy(replica.fragments[fragment]):
            assert replica.copy_local(fragment)
        found[f"payload {fragment}"] = replica.capture(fragment)
        replica.anchors[fragment].mul_(1.5)
    replica.load_local_([1])
    replica.load_local_([0], mixing=0.25)
    return found


def alone() -> tuple[dict[str, Tensor], Model]:
    model = Model()
    parameters = TrainedParams(model)
    replica = Replica(parameters, partition(parameters.numels, 2), SETTINGS)
    with torch.no_grad():
        learned(parameters)
    return outcome(replica), model


def rank(kind: str, place: Path) -> None:
    """One process of a peer: rank 0 saves what came of it, and every rank what it has.

    `staged` is ddp with parameters that are read and written as if they were on an accelerator.
    """
    ranks = RankGroup.from_environment("cpu", "ddp" if kind == "staged" else kind)
    model: nn.Module = Model()
    ranks.wrap(model) if kind == "fsdp" else None
    parameters = TrainedParams(model)
    fragments = partition(parameters.numels, 2)
    rows = ShardedParams(parameters, fragments, ranks)
    assert rows.is_whole == (kind != "fsdp")
    assert rows.shapes == {name: torch.Size(shape) for name, shape in SHAPES.items()}
    stream = AtOnce()
    at_once = Staging(
        stream,
        stream,
        lambda numel, dtype: torch.empty(numel, dtype=dtype),
        lambda: torch.empty(CHUNK),
    )
    staging = at_once if kind == "staged" else None
    rows._staging = lambda *_: staging  # type: ignore[method-assign]
    made, prepared = list[Replica](), list[bool]()
    prepare = lambda: prepared.append(True)  # noqa: E731

    def make() -> Sequence[float]:
        made.append(Replica(rows, fragments, SETTINGS))
        return (3, 2.0**53, 0.5)

    assert rows.of_rank0(make, prepare)[:3] == [3, 2.0**53, 0.5] or ranks.is_rank0
    with torch.no_grad():
        learned(parameters)
    found = {}

    def exchange() -> Sequence[float]:
        found.update(outcome(made[0]))
        return ()

    rows.of_rank0(exchange, prepare)
    # rank 0 prepares in its own call; the others when rows are wanted of them, or given to them
    assert len(prepared) == (0 if ranks.is_rank0 else 2 if kind == "fsdp" else 1)
    with restored_after(parameters), torch.no_grad():
        for parameter in parameters.values():
            local_tensor(parameter).zero_()
    found |= {name: full_tensor(parameter.detach()) for name, parameter in parameters.items()}
    if ranks.is_rank0:
        torch.save(found, place)
    ranks.close()


@pytest.mark.parametrize(
    ("kind", "size"),
    [slow("ddp", 2), slow("staged", 2), slow("fsdp", 2), ("fsdp", 3), slow("fsdp", 4)],
)
def test_a_peer_of_any_size_sends_and_takes_the_same_bits(
    kind: str, size: int, tmp_path: Path
) -> None:
    launcher = f"-m torch.distributed.run --nproc-per-node={size} --standalone"
    ranks = f"{__file__} {kind} {tmp_path / 'found'}"
    with command(launcher, ranks, directory=tmp_path) as started:
        started.done()
    found = torch.load(tmp_path / "found", weights_only=True)
    expected, model = alone()
    expected |= {name: parameter.detach() for name, parameter in TrainedParams(model).items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_tied_weights_are_one_parameter() -> None:
    assert list(TrainedParams(Model())) == list(SHAPES)


def test_a_layout_that_is_no_range_of_rows_is_refused_by_name(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        layouts = (Shard(1), Replicate(), Shard(0))
        found = (distribute_tensor(torch.zeros(4, 6), mesh, [one]) for one in layouts)
        columns, replicated, rows = found
        assert [has_row_layout(one) for one in (columns, replicated, rows)] == [False, True, True]
        assert row_range(replicated) == row_range(rows) == (0, 24)
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(columns))
        said = r"^w is laid out as .*shard the model with fully_shard"
        with pytest.raises(ConfigError, match=said):
            TrainedParams(model)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    rank(sys.argv[1], Path(sys.argv[2]))
    os._exit(0)  # as ranks of `diloco.train` do: the usual end of a process now and then aborts one
