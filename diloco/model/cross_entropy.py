"""The training loss, computed a chunk of tokens at a time where all logits would be large.

(B, T, V) logits, their copy in fp32 and their gradient are the largest tensors of a step: at V=128k
they take more than the rest of a small model. None of them has to exist whole:

1. `loss` leaves the targets where the output head finds them. The model returns the loss in place
   of logits.
2. The head multiplies a chunk of hidden states with its weight, and takes from these logits the
   chunk's part of the loss and of the gradients of hidden states and weight. Then the chunk's
   memory serves the next one.
3. The backward pass has nothing to compute for the head; it scales what step 2 kept.

All that happens in the model's own forward pass. So whatever is wrapped around it finds what it
knows: the hooks of DistributedDataParallel see an output and gradients of parameters, and FSDP2 has
gathered the head's weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diloco.errors import ConfigError
from diloco.text import one_line

IDS = [11, 12, 13, 14]  # not those of marks such as padding, which some models never look at
IGNORED = -100  # in place of a target: this position predicts nothing
# fp32 logits at a time. With less, a GPU waits for the memory of the weight's gradient, to which
# each chunk is added.
CHUNK_BYTES, CPU_CHUNK_BYTES = 2**28, 2**26

# `targets` of the forward pass of `loss`, and whether its rows are plain; peers of a simulation
# have a thread each
_forward = threading.local()


def loss(model: Callable[..., Any], rows: Tensor) -> Tensor:
    """Return the mean cross entropy of each token given those before it, in nats; fp32.

    `rows` is (B, T) int64 on the model's device: the model predicts T - 1 tokens of each sequence;
    it only reads the first. Or it is (B, 2, T) of `conversations.pack_samples`: the model predicts
    the tokens that are learned, each from those before it in its segment. The softmax is fp32 also
    under autocast. One backward pass, without gradients of gradients.
    """
    tokens, given = rows, dict[str, Tensor]()
    aims = tokens
    if rows.ndim == 3:
        tokens, marks = rows.unbind(1)
        aims = tokens.where(marks % 2 == 1, IGNORED)
        # By positions that begin anew transformers tells where a segment does.
        given["position_ids"] = _positions(marks // 2)
    # Masking the last position instead of slicing it off saves a copy of the logits.
    targets = aims.roll(-1, dims=1)
    targets[:, -1] = IGNORED
    _forward.targets, _forward.plain = targets, not given
    try:  # (B, T, V), or the loss
        logits: Tensor = model(input_ids=tokens, use_cache=False, **given).logits
    finally:
        _forward.targets, _forward.plain = None, False
    if logits.ndim == 0:
        return logits
    flat = logits.float().flatten(0, 1)
    return nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED)


def num_targets(rows: Tensor) -> int:
    """Count the tokens that `loss` has the model predict."""
    if rows.ndim == 3:
        return int((rows[:, 1] % 2).sum())
    return rows.shape[0] * (rows.shape[1] - 1)


def _positions(segments: Tensor) -> Tensor:
    """Return the distance of each token from the first one of its segment: (B, T)."""
    places = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - places.where(begins, 0).cummax(1).values


def reads_plain_rows() -> bool:
    """Return True inside a forward pass of `loss`, in this thread, with rows of tokens that need no
    positions and no mask."""
    return getattr(_forward, "plain", False)


def check_segments(model: nn.Module) -> None:
    """Raise `ConfigError` unless this causal LM keeps the segments of a row apart; costs a forward
    and a backward pass of eight tokens, under the caller's autocast."""
    logits, slope = _reach(model, IDS * 2, slice(4, 8), position_ids=[0, 1, 2, 3] * 2)
    # Equal segments differ by rounding, unless their positions go on.
    alike = torch.allclose(logits[:, 4:], logits[:, :4], rtol=1e-2, atol=1e-3)
    if not alike or slope is None or slope[:4].any():
        raise ConfigError(
            f"data.format=auto: {type(model).__name__} lets packed conversations see each other;"
            " take a model of another kind, or data.format=text"
        )


def check_causal(model: nn.Module) -> None:
    """Raise `ConfigError` for a model that sees the tokens that it is to predict, as an encoder
    does, and for an adapter on unsupported layers; costs passes of two tokens."""
    try:
        _, slope = _reach(model, IDS[:2], slice(0, 1))
    except (AttributeError, TypeError, ValueError) as error:  # a router may return a tuple
        fault = f"model.adapter_targets: {type(model).__name__} fails in a forward pass"
        raise ConfigError(f"{fault}: {one_line(error)}; name other layers") from error
    if slope is not None and slope[1:].any():
        raise ConfigError(
            f"model.config: {type(model).__name__} sees the tokens that it is to predict; set"
            " is_decoder=true, in a config.json too, or take a causal language model"
        )


def _reach(
    model: Any, ids: list[int], of: slice, **given: list[int]
) -> tuple[Tensor, Tensor | None]:
    """Return logits (1, T, V), and the gradient of those at `of` by each input (T, D), or None
    without one in evaluation. A mask makes exact zeros of it; small weights do not."""
    device = next(model.parameters()).device
    rows = {key: torch.tensor([values], device=device) for key, values in given.items()}
    inputs: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[-1].clone()  # some write into it

    with evaluating(model), torch.enable_grad():
        with model.get_input_embeddings().register_forward_hook(keep):
            tokens = torch.tensor([ids], device=device)
            logits: Tensor = model(input_ids=tokens, use_cache=False, **rows).logits.float()
        with suppress(AssertionError, RuntimeError):  # of reversible layers
            [slope] = torch.autograd.grad(logits[:, of].square().sum(), inputs[:1])
            return logits.detach(), slope.reshape(len(ids), -1)
    return logits.detach(), None


