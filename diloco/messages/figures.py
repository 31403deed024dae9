"""Figures of a peer, as it says itself. A figure is one field: by what the field declares, it is
shown in `diloco status`, on the page, to Prometheus and wandb, on the terminal, in summary.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

from msgspec import Struct

from diloco.messages import fields
from diloco.text import human_bytes, human_count

UNITS: dict[str, Callable[[Any], str]] = {  # how a value of a unit is written
    "": str,
    "tokens": human_count,
    "bytes": human_bytes,
    "nats": "{:.2f}".format,
    "steps/s": lambda pace: f"{pace:.2f}" if pace else "-",
    "s": "{:.0f} s".format,
    "days": lambda seconds: f"{seconds / 86_400:.1f}",
    "text": lambda text: text or "-",
    "id": lambda name: name[:8],
    "spent": lambda spent: (
        f"{spent.compute:.1f}, {spent.wait:.1f}, {spent.comm + spent.outer:.1f} s"
    ),
    "busy": lambda seconds: f"{seconds.utilization:.0%}" if seconds.total else "-",
}


@dataclass(frozen=True)
class Shown:
    """How a field is shown; it stands in the field's annotation.

    Attributes:
        title: of its column; without one it is in no table.
        unit: a key of `UNITS`, or any other, which is written behind the number.
        meaning: for Prometheus; without one it is no gauge.
        rank: columns of a higher one go first where there is no room; 0 stays.
        adds: the sum over the peers, of a gauge, is a figure of the swarm.
        limit: a value above is marked as bad.
        first: its column stands before the others.
    """

    title: str = ""
    unit: str = ""
    meaning: str = ""
    rank: int = 0
    adds: bool = True
    limit: float = float("inf")
    first: bool = False

    def text(self, value: Any) -> str:
        """Format a value; "-" if it is not known."""
        if value is None:
            return "-"
        return UNITS[self.unit](value) if self.unit in UNITS else f"{value}{self.unit}"


@cache
def shown(kind: Any) -> Mapping[str, Shown]:
    """Return the fields of a schema that declare how they are shown, in the order of columns."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hints[name], "__metadata__", ()) for name in kind.__struct_fields__}
    known = [(name, mark) for name in marks for mark in marks[name] if isinstance(mark, Shown)]
    return dict(sorted(known, key=lambda item: not item[1].first))


def together(peers: Iterable[Any], kind: Any) -> dict[str, float]:
    """Return the sums of those gauges of a schema that add, over the peers that know them."""
    rows, sums = list(filter(None, peers)), dict[str, float]()
    for name, mark in shown(kind).items():
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        if mark.meaning and mark.adds and known:
            sums[name] = sum(known)
    return sums


class PeerFigures(Struct, frozen=True):
    """Figures of a peer over all its sessions; None is not known.

    Attributes:
        loss, eval_loss: nats per token: mean of the last inner steps; held-out, of the anchor.
        tokens: processed. discarded: of these, the ones that no version contains.
        bytes_sent, bytes_received: over all streams.
        rounds: measured in this session. trained_s: wall seconds of its training loop.
    """

    loss: Annotated[fields.Loss | None, Shown("loss", "nats", adds=False)] = None
    eval_loss: Annotated[fields.Loss | None, Shown("held-out", "nats", adds=False)] = None
    tokens_per_s: Annotated[
        fields.Pace | None, Shown("tok/s", "tokens", "Tokens per second", rank=1)
    ] = None
    bytes_sent: Annotated[fields.Bytes, Shown("sent", "bytes", "Bytes sent", rank=1)] = 0
    bytes_received: Annotated[
        fields.Bytes, Shown("received", "bytes", "Bytes received", rank=2)
    ] = 0
    tokens: Annotated[fields.Tokens, Shown("tokens", "tokens", "Tokens processed", rank=2)] = 0
    discarded: Annotated[fields.Tokens, Shown(adds=False)] = 0
    rounds: fields.Count = 0
    trained_s: Annotated[fields.Seconds, Shown(meaning="Seconds of training", adds=False)] = 0.0

    def shared(self) -> dict[str, Any]:
        """Return these figures by name, for another schema that has them, too."""
        return {name: getattr(self, name) for name in PeerFigures.__struct_fields__}
