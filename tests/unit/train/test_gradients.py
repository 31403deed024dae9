"""The arithmetic of inner steps: what is chosen for a device, and the scale of the loss in fp16."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diloco import model as models
from diloco.attach.ranks import RankGroup
from diloco.config import compose
from diloco.errors import ConfigError, DivergedError
from diloco.train import gradients
from diloco.train.gradients import Gradients, LossScale, autocast, precision_of, prepare_
from tests.support.models import small_model
from tests.support.peers import events, json_lines
from tests.support.simulated import digests, simulated

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def scale_of(*overrides: str, ranks: Any = None) -> LossScale:
    return LossScale(compose(["train.precision=fp16", *overrides]), ranks or RankGroup(CPU))


@pytest.mark.parametrize(("native", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_auto_is_what_the_device_computes_natively(
    native: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    supported = lambda including_emulation: native or including_emulation  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert precision_of(compose(), CUDA) == chosen
    assert precision_of(compose(["train.precision=fp32"]), CUDA) == "fp32"
    assert precision_of(compose(), CPU) == "fp32"


def test_products_are_computed_in_the_precision() -> None:
    kinds = {"auto": "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    for typed, dtype in kinds.items():
        with autocast(compose([f"train.precision={typed}"]), CPU):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == getattr(torch, dtype)


@pytest.mark.parametrize("against", [None, "train.tf32=false", "train.precision=bf16"])
def test_fp32_on_cuda_uses_tf32_unless_told_otherwise(
    against: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(["train.precision=fp32", *([against] if against else [])])
    said: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    chosen = prepare_(small_model(), config, CUDA)
    assert said == ["highest" if against else "high"]
    assert chosen["tf32"] == (against is None) and chosen["attention"] == "sdpa"
    prepare_(small_model(), config, CPU)
    assert len(said) == 1, "a CPU has no TF32"


def test_flash_attention_needs_cuda_and_a_narrow_precision() -> None:
    model = nn.Linear(1, 1)
    flash, text = "train.attention=flash_attention_2", "computes in bf16 or fp16 on CUDA"
    with pytest.raises(ConfigError, match=f"{flash} {text}"):
        prepare_(model, compose([flash]), CPU)
    with pytest.raises(ConfigError, match="this is fp32 on cuda; use sdpa"):
        prepare_(model, compose([flash, "train.precision=fp32"]), CUDA)


def test_the_scale_moves_like_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "GROWTH_STEPS", 3)
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
    scale = LossScale(compose(["train.precision=bf16"]), RankGroup(CPU))
    loss = torch.ones(())
    assert scale.scaled(loss) is loss
    assert not scale.skips(torch.empty((), device="meta")), "to read this value would raise"


def test_gradients_that_overflow_unscaled_end_the_run() -> None:
    scale, infinite = scale_of(), torch.tensor(float("inf"))
    assert all(scale.skips(infinite) for _ in range(16)) and scale.scale == 1
    with pytest.raises(DivergedError, match=r"use train\.precision=fp32, or lower inner\.lr"):
        scale.skips(infinite)
    another_rank: Any = SimpleNamespace(device=CPU, all_reduce_min=lambda finite: 0)
    assert scale_of(ranks=another_rank).skips(torch.ones(())), "those of another rank overflow"


def test_a_resumed_peer_goes_on_with_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "GROWTH_STEPS", 3)
    bad, good = torch.tensor(float("nan")), torch.ones(())
    before, after, plain = scale_of(), scale_of(), LossScale(compose(), RankGroup(CPU))
    for norm in (bad, bad, good, good):
        before.skips(norm)
    after.restore(json.loads(json.dumps(before.state)))
    for scale in (before, after):
        scale.skips(good)
        assert scale.scale == 2.0**15, "halved twice, doubled after three"
    plain.restore(before.state)
    assert plain.scale == 1 and plain.state == ()


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At this scale the gradients of some first steps overflow; whatever is above 65504 is infinite
    in fp16."""
    monkeypatch.setattr(gradients, "FIRST_SCALE", 2.0**24)


@pytest.mark.usefixtures("overflowing")
def test_peers_in_fp16_skip_steps_and_still_exchange(tmp_path: Path) -> None:
    outcome = simulated(tmp_path, "local.peers=2", "outer.sync_every=6", "train.precision=fp16")
    skipped = events(tmp_path, "step_skipped")
    assert {event["peer"] for event in skipped} == {"p0", "p1"}
    assert next(event["scale"] for event in skipped if event["peer"] == "p0") == 2.0**23
    assert len(digests(outcome)) == 1
    assert [peer.steps for peer in outcome.summary.peers] == [12, 12], "a skipped step counts"
    lines = json_lines(tmp_path / "metrics.jsonl")
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert losses[-1] < losses[0]


def gradients_of(micro_batch: int | None) -> Gradients:
    config = compose(["experiment=smoke", f"train.micro_batch={micro_batch or 'null'}"])
    model = models.build(config.model, 0)
    return Gradients(config, RankGroup(torch.device("cpu")), model, model, lambda *_, **__: None)


ROWS = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_batch_in_parts_has_the_gradient_of_the_whole() -> None:
    whole = gradients_of(None)
    loss = float(whole.compute_(ROWS[:7]))
    for micro_batch in (1, 2, 3, 8):
        parts = gradients_of(micro_batch)
        assert float(parts.compute_(ROWS[:7])) == pytest.approx(loss, rel=1e-5)
        for one, other in zip(whole._model.parameters(), parts._model.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)


def test_a_part_that_does_not_fit_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    one, tried, fits = gradients_of(None), list[int](), 2
    accumulate = one._accumulate

    def full(rows: torch.Tensor, micro_batch: int) -> torch.Tensor:
        tried.append(micro_batch)
        if micro_batch > fits:
            raise torch.OutOfMemoryError("full")
        return accumulate(rows, micro_batch)

    monkeypatch.setattr(one, "_accumulate", full)
    one.compute_(ROWS)
    one.compute_(ROWS)
    assert tried == [8, 4, 2, 2]
    fits = 0
    with pytest.raises(ConfigError, match="not even one sequence fits"):
        one.compute_(ROWS)
