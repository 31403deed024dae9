"""torchrun makes its ranks one peer: the same training as one process, and one member of the
swarm."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from diloco.config import compose
from diloco.train.run import run
from tests.support.peers import SMOKE, command, eventually, json_lines, summary_of, together
from tests.support.places import ROOT

EXACT = (
    "outer.codec_up=fp32",
    "outer.codec_down=fp32",
    "data.shard=0",
    "data.shards=1",
    "train.threads=1",
)


def torchrun(
    run_dir: Path, *overrides: str, ranks: int = 2, restarts: int = 0, before: str = ""
) -> Any:
    """The ranks of one peer, started; each does what is `before` in Python first."""
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone")
    program: tuple[str, ...] = ("-m", "diloco.train")
    script = run_dir.parent / "start.py"
    if before:
        script.write_text(
            f"import os, runpy\n{before}\nrunpy.run_module('diloco.train', run_name='__main__')\n"
        )
        program = (str(script),)
    arguments = (f"--max-restarts={restarts}", *program, *SMOKE, f"run.dir={run_dir}")
    return command(*launcher, *arguments, *overrides, directory=run_dir.parent)


def train(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """The same in this process, alone."""
    run(compose([*SMOKE, f"run.dir={run_dir}", *overrides]), lambda message: None)
    return summary_of(run_dir)


def weights(run_dir: Path) -> Tensor:
    """The parameters of the final model, in one vector."""
    saved = load_file(run_dir / "model" / "model.safetensors")
    return torch.cat([value.flatten() for _, value in sorted(saved.items())])


def losses(run_dir: Path, kind: str) -> list[float]:
    return [line[kind] for line in json_lines(run_dir / "metrics.jsonl") if kind in line]


def test_ranks_that_were_started_with_other_settings_are_refused(tmp_path: Path) -> None:
    # As `auto` does on another GPU.
    differs = (
        "import diloco.train.gradients as found\nfirst = os.environ['RANK'] == '0'\n"
        "found.native_precision = lambda _: 'bf16' if first else 'fp16'"
    )
    said = "train.precision=fp16 on rank 1, and bf16 on rank 0"
    with torchrun(tmp_path / "run", before=differs) as started:
        assert started.wait() != 0
        assert started.family() == []
    lines = [line for line in started.stderr.splitlines() if line.startswith("diloco: ")]
    assert lines == [f"diloco: error: {said}; start all ranks alike"]


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
    settings = (*EXACT, "inner.batch_size=4")
    with torchrun(two, *settings, before=no_room) as started:
        started.done()
    halved = [
        line["sequences"]
        for line in json_lines(two / "events.jsonl")
        if line["kind"] == "micro_batch"
    ]
    assert halved == [1]
    train(one, *settings)
    assert losses(two, "loss") == pytest.approx(losses(one, "loss"), rel=0, abs=5e-6)


def test_two_ranks_train_like_one_process_of_the_same_batch(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with torchrun(two, *EXACT, "train.parallel=fsdp") as started:
        together(lambda: train(one, *EXACT), started.done)
        assert started.family() == []
    # The mean of two halves is rounded elsewhere than the mean of the whole: some units in the last
    # place of a loss near 5 (5e-7), and of the parameters as far as 12 steps of AdamW carry it. A
    # batch that is cut differently moves the losses by 0.01 and more.
    for kind in ("loss", "eval_loss"):
        assert len(losses(one, kind)) == (3 if kind == "loss" else 4)
        assert losses(two, kind) == pytest.approx(losses(one, kind), rel=0, abs=5e-6)
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-5)
    here, there = summary_of(one), summary_of(two)
    assert there["tokens"] == here["tokens"]
    assert [peer["steps"] for peer in there["peers"]] == [12], "two ranks are one peer"


@pytest.mark.slow
def test_a_chunked_head_and_compiled_recomputed_layers_train_like_plain_ones(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    changed = (  # a few rows of logits at a time, and no compiler for C++, which takes a minute
        "import functools, diloco.model.cross_entropy as loss, diloco.train.gradients as"
        " precision\nloss.CPU_CHUNK_BYTES = 4 * 259 * 7\nprecision.compile_layers_ ="
        " functools.partial(precision.compile_layers_, backend='aot_eager')"
    )
    tied = "model.config.tie_word_embeddings=true"
    settings = (
        *EXACT,
        tied,
        "train.parallel=fsdp",
        "train.compile=true",
        "train.checkpointing=true",
    )
    with torchrun(two, *settings, before=changed) as started:
        together(lambda: train(one, *EXACT, tied), started.done)
    [said] = [line for line in json_lines(two / "events.jsonl") if line["kind"] == "computes"]
    assert said["compile"] and said["checkpointing"] and said["precision"] == "fp32"
    for kind in ("loss", "eval_loss"):  # as above
        assert losses(two, kind) == pytest.approx(losses(one, kind), rel=0, abs=5e-6)
    names = [set(load_file(place / "model" / "model.safetensors")) for place in (one, two)]
    assert names[0] == names[1]
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-5)


def test_ranks_of_any_kind_join_a_swarm_and_end_with_its_anchor(tmp_path: Path) -> None:
    alone, ddp, fsdp = (tmp_path / name for name in ("alone", "ddp", "fsdp"))
    joining = (
        "swarm.min_peers=3",
        f"swarm.initial_peers=['@{alone / 'address'}']",
        "train.threads=1",
    )
    with torchrun(ddp, *joining) as one, torchrun(fsdp, *joining, "train.parallel=fsdp") as other:
        together(lambda: train(alone, "swarm.min_peers=3"), one.done, other.done)
        assert one.family() == other.family() == []
    here, *others = (summary_of(place) for place in (alone, ddp, fsdp))
    for there, place in zip(others, (ddp, fsdp), strict=True):
        assert here["outer_steps"] == there["outer_steps"] == 3
        assert here["peers"][0]["anchor_digest"] == there["peers"][0]["anchor_digest"]
        assert here["peers"][0]["peer_id"] != there["peers"][0]["peer_id"]
        assert here["eval"]["loss"] == pytest.approx(there["eval"]["loss"], rel=1e-6)
        assert torch.equal(weights(alone), weights(place))
        assert here["tokens"]["applied"] == there["tokens"]["applied"] == 3 * 768


def test_ctrl_c_at_torchrun_ends_both_ranks_after_the_same_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with torchrun(run_dir, "budget.outer_steps=100000", "train.step_delay_s=0.02") as started:
        eventually(
            lambda: any(line["version"] >= 2 for line in json_lines(run_dir / "metrics.jsonl")),
            "outer step 2",
        )
        started.process.send_signal(signal.SIGINT)
        assert started.wait() != 0, "torchrun itself calls it a failure"
        assert started.family() == []
    assert summary_of(run_dir)["exit"] == 0 and summary_of(run_dir)["outer_steps"] >= 2
    newest = sorted(place.name for place in (run_dir / "checkpoints" / "peer").iterdir())[-1]
    assert newest == f"step-{summary_of(run_dir)['outer_steps']:08d}"
    for said in ("diloco: leaving the swarm", "diloco: open run, on this machine only"):
        assert started.stderr.count(said) == 1, "two ranks are one peer"
    assert "diloco: error" not in started.stderr and "RuntimeError" not in started.stderr


@pytest.mark.slow
def test_a_peer_that_loses_a_rank_comes_back_as_the_same_peer_and_goes_on(tmp_path: Path) -> None:
    place, run_dir = tmp_path / "host", tmp_path / "run"
    host = ("-m", "diloco", "host", "--new", *SMOKE, f"run.dir={place}", "budget.outer_steps=6")
    with command(*host, directory=tmp_path) as keeper:
        joining = (
            "budget.outer_steps=6",
            f"swarm.initial_peers=['@{place / 'address'}']",
            "train.threads=1",
        )
        with torchrun(run_dir, *joining, "train.step_delay_s=0.05", restarts=1) as started:
            lines = run_dir / "metrics.jsonl"
            eventually(
                lambda: any(line["version"] >= 2 for line in json_lines(lines)), "outer step 2"
            )
            [lost] = started.family("RANK=1")
            os.kill(lost, signal.SIGKILL)
            assert started.wait() == 0, started.stderr
            assert started.family() == []
        keeper.process.send_signal(signal.SIGINT)
        keeper.done()
    said = [line for line in started.stderr.splitlines() if line.startswith("diloco: error")]
    assert len(said) == 1 and said[0].startswith(
        "diloco: error: rank 1 of 2 ended without a word; the last checkpoint"
    )
    assert "RuntimeError" not in started.stderr
    resumed = [line for line in json_lines(run_dir / "events.jsonl") if line["kind"] == "resume"]
    assert len(resumed) == 1 and resumed[0]["version"] >= 1
    summary = summary_of(run_dir)
    assert summary["outer_steps"] == 6 and summary["tokens"]["applied"] == 6 * 256
    contributors = (run_dir / "contributions.csv").read_text().splitlines()[1:]
    assert len(contributors) == 1 and summary["peers"][0]["peer_id"] in contributors[0]


def test_a_machine_that_will_be_taken_away_is_left_with_a_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    endless = ("budget.outer_steps=100000", "train.step_delay_s=0.02")
    with command(
        "-m", "diloco.train", *SMOKE, *endless, f"run.dir={run_dir}", directory=tmp_path
    ) as started:
        eventually(
            lambda: any(line["version"] >= 1 for line in json_lines(run_dir / "metrics.jsonl")),
            "outer step 1",
        )
        # of a scheduler, and of torchrun
        for notice in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            started.process.send_signal(notice)
        started.done()
    steps = summary_of(run_dir)["outer_steps"]
    newest = sorted(place.name for place in (run_dir / "checkpoints" / "peer").iterdir())[-1]
    assert newest == f"step-{steps:08d}" and started.stderr.count("diloco: leaving the swarm") == 1


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    settings = (
        *EXACT,
        "inner.batch_size=4",
        "inner.schedule=constant",
        "inner.warmup_steps=0",
        "outer.rounds=4",
    )
    train(whole, *settings, "budget.outer_steps=4")
    for step, (ranks, parallel) in enumerate([(2, "fsdp"), (4, "fsdp"), (1, "ddp"), (2, "ddp")], 1):
        steps = (*settings, f"budget.outer_steps={step}", f"train.parallel={parallel}")
        if ranks == 1:
            train(run_dir, *steps)
            continue
        with torchrun(run_dir, *steps, ranks=ranks) as started:
            started.done()
    assert summary_of(run_dir)["outer_steps"] == 4
    # Another count of ranks rounds elsewhere; moments, data or a clock that were lost would move
    # the losses by 0.01.
    assert losses(run_dir, "eval_loss")[-1] == pytest.approx(
        losses(whole, "eval_loss")[-1], rel=0, abs=1e-5
    )
    torch.testing.assert_close(weights(run_dir), weights(whole), rtol=0, atol=1e-4)


def test_ranks_that_cannot_train_say_why_once(tmp_path: Path) -> None:
    error = "inner.batch_size=3 cannot be shared evenly by 2 processes; use a multiple of 2"
    with torchrun(tmp_path / "run", "inner.batch_size=3") as started:
        assert started.wait() != 0
        assert started.family() == []
    # torchrun adds a traceback of its own, through libraries that may lie in a directory called
    # diloco.
    said = [line for line in started.stderr.splitlines() if line.startswith("diloco: ")]
    assert len(said) == 1 and said[0].startswith(f"diloco: error: {error}")
    assert f"{ROOT / 'diloco'}/" not in started.stderr, "no traceback through the package"
    assert not list(tmp_path.rglob("*.safetensors"))
