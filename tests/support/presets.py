"""Small twins of the presets."""

from __future__ import annotations

SMALL = {
    "diloco": [],
    "streaming": ["outer.overlap=1"],
    "async": ["budget.outer_steps=6"],
    "async_nesterov": ["budget.outer_steps=6", "outer.lr=0.1"],
    "decoupled": ["outer.overlap=1", "budget.outer_steps=6"],
    "sparse": [],
    "two_bit": [],
}
SIZES = ["outer.sync_every=4", "outer.fragments=2"]


def name_of(run: tuple[str, ...]) -> str:
    return run[0].partition("=")[2]


RUNS = [(f"outer={name}", *SIZES, *settings) for name, settings in SMALL.items()]