class ChunkedHead(nn.Linear):
    """An output head that returns the loss, a scalar, in the forward pass of `loss`."""

    def forward(self, hidden: Tensor) -> Tensor:
        targets: Tensor | None = getattr(_forward, "targets", None)
        most_bytes = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES
        rows = max(1, most_bytes // (4 * self.out_features))
        if targets is None or hidden.shape[:-1] != targets.shape or targets.numel() <= rows:
            return super().forward(hidden)
        _forward.targets = None  # some models call their head again, for something else
        return cross_entropy(hidden.flatten(0, -2), self.weight, self.bias, targets.flatten(), rows)


def prepare_head_(model: nn.Module) -> bool:
    """Let `loss` compute the logits of this causal LM in chunks; returns False if it cannot.

    It can where the output head is a plain `nn.Linear` whose product are the logits. Some models
    scale them, cap them (Gemma 2) or have a head of another kind; those keep whole logits. Raises
    whatever the forward pass raises.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    with evaluating(model):
        if type(head) is nn.Linear and _returns_as_logits(model, head, tokens):
            # not an attribute of the instance: copies of the model have it, too
            head.__class__ = ChunkedHead
        elif type(head) is not ChunkedHead:
            model(input_ids=tokens, use_cache=False)
    return type(head) is ChunkedHead


def _returns_as_logits(model: nn.Module, head: nn.Module, tokens: Tensor) -> bool:
    """Return True if the model returns the output of its head as logits, even a scalar."""
    scalar = torch.zeros((), device=tokens.device)
    try:
        with head.register_forward_hook(lambda *_: scalar):
            return model(input_ids=tokens, use_cache=False).logits is scalar
    except torch.OutOfMemoryError:
        raise
    except Exception:  # of whatever this model does to its logits
        return False


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each module's mode is restored (some may be frozen)."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        # not inference_mode: training could not use what a model caches in it (rotary tables)
        with torch.no_grad():
            yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


def cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int
) -> Tensor:
    """Return the mean cross entropy of `hidden @ weight.T + bias`, `rows` rows at a time.

    `hidden` is (N, D), `weight` (V, D), `bias` (V,), `targets` (N,) int64, where -100 is ignored.
    Products are computed in the dtype of autocast or else of `hidden`, everything else in fp32,
    also the sum of the weight's gradient over chunks. A second backward pass raises RuntimeError.
    """
    mean: Tensor = _Chunked.apply(hidden, weight, bias, targets, rows)  # type: ignore[no-untyped-call]
    return mean


class _Chunked(torch.autograd.Function):
    """`cross_entropy`. It computes gradients in the forward pass, while it has the logits, as Liger
    Kernel does (Hsu et al. 2024, arXiv:2410.10989). The weight's gradient takes no extra memory:
    the backward pass, which comes next, would allocate as much."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int
    ) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        with torch.autocast(kind, enabled=False):
            matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
            of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
            d_hidden = torch.empty_like(hidden) if of_hidden else None
            d_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
            d_bias = None
            if bias is not None and of_bias:
                d_bias = torch.zeros_like(bias, dtype=torch.float32)
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            for at in range(0, len(hidden), rows):
                part, aims = hidden[at : at + rows].to(dtype), targets[at : at + rows]
                logits = nn.functional.linear(part, matrix, offset)  # (C, D) -> (C, V)
                log_p = logits.log_softmax(1, dtype=torch.float32)
                total += nn.functional.nll_loss(log_p, aims, ignore_index=IGNORED, reduction="sum")
                if not any(ctx.needs_input_grad):
                    continue
                # (C, V), (C,)
                slope, counts = _slope_(log_p, aims).to(dtype), (aims != IGNORED).to(dtype)
                if d_hidden is not None:
                    d_hidden[at : at + rows] = slope @ matrix * counts[:, None]
                if d_weight is not None and dtype == torch.float32:
                    d_weight.addmm_(slope.T, part * counts[:, None])
                elif d_weight is not None:
                    d_weight += slope.T @ (part * counts[:, None])
                if d_bias is not None:
                    d_bias += counts @ slope
            count = (targets != IGNORED).sum()
        ctx.save_for_backward(d_hidden, count)
        # Not saved: they belong to the weights, not to the activations of `saved_tensors_hooks`.
        ctx.of_weight = d_weight, d_bias
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, count = ctx.saved_tensors
        if ctx.of_weight is None:
            once = "the loss of a chunked head has one backward pass"
            raise RuntimeError(f"{once}; compute it again for a second one")
        of_weight, ctx.of_weight = ctx.of_weight, None
        scale, pairs = slope / count, zip(of_weight, ctx.dtypes, strict=True)
        gradients = [None if grad is None else grad.mul_(scale).to(dtype) for grad, dtype in pairs]
        return None if d_hidden is None else d_hidden * scale, *gradients, None, None


def _slope_(log_p: Tensor, targets: Tensor) -> Tensor:
    """Replace the log softmax, (C, V), by the gradients of the cross entropies by the logits.

    They are not divided by the number of targets yet, or fp16 would round most of them to zero.
    Rows of ignored targets are invalid: the caller skips them where it multiplies with (C, D),
    which is less work.
    """
    at = targets.clamp(min=0)[:, None]
    return log_p.exp_().scatter_add_(1, at, torch.full_like(at, -1, dtype=log_p.dtype))
