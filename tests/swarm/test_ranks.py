"""torchrun makes its ranks one peer: the same training as one process, and one member of the
swarm."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.peers import (
    SMOKE,
    command,
    events,
    json_lines,
    summary_of,
    together,
    train_here,
)
from tests.support.places import ROOT

EXACT = "outer.codec_up=fp32 outer.codec_down=fp32 data.shard=0 data.shards=1 train.threads=1"


def torchrun(
    run_dir: Path, *overrides: str, ranks: int = 2, restarts: int = 0, before: str = ""
) -> Any:
    """The ranks of one peer, started; each does what is `before` in Python first."""
    program = "-m diloco.train"
    if before:
        program = str(run_dir.parent / "start.py")
        main = "runpy.run_module('diloco.train', run_name='__main__')"
        Path(program).write_text(f"import os, runpy\n{before}\n{main}\n")
    launcher = f"-m torch.distributed.run --nproc-per-node={ranks} --standalone"
    arguments = (f"--max-restarts={restarts}", program, *SMOKE, f"run.dir={run_dir}", *overrides)
    return command(launcher, *arguments, directory=run_dir.parent)


def weights(run_dir: Path) -> Tensor:
    """The parameters of the final model, in one vector."""
    saved = load_file(run_dir / "model" / "model.safetensors")
    return torch.cat([value.flatten() for _, value in sorted(saved.items())])


def losses(run_dir: Path, kind: str) -> list[float]:
    return [line[kind] for line in json_lines(run_dir / "metrics.jsonl") if kind in line]


def trained_alike(one: Path, other: Path) -> None:
    """The mean of two halves is rounded elsewhere than the mean of the whole: some units in the
    last place of a loss near 5 (5e-7), and of the parameters as far as 12 steps of AdamW carry it.
    A batch that is cut differently moves the losses by 0.01 and more."""
    for kind, count in (("loss", 3), ("eval_loss", 4)):
        assert len(losses(one, kind)) == count
        assert losses(other, kind) == pytest.approx(losses(one, kind), rel=0, abs=5e-6)
    torch.testing.assert_close(weights(other), weights(one), rtol=0, atol=1e-5)


def newest_checkpoint(run_dir: Path) -> str:
    return max(place.name for place in (run_dir / "checkpoints" / "peer").iterdir())


# As `auto` does on another GPU.
OTHER_PRECISION = (
    "import diloco.train.gradients as found\nfirst = os.environ['RANK'] == '0'\n"
    "found.native_precision = lambda _: 'bf16' if first else 'fp16'"
)


@pytest.mark.parametrize(
    ("before", "override", "said"),
    [
        (
            OTHER_PRECISION,
            "",
            "train.precision=fp16 on rank 1, and bf16 on rank 0; start all ranks alike",
        ),
        (
            "",
            "inner.batch_size=3",
            "inner.batch_size=3 cannot be shared evenly by 2 processes; use a multiple of 2",
        ),
    ],
    ids=["unlike", "uneven"],
)
def test_ranks_that_cannot_train_say_why_once(
    before: str, override: str, said: str, tmp_path: Path
) -> None:
    with torchrun(tmp_path / "run", override, before=before) as started:
        assert started.wait() != 0
        assert started.family() == []
    # torchrun adds a traceback of its own, through libraries that may lie in a directory called
    # diloco.
    lines = [line for line in started.stderr.splitlines() if line.startswith("diloco: ")]
    assert len(lines) == 1 and lines[0].startswith(f"diloco: error: {said}")
    assert f"{ROOT / 'diloco'}/" not in started.stderr, "no traceback through the package"
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.slow
def test_all_ranks_halve_the_micro_batch_when_one_runs_out_of_memory(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    no_room = (
        "import torch, diloco.model as models\nwhole = models.loss\n"
        "def loss(model, tokens):\n"
        "    if os.environ['RANK'] == '1' and model.training and len(tokens) > 1:\n"
        "        raise torch.OutOfMemoryError('no room')\n"
        "    return whole(model, tokens)\n"
        "models.loss = loss"
    )
    with torchrun(two, EXACT, "inner.batch_size=4", before=no_room) as started:
        started.done()
    assert [line["sequences"] for line in events(two, "micro_batch")] == [1]
    train_here(one, *SMOKE, EXACT, "inner.batch_size=4")
    assert losses(two, "loss") == pytest.approx(losses(one, "loss"), rel=0, abs=5e-6)


def test_two_ranks_train_like_one_process_of_the_same_batch(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with torchrun(two, EXACT, "train.parallel=fsdp") as started:
        together(lambda: train_here(one, *SMOKE, EXACT), started.done)
        assert started.family() == []
    trained_alike(one, two)
    here, there = summary_of(one), summary_of(two)
    assert there["tokens"] == here["tokens"]
    assert [peer["steps"] for peer in there["peers"]] == [12], "two ranks are one peer"


@pytest.mark.slow
def test_a_chunked_head_and_compiled_recomputed_layers_train_like_plain_ones(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    # a few rows of logits at a time, and no compiler for C++, which takes a minute
    changed = (
        "import functools, diloco.model.cross_entropy as loss, diloco.model.forward as found\n"
        "loss.CPU_CHUNK_BYTES = 4 * 259 * 7\n"
        "plain = found.compile_layers_\n"
        "found.compile_layers_ = functools.partial(plain, backend='aot_eager')"
    )
    tied = f"{EXACT} model.config.tie_word_embeddings=true"
    way = "train.parallel=fsdp train.compile=true train.checkpointing=true"
    with torchrun(two, tied, way, before=changed) as started:
        together(lambda: train_here(one, *SMOKE, tied), started.done)
    [said] = events(two, "computes")
    assert said["compile"] and said["checkpointing"] and said["precision"] == "fp32"
    trained_alike(one, two)
    names = [{*load_file(place / "model" / "model.safetensors")} for place in (one, two)]
    assert names[0] == names[1]


def test_ranks_of_any_kind_join_a_swarm_and_end_with_its_anchor(tmp_path: Path) -> None:
    alone, ddp, fsdp = (tmp_path / name for name in ("alone", "ddp", "fsdp"))
    joining = f"swarm.min_peers=3 swarm.initial_peers=['@{alone / 'address'}'] train.threads=1"
    with torchrun(ddp, joining) as one, torchrun(fsdp, joining, "train.parallel=fsdp") as other:
        first = lambda: train_here(alone, *SMOKE, "swarm.min_peers=3")  # noqa: E731
        together(first, one.done, other.done)
        assert one.family() == other.family() == []
    here = summary_of(alone)
    for place in (ddp, fsdp):
        there = summary_of(place)
        assert here["outer_steps"] == there["outer_steps"] == 3
        assert here["peers"][0]["anchor_digest"] == there["peers"][0]["anchor_digest"]
        assert here["peers"][0]["peer_id"] != there["peers"][0]["peer_id"]
        assert here["eval"]["loss"] == pytest.approx(there["eval"]["loss"], rel=1e-6)
        assert torch.equal(weights(alone), weights(place))
        assert here["tokens"]["applied"] == there["tokens"]["applied"] == 3 * 768


def test_ctrl_c_at_torchrun_ends_both_ranks_after_the_same_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with torchrun(run_dir, "budget.outer_steps=100000 train.step_delay_s=0.02") as started:
        started.reaches(2, run_dir)
        started.process.send_signal(signal.SIGINT)
        assert started.wait() != 0, "torchrun itself calls it a failure"
        assert started.family() == []
    summary = summary_of(run_dir)
    assert summary["exit"] == 0 and summary["outer_steps"] >= 2
    assert newest_checkpoint(run_dir) == f"step-{summary['outer_steps']:08d}"
    for said in ("diloco: leaving the swarm", "diloco: open run, on this machine only"):
        assert started.stderr.count(said) == 1, "two ranks are one peer"
    assert "diloco: error" not in started.stderr and "RuntimeError" not in started.stderr


@pytest.mark.slow
def test_a_peer_that_loses_a_rank_comes_back_as_the_same_peer_and_goes_on(tmp_path: Path) -> None:
    place, run_dir, budget = tmp_path / "host", tmp_path / "run", "budget.outer_steps=6"
    host = ("-m diloco host --new", *SMOKE, f"run.dir={place}", budget)
    joining = f"swarm.initial_peers=['@{place / 'address'}'] train.threads=1"
    with command(*host, directory=tmp_path) as keeper:
        slow = "train.step_delay_s=0.05"
        with torchrun(run_dir, budget, joining, slow, restarts=1) as started:
            started.reaches(2, run_dir)
            [lost] = started.family("RANK=1")
            os.kill(lost, signal.SIGKILL)
            started.done()
            assert started.family() == []
        keeper.interrupt()
    [said] = [line for line in started.stderr.splitlines() if line.startswith("diloco: error")]
    assert said.startswith("diloco: error: one of 2 ranks ended (torchrun says which); ")
    assert "RuntimeError" not in started.stderr
    [resumed] = events(run_dir, "resume")
    assert resumed["version"] >= 1
    summary = summary_of(run_dir)
    assert summary["outer_steps"] == 6 and summary["tokens"]["applied"] == 6 * 256
    [contributor] = (run_dir / "contributions.csv").read_text().splitlines()[1:]
    assert summary["peers"][0]["peer_id"] in contributor


def test_a_machine_that_will_be_taken_away_is_left_with_a_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    endless = "budget.outer_steps=100000 train.step_delay_s=0.02"
    train = ("-m diloco.train", *SMOKE, endless, f"run.dir={run_dir}")
    with command(*train, directory=tmp_path) as started:
        started.reaches(1, run_dir)
        # of a scheduler, and of torchrun
        for notice in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            started.process.send_signal(notice)
        started.done()
    assert newest_checkpoint(run_dir) == f"step-{summary_of(run_dir)['outer_steps']:08d}"
    assert started.stderr.count("diloco: leaving the swarm") == 1


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    constant = "inner.schedule=constant inner.warmup_steps=0 outer.rounds=4"
    settings = f"{EXACT} inner.batch_size=4 {constant}"
    train_here(whole, *SMOKE, settings, "budget.outer_steps=4")
    for step, (ranks, parallel) in enumerate([(2, "fsdp"), (4, "fsdp"), (1, "ddp"), (2, "ddp")], 1):
        steps = f"{settings} budget.outer_steps={step} train.parallel={parallel}"
        if ranks == 1:
            train_here(run_dir, *SMOKE, steps)
            continue
        with torchrun(run_dir, steps, ranks=ranks) as started:
            started.done()
    assert summary_of(run_dir)["outer_steps"] == 4
    # Another count of ranks rounds elsewhere; moments, data or a clock that were lost would move
    # the losses by 0.01.
    ends = [losses(place, "eval_loss")[-1] for place in (run_dir, whole)]
    assert ends[0] == pytest.approx(ends[1], rel=0, abs=1e-5)
    torch.testing.assert_close(weights(run_dir), weights(whole), rtol=0, atol=1e-4)
