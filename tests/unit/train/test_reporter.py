"""The figures of a line in `metrics.jsonl`: norm, pace, memory, and the part of a device's peak
that is used."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diloco import model as models
from diloco.attach import devices
from diloco.attach.ranks import RankGroup
from diloco.config import ModelConfig, compose
from diloco.rundir.summary import PhaseTimer
from diloco.train.data_parallel import DataParallel
from diloco.train.loop import Trainer
from diloco.train.reporter import Reporter, token_share

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 2048}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "intermediate_size": 300, "num_key_value_heads": 2},
    "llama, tied": {**SHAPE, "intermediate_size": 300, "tie_word_embeddings": True},
    "qwen3": {**SHAPE, "intermediate_size": 200, "head_dim": 40, "num_key_value_heads": 4},
    "gpt2": {"n_embd": 96, "n_layer": 3, "n_head": 4, "vocab_size": 2048, "n_positions": 96},
}


def built(kind: str) -> torch.nn.Module:
    settings = ModelConfig(name="small", model_type=kind.partition(",")[0], config=KINDS[kind])
    return models.build(settings, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_operations_of_a_token_are_those_that_torch_counts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA H100 80GB HBM3")
    model, rows = built(kind), torch.zeros(2, 96, dtype=torch.int64)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    with FlopCounterMode(display=False) as counted:
        models.loss(model, rows).backward()  # type: ignore[no-untyped-call]
    share = token_share(model, 96, CPU)
    assert share is not None
    assert share * 989e12 == pytest.approx(counted.get_total_flops() / rows.numel(), rel=0.03)


def test_no_peak_is_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    peaks = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
        "CPU": None,
    }
    for name, peak in peaks.items():
        monkeypatch.setattr(devices, "name_of", lambda device, name=name: name)
        assert devices.peak_flops(CPU) == peak
        assert (token_share(model, 96, CPU) is None) == (peak is None)


def test_a_line_has_norm_pace_memory_and_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is that of the last gradient before it is clipped."""
    monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA H100 80GB HBM3")
    typed = "outer=data_parallel outer.sync_every=2 budget.outer_steps=2 inner.clip=1e-3"
    rest = "train.log_every=1 run.lead=false checkpoint.every=0"
    config = compose(["experiment=smoke", *typed.split(), *rest.split()])
    model, clock = models.build(config.model, 0), iter(range(10**6))
    phases = PhaseTimer(clock=lambda: next(clock))
    lines, norms = list[dict[str, Any]](), list[float]()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    log: Any = SimpleNamespace(metric=lambda **line: lines.append(line))
    ranks = RankGroup(CPU)
    sync = DataParallel(model, optimizer, ranks, 2, phases)
    clip = torch.nn.utils.clip_grad_norm_

    def clipped(parameters: Any, most: float) -> torch.Tensor:
        kept = list(parameters)
        norms.append(sum(float(p.grad.square().sum()) for p in kept) ** 0.5)
        return clip(kept, most)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipped)
    rows: Any = iter(torch.randint(256, (9, 2, 32), generator=torch.Generator().manual_seed(0)))
    session: Any = SimpleNamespace(loss_scale=())
    share = token_share(model, config.data.sequence_length, CPU)
    report = Reporter(config, ranks, sync, phases, log, lambda message: None, token_share=share)
    trainer = Trainer(config, ranks, model, model, optimizer, rows, rows, sync, session, report)
    with sync:
        trainer.train()
    told = [line for line in lines if "loss" in line]
    assert [line["grad_norm"] for line in told] == pytest.approx(norms) and len(told) == 4
    for line in told:
        assert 0 < line["tokens_per_s"] <= 64 and line["peak_process_bytes"] > 2**26
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * share)
    rounds = [line for line in lines if "bytes_sent" in line]
    assert len(rounds) == 2 and all(0 < line["swarm_tokens_per_s"] <= 64 for line in rounds)
