"""How layers are computed changes neither what they compute nor what the model looks like from
outside."""

import copy
import importlib.util
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diloco import model as models
from diloco.attach.ranks import RankGroup
from diloco.config import ModelConfig, compose
from diloco.data import load_tokenizer
from diloco.errors import ConfigError
from diloco.model.forward import choose_attention_, compile_layers_, layers_of, recompute_layers_
from diloco.rundir.summary import PhaseTimer
from diloco.train.data_parallel import DataParallel
from diloco.train.evaluate import generate
from diloco.train.gradients import prepare_
from diloco.train.loop import Trainer
from diloco.train.reporter import Reporter
from tests.support.models import small_model

ALONE, BYTES = RankGroup(torch.device("cpu")), load_tokenizer("bytes")
TOKENS = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(0))


def small() -> nn.Module:
    return small_model(num_hidden_layers=2)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    models.loss(model, TOKENS).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def kept_bytes(model: nn.Module) -> int:
    """What a forward pass keeps for the backward pass, without the hidden states between layers."""
    kept: list[int] = []

    def keep(one: Tensor) -> None:
        kept.append(one.untyped_storage().nbytes())

    with torch.autograd.graph.saved_tensors_hooks(keep, id):
        models.loss(model, TOKENS)
    return sum(kept)


def test_recomputed_layers_have_equal_gradients_and_keep_less() -> None:
    plain, recomputing = small(), small()
    recompute_layers_(recomputing)
    expected, found = gradients(plain), gradients(recomputing)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert kept_bytes(recomputing) < kept_bytes(plain) / 3
    assert len(layers_of(plain)) == 2 and layers_of(nn.Linear(1, 1)) == []


@pytest.mark.slow
# of torch's own tracing, which hides it
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_layers_keep_names_and_gradients() -> None:
    plain, compiled = small(), small()
    compile_layers_(compiled, backend="aot_eager")
    expected, found = gradients(plain), gradients(compiled)
    assert list(found) == list(expected) == [name for name, _ in plain.named_parameters()]
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for name in found:  # the compiler may fuse, and does not with this backend
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7)
    assert all(layer._compiled_call_impl is not None for layer in layers_of(compiled))
    copied = layers_of(copy.deepcopy(compiled))
    assert all(layer._compiled_call_impl is None for layer in copied)


def test_the_attention_is_the_one_that_was_typed_if_it_is_there() -> None:
    model, plain = small(), gradients(small())
    assert choose_attention_(model, "auto") == "sdpa"
    assert choose_attention_(model, "eager") == "eager"
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, plain[name], rtol=0, atol=1e-6)  # sums in another order
    if importlib.util.find_spec("flash_attn") is None:
        flash = r"^train\.attention=flash_attention_2 needs the package flash_attn; install"
        with pytest.raises(ConfigError, match=flash):
            choose_attention_(model, "flash_attention_2")
    config = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    mamba = models.build(ModelConfig(name="small", model_type="mamba", config=config), 0)
    sdpa = r"^train\.attention=sdpa: MambaForCausalLM does not support .*; use auto$"
    with pytest.raises(ConfigError, match=sdpa):
        choose_attention_(mamba, "sdpa")


class NoReading(TorchDispatchMode):
    """Refuses what would make the host wait for the device: to read a value of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_inner_step_reads_no_value_from_the_device(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.model.cross_entropy.CPU_CHUNK_BYTES", 10 * 4 * 256)
    typed = (f"train.precision={precision}", "train.micro_batch=1", "train.log_every=100")
    config = compose(["experiment=smoke", *typed])
    model = small()
    prepare_(model, config, ALONE.device)
    optimizer, nothing = torch.optim.SGD(model.parameters(), lr=0.1), cast(Any, None)
    sync = DataParallel(model, optimizer, ALONE, 100, PhaseTimer())
    report = Reporter(config, ALONE, sync, PhaseTimer(), nothing, nothing)
    rest = nothing, nothing, sync, nothing, report
    trainer = Trainer(config, ALONE, model, model, optimizer, *rest)
    with sync, NoReading():
        for _ in range(2):
            trainer._inner_step(TOKENS)
    assert sync.steps == 2
    with pytest.raises(AssertionError, match="a value is read"), NoReading():
        trainer._mean_loss()


def test_what_the_model_writes_has_nothing_compiled_and_leaves_everything_as_it_was() -> None:
    """Each token makes its sequence longer, so layers would be compiled again and again."""
    prompts = ("eval.prompts=['def ','']", "eval.prompt_tokens=3")
    config = compose(["experiment=smoke", "train.compile=true", *prompts])
    model, random_state = small(), torch.random.get_rng_state()
    for layer in layers_of(model):
        layer.compile(backend=lambda *_: pytest.fail("compiled"))
    others: Any = [None] * 5
    optimizer = torch.optim.SGD(model.parameters())
    trainer = Trainer(config, ALONE, model, model, optimizer, *others, tokenizer=BYTES)
    for _ in range(2):
        written = trainer._write()
    for prompt, said in zip(("def ", ""), written, strict=True):
        text = generate(small(), BYTES, prompt, max_new_tokens=3, temperature=0.0)
        assert said == (prompt, text)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(one.training for one in model.modules())
