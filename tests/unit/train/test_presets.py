"""Every way of taking outer steps in the simulator, the small twins of the papers, and adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.attach.ranks import RankGroup
from diloco.config import Config, choices, compose
from diloco.errors import CheckpointError, ConfigError
from diloco.model import evaluating
from diloco.sim.run import simulate
from diloco.train import start_files
from diloco.train.gradients import autocast, to_device
from diloco.train.machine import fit_to_memory, inspect_machine
from diloco.volunteer.peer import fit_to_machine
from tests.support.data import chats
from tests.support.models import small_model
from tests.support.simulated import PRESETS, RUNS, digests, name_of, simulated


def test_every_outer_preset_is_tried() -> None:
    assert {*PRESETS, "data_parallel"} == set(choices()["outer"])


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_it_runs_in_the_simulator_to_one_anchor(run: tuple[str, ...], tmp_path: Path) -> None:
    peers = ["local.peers=3", "sim.step_s=[1,1.3,2.1]", "sim.latency_s=0.05"]
    config = compose(["experiment=smoke", *run, *peers, f"run.dir={tmp_path}"])
    outcome = simulate(config, lambda message: None)
    spent = outcome.summary.tokens
    assert len(digests(outcome)) == 1 and outcome.summary.eval.loss is not None
    assert spent.processed == spent.applied + spent.discarded + spent.in_flight
    assert spent.applied > 0 and spent.in_flight >= 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in choices()["experiment"] if one.endswith("-mini")])
def test_the_small_twin_of_a_paper_learns(name: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = [f"model.config.{key}={value}" for key, value in shape.items()]
    budget = "budget.tokens=9000 inner.batch_size=2 inner.lr=0.01 inner.warmup_steps=2"
    swarm = "outer.fragments=2 local.peers=2 data.sequence_length=32"
    settings = [f"experiment={name}", *model, *budget.split(), *swarm.split()]
    outcome = simulate(compose([*settings, f"run.dir={tmp_path}"]), lambda message: None)
    assert len(digests(outcome)) == 1
    assert outcome.summary.eval.loss is not None and outcome.summary.eval.loss < 4.8  # 5.55: guess


pytestmark = pytest.mark.usefixtures("own_home")


def test_a_swarm_fine_tunes_an_adapter_on_conversations(tmp_path: Path) -> None:
    data = ("data=chat", f"data.path={chats(tmp_path / 'chats.jsonl')}", "data.sequence_length=64")
    sent = {}
    for adapter in ("none", "lora"):
        overrides = (*data, f"adapter={adapter}", "model.adapter_rank=2", "train.precision=bf16")
        outcome = simulated(tmp_path / adapter, *overrides, "local.peers=2")
        assert len(digests(outcome)) == 1
        sent[adapter] = sum(peer.bytes_sent for peer in outcome.summary.peers)
    assert sent["lora"] < sent["none"] / 2


def started(base: Path) -> Config:
    typed = ["model=pretrained", f"model.path={base}", "adapter=lora", "data.tokenizer=bytes"]
    return start_files.resolved(compose(typed))


def test_an_adapter_is_of_one_base_only(tmp_path: Path) -> None:
    """One tensor that differs is enough."""
    model = small_model(max_position_embeddings=256)
    models.save(model, tmp_path / "base")
    config = started(tmp_path / "base")
    start_files.keep(config, models.build(config.model, 0))
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1.0
    models.save(model, tmp_path / "other")
    there = {"directory": str(tmp_path / "other")}
    other = config.model_copy(update={"model": config.model.model_copy(update=there)})
    with pytest.raises(CheckpointError, match="an adapter fits only its own base"):
        start_files.keep(other, models.build(other.model, 0))
    nowhere = config.model.model_copy(update={"directory": None, "path": None})
    with pytest.raises(ConfigError, match=r"are not here; set model\.directory"):
        models.build(nowhere, 0)


BATCH = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(2))


def placed(*typed: str) -> tuple[nn.Module, Config]:
    config = compose(["train.device=cpu", *typed])
    model = models.build(config.model, 0)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:  # which is zero at the start
                one.copy_(torch.linspace(-0.1, 0.1, one.numel()).view_as(one))
    return to_device(model, config, torch.device("cpu")), config


def gradients_at(model: nn.Module, config: Config) -> dict[str, Tensor]:
    model.zero_grad()
    with autocast(config, torch.device("cpu")):
        models.loss(model, BATCH).backward()  # type: ignore[no-untyped-call]
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: one.clone() for name, one in trained.items() if one is not None}


def bytes_of(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters())


def test_a_base_in_16_bits_has_the_gradients_of_autocast_in_half_the_memory() -> None:
    mixed = ("adapter=lora", "train.precision=bf16")
    (small, config), (whole, _) = placed(*mixed), placed(*mixed, "train.base=fp32")
    ours, theirs = gradients_at(small, config), gradients_at(whole, config)
    assert ours and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert bytes_of(small) < 0.6 * bytes_of(whole)


def test_a_base_saved_in_16_bits_is_loaded_so_and_has_the_adapter_of_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: Any = models.build(compose([]).model, 0).bfloat16()
    saved.save_pretrained(tmp_path / "base")
    with monkeypatch.context() as patched:
        patched.setattr(nn.Module, "float", lambda self: pytest.fail("who starts a run widens it"))
        config = started(tmp_path / "base")
    narrow, wide = (models.build(config.model, 0, narrow=narrow) for narrow in (True, False))
    assert bytes_of(narrow) < 0.7 * bytes_of(wide)
    start_files.keep(config, narrow)  # the digest of its values is the same
    trained = {name: one for name, one in wide.named_parameters() if one.requires_grad}
    ours = dict(narrow.named_parameters())
    assert trained and all(torch.equal(ours[name], one) for name, one in trained.items())
    mixed = compose(["train.device=cpu", "train.precision=bf16", "adapter=lora"])
    for model in (narrow, wide):
        to_device(model, mixed, torch.device("cpu"))
    assert all(torch.equal(ours[name], one) for name, one in wide.named_parameters())
    gradients_at(narrow, mixed)


def test_a_base_in_4_bits_trains_its_adapter_and_only_that_is_written() -> None:
    pytest.importorskip("bitsandbytes")
    (small, config), (whole, _) = placed("adapter=qlora"), placed("adapter=lora")
    ours, theirs = gradients_at(small, config), gradients_at(whole, config)
    assert ours and ours.keys() == theirs.keys() == models.saved_state(small).keys()
    flat = [torch.cat([one[name].flatten() for name in ours]) for one in (ours, theirs)]
    assert 0.9 < torch.cosine_similarity(*flat, dim=0) < 1
    assert bytes_of(small) < 0.4 * bytes_of(whole)
    with evaluating(small):
        evaluated = models.loss(small, BATCH)
        torch.testing.assert_close(evaluated, models.loss(whole, BATCH), rtol=0.01, atol=0)
    again = gradients_at(small, config)
    assert all(torch.equal(ours[name], again[name]) for name in ours), "the evaluation changed it"


@pytest.mark.parametrize(
    "typed, text",
    [
        (["train.base=nf4"], "train.base=nf4 is for a base that is frozen; add adapter=lora"),
        (["adapter=qlora", "train.parallel=fsdp"], "train.base=nf4 .*; use train.parallel=ddp"),
        (["adapter=qlora"], "train.base=nf4 needs bitsandbytes; pip install 'diloco.qlora.'"),
    ],
)
def test_what_cannot_lie_in_4_bits_is_one_line_before_anything_is_loaded(
    typed: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a joiner, before it fetches a base."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config, here = compose(["train.device=cpu", *typed]), RankGroup(torch.device("cpu"))
    for ask in (
        lambda: fit_to_memory(config, here),
        lambda: fit_to_machine(config, inspect_machine("cpu")),
        lambda: placed(*typed),
    ):
        with pytest.raises(ConfigError, match=text):
            ask()
