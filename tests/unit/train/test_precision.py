"""The arithmetic of inner steps: what is chosen for a device, and the scale of the loss in fp16."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diloco import model as models
from diloco.config import compose
from diloco.errors import ConfigError, DivergedError
from diloco.rundir.summary import PhaseTimer
from diloco.sim.run import simulate
from diloco.train import precision
from diloco.train.baseline import DataParallel
from diloco.train.inner import inner_optimizer
from diloco.train.island import Island
from diloco.train.precision import LossScale, autocast, precision_of, prepare_
from diloco.train.run import run
from tests.support.peers import json_lines

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def scale_of(*overrides: str, island: Any = None) -> LossScale:
    return LossScale(compose(["train.precision=fp16", *overrides]), island or Island(CPU))


@pytest.mark.parametrize(("native", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_auto_is_what_the_device_computes_natively(native: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    assert precision_of(compose(), CUDA) == chosen
    assert precision_of(compose(["train.precision=fp32"]), CUDA) == "fp32"
    assert precision_of(compose(), CPU) == "fp32"


@pytest.mark.parametrize(
    ("typed", "dtype"), [("auto", None), ("fp32", None), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_products_are_computed_in_the_precision(typed: str, dtype: str | None) -> None:
    with autocast(compose([f"train.precision={typed}"]), CPU):
        found = torch.ones(2, 2) @ torch.ones(2, 2)
    assert found.dtype == (torch.float32 if dtype is None else getattr(torch, dtype))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ((), "high"),
        (("train.tf32=false",), "highest"),
        (("train.precision=bf16",), "highest"),
        (("outer.spot_check=0.1",), "highest"),
    ],
)
def test_fp32_on_cuda_uses_tf32_unless_something_speaks_against_it(
    typed: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(["train.precision=fp32", *typed])
    said: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    model = models.build(compose(["experiment=smoke"]).model, 0)
    chosen = prepare_(model, config, CUDA)
    assert said == [expected]
    assert chosen["tf32"] == (expected == "high") and chosen["attention"] == "sdpa"
    prepare_(model, config, CPU)
    assert said == [expected], "a CPU has no TF32"


def test_flash_attention_needs_cuda_and_a_narrow_precision() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"train\.attention=flash_attention_2 computes in bf16 or fp16 on CUDA"):
        prepare_(model, compose(["train.attention=flash_attention_2"]), CPU)
    with pytest.raises(ConfigError, match="this is fp32 on cuda; use sdpa"):
        prepare_(model, compose(["train.attention=flash_attention_2", "train.precision=fp32"]), CUDA)


# -- the scale


def test_the_scale_moves_like_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    model, ours = nn.Linear(1, 1, bias=False), scale_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for good in [True, True, False, True, True, True, True, False, False, True, True, True, True]:
        loss = model(torch.ones(1, 1)).sum() * (1.0 if good else float("inf"))
        theirs.scale(loss)  # which makes its scale
        [weight] = model.parameters()
        weight.grad = torch.full_like(weight, 1.0 if good else float("nan"))
        skips = ours.skips(weight.grad.norm())
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert skips == (not good)
        assert ours.scale == theirs.get_scale()
    assert ours.skipped_steps == 3


def test_gradients_of_the_scaled_loss_become_those_of_the_loss() -> None:
    model, scale = nn.Linear(3, 2), scale_of()
    scale.scaled(model(torch.ones(1, 3)).sum()).backward()  # type: ignore[no-untyped-call]
    assert float(model.weight.grad[0, 0]) == 2.0**16  # type: ignore[index]
    scale.unscale_(model)
    assert torch.equal(model.weight.grad, torch.ones(2, 3))  # type: ignore[arg-type]


def test_other_precisions_are_not_scaled_and_nobody_waits_for_their_norm() -> None:
    scale = LossScale(compose(["train.precision=bf16"]), Island(CPU))
    loss = torch.ones(())
    assert scale.scaled(loss) is loss
    assert not scale.skips(torch.empty((), device="meta")), "to read this value would raise"


def test_gradients_that_overflow_unscaled_end_the_run() -> None:
    scale = scale_of()
    for _ in range(16):
        assert scale.skips(torch.tensor(float("inf")))
    assert scale.scale == 1
    with pytest.raises(DivergedError, match=r"use train\.precision=fp32, or lower inner\.lr"):
        scale.skips(torch.tensor(float("inf")))


def test_a_resumed_peer_goes_on_with_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_STEPS", 3)
    bad, good = torch.tensor(float("nan")), torch.ones(())
    before, after, plain = scale_of(), scale_of(), LossScale(compose(), Island(CPU))
    for norm in (bad, bad, good, good):
        before.skips(norm)
    after.restore(json.loads(json.dumps(before.state)))
    for scale in (before, after):
        scale.skips(good)
        assert scale.scale == 2.0**15, "halved twice, doubled after three"
    plain.restore(before.state)
    assert plain.scale == 1 and plain.state == ()


def test_a_step_is_skipped_when_the_gradients_of_another_rank_overflow() -> None:
    scale = scale_of(island=SimpleNamespace(device=CPU, least=lambda finite: 0))
    assert scale.skips(torch.ones(()))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_without_gradients_changes_nothing_and_counts(name: str) -> None:
    config = compose(["experiment=smoke", f"inner.optimizer={name}"])
    model = models.build(config.model, 0)
    optimizer = inner_optimizer(model, config.inner)
    with DataParallel(model, optimizer, Island(CPU), 3, PhaseTimer()) as sync:
        models.loss(model, torch.ones(1, 4, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()
        assert sync.steps == 2
    assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))


def test_peers_in_fp16_skip_steps_and_still_exchange_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At this scale the gradients of some first steps overflow; whatever is above 65504 is infinite in fp16.
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**24)
    settings = (
        "experiment=smoke",
        "local.peers=2",
        "budget.outer_steps=2",
        "outer.sync_every=6",
        f"run.dir={tmp_path}",
    )
    outcome = simulate(compose([*settings, "train.precision=fp16"]), lambda message: None)
    skipped = [event for event in json_lines(tmp_path / "events.jsonl") if event["kind"] == "step_skipped"]
    assert {event["peer"] for event in skipped} == {"p0", "p1"}
    assert next(event["scale"] for event in skipped if event["peer"] == "p0") == 2.0**23
    assert len({peer.anchor_digest for peer in outcome.summary.peers}) == 1
    assert [peer.steps for peer in outcome.summary.peers] == [12, 12], "a skipped step counts"
    losses = [line["eval_loss"] for line in json_lines(tmp_path / "metrics.jsonl") if "eval_loss" in line]
    assert losses[-1] < losses[0]


def test_a_run_that_is_resumed_does_not_look_for_its_scale_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**24)

    for outer_steps in (1, 2):
        settings = ("experiment=smoke", "outer=data_parallel", "outer.sync_every=8", "train.precision=fp16")
        run(compose([*settings, f"run.dir={tmp_path}", f"budget.outer_steps={outer_steps}"]), lambda message: None)
    scales = [event["scale"] for event in json_lines(tmp_path / "events.jsonl") if event["kind"] == "step_skipped"]
    assert scales[:2] == [2.0**23, 2.0**22], "the scale had to be found"
    assert len(set(scales)) == len(scales), "and only once"
