"""How layers are computed changes neither what they compute nor what the model looks like from outside."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.config import ModelConfig, compose
from diloco.data import Dataset
from diloco.errors import ConfigError
from diloco.model.forward import choose_attention_, compile_layers_, layers_of, recompute_layers_
from diloco.train.evaluate import loss_of

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(0))


def small() -> nn.Module:
    return models.build(ModelConfig(name="small", model_type="llama", config=SMALL), 0)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    models.loss(model, TOKENS).backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def kept_bytes(model: nn.Module) -> int:
    """What a forward pass keeps for the backward pass, without the hidden states between layers."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        models.loss(model, TOKENS)
    return sum(kept)


def test_the_layers_are_those_of_the_largest_stack() -> None:
    assert len(layers_of(small())) == 3
    assert layers_of(nn.Linear(1, 1)) == []


def test_recomputed_layers_have_equal_gradients_and_keep_less() -> None:
    plain, recomputing = small(), small()
    recompute_layers_(recomputing)
    expected, found = gradients(plain), gradients(recomputing)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert kept_bytes(recomputing) < kept_bytes(plain) / 3


def test_parameters_of_others_are_checked_beside_layers_that_are_recomputed() -> None:
    model, nothing = small(), Dataset.__new__(Dataset)
    recompute_layers_(model)
    loss = loss_of(model, nothing, TOKENS)
    with torch.no_grad():
        expected = [float(models.loss(model, row)) for row in TOKENS.split(1)]
    assert loss(dict(model.named_parameters()), []) == pytest.approx(expected)


def test_models_that_cannot_recompute_their_layers_are_refused() -> None:
    model = small()
    type(model).supports_gradient_checkpointing = False  # type: ignore[assignment]
    try:
        with pytest.raises(ConfigError, match=r"^train\.checkpointing=true: LlamaForCausalLM does not support"):
            recompute_layers_(model)
    finally:
        del type(model).supports_gradient_checkpointing


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's own tracing, which hides it
def test_compiled_layers_keep_names_and_gradients_and_a_copy_is_not_compiled() -> None:
    plain, compiled = small(), small()
    compile_layers_(compiled, backend="aot_eager")
    expected, found = gradients(plain), gradients(compiled)
    assert list(found) == list(expected) == [name for name, _ in plain.named_parameters()]
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for name in found:  # the compiler may fuse, and does not with this backend
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7)
    assert all(layer._compiled_call_impl is not None for layer in layers_of(compiled))
    assert all(layer._compiled_call_impl is None for layer in layers_of(copy.deepcopy(compiled)))


def test_a_model_without_layers_is_not_compiled() -> None:
    with pytest.raises(ConfigError, match=r"^train\.compile=true: Linear has no stack of layers to compile"):
        compile_layers_(nn.Linear(1, 1))


def test_the_attention_is_the_one_that_was_typed() -> None:
    model = small()
    assert choose_attention_(model, "auto") == "sdpa"
    plain = gradients(small())
    assert choose_attention_(model, "eager") == "eager"
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, plain[name], rtol=0, atol=1e-6)  # sums in another order


def test_attention_that_is_not_there_is_refused_in_one_line() -> None:
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(
            ConfigError, match=r"^train\.attention=flash_attention_2 needs the package flash_attn; install"
        ):
            choose_attention_(small(), "flash_attention_2")
    config = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    mamba = models.build(ModelConfig(name="small", model_type="mamba", config=config), 0)
    with pytest.raises(ConfigError, match=r"^train\.attention=sdpa: MambaForCausalLM does not support .*; use auto$"):
        choose_attention_(mamba, "sdpa")


def test_every_way_to_compute_is_a_setting() -> None:
    typed = ["train.attention=eager", "train.checkpointing=true", "train.compile=true", "train.tf32=false"]
    train = compose(typed).train
    assert (train.attention, train.checkpointing, train.compile, train.tf32) == ("eager", True, True, False)
