"""What a peer does, as it says itself. A figure is one field: by what the field declares, it is
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
    "tokens/s": human_count,
    "bytes": human_bytes,
    "nats": "{:.2f}".format,
    "steps/s": lambda pace: f"{pace:.2f}" if pace else "-",
    "s": "{:.0f} s".format,
    "phases": lambda seconds: f"{seconds.utilization:.0%}" if seconds.total else "-",
    "days": lambda seconds: f"{seconds / 86_400:.1f}",
}


@dataclass(frozen=True)
class Shown:
    """How a field is shown; it stands in the field's annotation.

    Attributes:
        title: of its column; without one it is in no table.
        unit: a key of `UNITS`, or any other, which is written behind the number.
        meaning: its line for Prometheus; without one it is no gauge.
        line: its part in a line of the terminal (default: the value, then the title).
        of_all: makes the figure of the swarm from those of its peers; None if there is none.
        rank: columns of a higher one go first where there is no room; 0 stays.
        limit: a value above is marked as bad.
        logged: it is in the line of each outer step in metrics.jsonl, and in wandb.
    """

    title: str = ""
    unit: str = ""
    meaning: str = ""
    line: str | None = None
    of_all: Callable[[Iterable[float]], float] | None = sum
    rank: int = 0
    limit: float = float("inf")
    logged: bool = True

    def text(self, value: Any) -> str:
        """Format a value; "-" if it is not known."""
        if value is None:
            return "-"
        return UNITS[self.unit](value) if self.unit in UNITS else f"{human_count(value)}{self.unit}"

    def together(self, peers: Iterable[Any], name: str) -> float | None:
        """Return the swarm's figure, of the field `name` of those peers that know it."""
        known = [value for peer in peers if (value := getattr(peer, name)) is not None]
        return self.of_all(known) if known and self.of_all is not None else None

    def in_line(self, value: Any) -> str:
        """Format a value as a part of a line; empty if it is in none."""
        line = f"{{}} {self.title}".rstrip() if self.line is None else self.line
        return line.format(self.text(value)) if self.title else ""


@cache
def shown(kind: type[Struct]) -> Mapping[str, Shown]:
    """Return the fields of a schema that declare how they are shown, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hints[name], "__metadata__", ()) for name in kind.__struct_fields__}
    return {name: mark for name in marks for mark in marks[name] if isinstance(mark, Shown)}


class PeerFigures(Struct, frozen=True):
    """Figures of a peer over all its sessions; None is not known.

    Attributes:
        loss, eval_loss: nats per token: mean of the last inner steps; held-out, of the anchor.
        tokens: processed. discarded: of these, the ones that no version contains.
        bytes_sent, bytes_received: over all streams.
        rounds: measured in this session. trained_s: wall seconds of its training loop.
    """

    loss: Annotated[
        fields.Loss | None, Shown("loss", "nats", line="loss {}", of_all=None, logged=False)
    ] = None
    eval_loss: Annotated[
        fields.Loss | None,
        Shown("held-out", "nats", line="held-out {}", of_all=None, logged=False),
    ] = None
    tokens_per_s: Annotated[
        fields.Pace | None, Shown("tok/s", "tokens/s", "Tokens per second", rank=1, logged=False)
    ] = None
    bytes_sent: Annotated[fields.Bytes, Shown("sent", "bytes", "Bytes sent", rank=1)] = 0
    bytes_received: Annotated[
        fields.Bytes, Shown("received", "bytes", "Bytes received", line="", rank=2)
    ] = 0
    tokens: Annotated[
        fields.Tokens, Shown("tokens", "tokens", "Tokens processed", line="", rank=2, logged=False)
    ] = 0
    discarded: Annotated[fields.Tokens, Shown(of_all=None)] = 0
    rounds: fields.Count = 0
    trained_s: Annotated[fields.Seconds, Shown(meaning="Seconds of training", of_all=None)] = 0.0

    def shared(self) -> dict[str, Any]:
        """Return these figures by name, for another schema that has them, too."""
        return {name: getattr(self, name) for name in PeerFigures.__struct_fields__}
