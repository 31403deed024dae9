"""The loss of logits that exist in chunks: equal to that of whole ones, with less memory, and only
where it is safe."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diloco import model as models
from diloco.config import ModelConfig
from diloco.data.conversations import Sample, pack_samples
from diloco.errors import ConfigError
from diloco.model.cross_entropy import cross_entropy
from tests.support.models import small_model

V, D = 97, 16
# Of the largest value: sums are rounded in another order, which costs some units in the last place
# (6e-8) each; a chunk that is left out, or weighted by its own size, costs 1e-2 and more.
ROUNDING = 2e-6


def inputs(rows: int = 50, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, D, generator=generator) * scale
    weight = torch.randn(V, D, generator=generator)
    targets = torch.randint(V, (rows,), generator=generator)
    targets[::7] = -100
    return hidden, weight, torch.randn(V, generator=generator), targets


def assert_near(one: Tensor, other: Tensor, part: float = ROUNDING) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=part * float(other.detach().abs().max()))


def some_tokens(sequences: int = 4, length: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(sequences)
    return torch.randint(256, (sequences, length), generator=generator)


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows of logits of `SMALL` at a time."""
    monkeypatch.setattr("diloco.model.cross_entropy.CPU_CHUNK_BYTES", 10 * 4 * 256)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is computed inside."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.numel())
        return found


@pytest.mark.parametrize(("rows", "scale"), [(1, 1.0), (7, 30.0), (50, 1.0), (64, 1.0)])
def test_loss_and_gradients_are_those_of_whole_logits(rows: int, scale: float) -> None:
    hidden, weight, bias, targets = inputs(scale=scale)
    given = hidden, weight, bias
    found, expected = ([one.clone().requires_grad_() for one in given] for _ in range(2))
    ours = cross_entropy(*found, targets, rows)
    theirs = nn.functional.cross_entropy(nn.functional.linear(*expected), targets)
    assert_near(ours, theirs)
    (3 * ours).backward()  # type: ignore[no-untyped-call]
    (3 * theirs).backward()
    for one, other in zip(found, expected, strict=True):
        assert one.grad is not None and other.grad is not None
        # logits are rounded in proportion to their size
        assert_near(one.grad, other.grad, ROUNDING * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_gradients_are_as_good_as_of_whole_logits(dtype: torch.dtype) -> None:
    # In fp64 nothing is lost. fp16 gradients of 2,000 tokens, each divided by 2,000, are so small
    # that whole logits lose most of them without a scale.
    hidden, weight, _, targets = inputs(rows=2000)
    exact = [one.double().requires_grad_() for one in (hidden, weight)]
    nn.functional.cross_entropy(exact[0] @ exact[1].T, targets).backward()

    def errors(compute: Any) -> list[float]:
        own = [one.clone().requires_grad_() for one in (hidden, weight)]
        with torch.autocast("cpu", dtype):
            loss = compute(*own)
        assert loss.dtype == torch.float32
        loss.backward()
        pairs = [(a.grad, b.grad) for a, b in zip(own, exact, strict=True)]
        return [float((a - b).norm() / b.norm()) for a, b in pairs]  # type: ignore[operator,union-attr]

    def plain(*own: Tensor) -> Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(*own).float(), targets)

    chunked = errors(lambda *own: cross_entropy(*own, None, targets, 300))
    whole = errors(plain)
    for ours, theirs in zip(chunked, whole, strict=True):
        assert ours <= 1.05 * theirs
        assert ours < 0.02


def test_the_logits_of_all_tokens_never_exist() -> None:
    hidden, weight, _, targets = inputs(rows=400)
    hidden.requires_grad_()
    with Largest() as whole:
        nn.functional.cross_entropy(hidden @ weight.requires_grad_().T, targets).backward()
    with Largest() as parts:
        cross_entropy(hidden, weight, None, targets, 20).backward()  # type: ignore[no-untyped-call]
    assert whole.numel == 400 * V
    assert parts.numel == 400 * D, "the hidden states are the largest"


@pytest.mark.parametrize("tied", [False, True])
def test_a_chunked_head_has_the_same_gradients(
    tied: bool, chunked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = small_model(tie_word_embeddings=tied), some_tokens()

    def computed(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        loss = models.loss(model, tokens)
        assert type(loss.grad_fn).__name__ == kind
        loss.backward()  # type: ignore[no-untyped-call]
        return loss, {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]

    loss, found = computed("_ChunkedBackward")
    monkeypatch.undo()
    whole, expected = computed("NllLossBackward0")
    assert_near(loss, whole)
    for name in expected:
        # through a softmax and norms, each with sums of its own
        assert_near(found[name], expected[name], 2e-5)


CAPPED = {"head_dim": 16, "num_key_value_heads": 1, "final_logit_softcapping": 0.5}
CHANGED = [("gemma2", CAPPED), ("granite", {"logits_scaling": 8.0})]


@pytest.mark.parametrize(("model_type", "config"), CHANGED)
def test_models_that_change_their_logits_keep_them_whole(
    model_type: str, config: Any, chunked: None
) -> None:
    model, tokens = small_model(model_type, **config), some_tokens()
    assert type(model.get_output_embeddings()) is nn.Linear  # type: ignore[operator]
    whole = model(input_ids=tokens, labels=tokens).loss.item()
    assert models.loss(model, tokens).item() == pytest.approx(whole, rel=1e-6)


OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MAMBA = {"state_size": 8, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LFM2 = {**HEADS, "layer_types": ["conv", "full_attention"]}
JAMBA = {
    **HEADS,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
    "use_mamba_kernels": False,
}
SIZES = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 16}
FALCON_H1 = {**HEADS, **SIZES, "mamba_n_groups": 1}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("opt", OPT),
        ("mamba", MAMBA),
        # with their small first weights, too, with which little goes from one to the other
        ("lfm2", LFM2),
        ("jamba", JAMBA),
        ("falcon_h1", FALCON_H1),
    ],
)
def test_a_model_in_which_packed_conversations_see_each_other_is_refused(
    model_type: str, config: Any, bf16: bool
) -> None:
    config = {"vocab_size": 256, "hidden_size": 32, **config}
    model = models.build(ModelConfig(name="small", model_type=model_type, config=config), 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        models.check_segments(small_model())
        with pytest.raises(ConfigError, match="lets packed conversations see each other"):
            models.check_segments(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_conversations_have_the_gradients_of_each_alone(attention: str) -> None:
    """Sums over all answers, equal to 1e-5 of the largest."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for size in (5, 11, 16, 7, 9):
        tokens = torch.randint(256, (size,), generator=generator)
        samples.append(Sample(tokens.numpy(), (torch.arange(size) >= size // 2).numpy()))
    rows = torch.from_numpy(pack_samples(samples, 16)).long()
    assert len(rows) < len(samples)
    model = small_model()
    model.set_attn_implementation(attention)
    models.check_segments(model)
    packed, count = model, models.num_targets(rows)
    models.loss(packed, rows).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for sample in samples:
        alone = torch.from_numpy(pack_samples([sample], len(sample.tokens))).long()
        (models.loss(model, alone) * models.num_targets(alone) / count).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_near(found[name], parameter.grad, 1e-5)
