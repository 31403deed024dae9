"""What somebody writes who has only docs/extend.md: a file of code for each kind of extension."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.config.registry import REGISTRIES

OUTER_LION = """
from diloco import OuterOptimizer, register

@register
class Lion(OuterOptimizer):
    name = "lion"

    def push(self, theta, momentum, window, delta, lr, beta, delay, last):
        return theta - lr * delta, momentum, window

print("imported")
"""

WEIGHTED_MEDIAN = """
import torch
from diloco import MergeRule, register

@register
class WeightedMedian(MergeRule):
    name = "weighted_median"

    def merge(self, out, parts, pieces):
        values = torch.stack([part.values(out.numel()).clone() for part in parts])
        weights = torch.tensor([part.weight for part in parts], dtype=torch.float64)
        values, order = values.sort(dim=0)
        reached = weights[order].cumsum(0) >= weights.sum() / 2
        out.copy_(values.gather(0, reached.int().argmax(0, keepdim=True))[0])
"""

LION = """
import torch
from diloco import register

@register
class Lion(torch.optim.Optimizer):
    name = "lion"
    moments = ("exp_avg",)

    def __init__(self, groups, inner):
        super().__init__(groups, {"lr": inner.peak_lr, "betas": inner.betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, m, b1).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)
"""

INT6 = """
import torch
from diloco import Codec, register
from diloco.errors import PayloadError
from diloco.outer.payloads import LIMIT, refuse_diverged

BLOCK = 4096

@register
class Int6(Codec):
    name = "int6"

    def widths(self, numel):
        return [4, 3 * -(-numel // 4)]

    def encode(self, x, out):
        refuse_diverged(x, self.name, LIMIT)
        scales, packed = self.pieces(out, x.numel())
        rows = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
        largest = rows.abs().amax(1)
        scales.copy_(largest.view(torch.uint8))
        codes = (rows / largest.clamp_min(1e-38)[:, None] * 31).round().int() + 32
        a, b, c, d = codes.view(-1, 4).unbind(1)
        bits = a | b << 6 | c << 12 | d << 18
        triples = torch.stack([bits, bits >> 8, bits >> 16], dim=1) & 255
        packed.copy_(triples.flatten()[: packed.numel()])

    def decode(self, payload, out):
        scales, packed = self.pieces(payload, out.numel())
        scales = scales.clone().view(torch.float32)
        if not bool((scales >= 0).all() & (scales <= LIMIT).all()):
            raise PayloadError("int6 payload holds an impossible scale")
        low, middle, high = packed.int().view(-1, 3).unbind(1)
        bits = low | middle << 8 | high << 16
        codes = torch.stack([bits >> shift & 63 for shift in (0, 6, 12, 18)], dim=1) - 32
        values = codes.flatten()[: out.numel()] / 31
        out.copy_(values * scales.repeat_interleave(BLOCK)[: out.numel()])
"""

POEMS = """
from diloco import DataSource, register

@register
class Poems(DataSource):
    name = "poems"

    def documents(self, settings):
        for number in range(400):
            yield f"Roses are red, violets are {number}." * 20
"""

OWN = {"weighted_median": WEIGHTED_MEDIAN, "lion": LION, "int6": INT6, "poems": POEMS}


@contextmanager
def registering(*code: str) -> Iterator[None]:
    """What this code and the context register is forgotten after it."""
    kept = [(one, dict(one.traits), dict(one.found)) for one in REGISTRIES]
    for one in code:
        exec(one, {})
    yield
    for one, traits, found in kept:
        one.traits, one.found = traits, found


def installed(folder: Path, **points: str) -> str:
    """A package `others` as pip leaves it, with these entry points, and modules that some of them
    may name."""
    about = folder / "others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (about / "entry_points.txt").write_text(f"[diloco.extensions]\n{lines}")
    (folder / "lion_code.py").write_text(OUTER_LION)
    (folder / "json_code.py").write_text("print('imported too')\n")
    return str(folder)
