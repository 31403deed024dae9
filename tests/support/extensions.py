"""Outer optimizers and codecs in files of a user's own."""

from __future__ import annotations

from pathlib import Path

MISSING = (
    "is not installed here; expected one of nesterov, delayed_nesterov, or ask whoever started the"
    " run which package has it"
)

LION = """
from diloco import OuterOptimizer, register

@register
class Lion(OuterOptimizer):
    name = "lion"

    def push(self, theta, momentum, window, delta, lr, beta, delay, last):
        return theta - lr * delta, momentum, window

print("imported")
"""


def installed(folder: Path, **points: str) -> str:
    """A package `others` as pip leaves it, with these entry points, and modules that some of them
    may name."""
    about = folder / "others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (about / "entry_points.txt").write_text(f"[diloco.extensions]\n{lines}")
    (folder / "lion_code.py").write_text(LION)
    (folder / "json_code.py").write_text("print('imported too')\n")
    return str(folder)
