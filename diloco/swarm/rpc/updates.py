"""Encoded updates in parts, each of which has a digest and is passed on as soon as it is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3
from torch import Tensor

from diloco.messages.bulk import UPDATE_PARTS
from diloco.messages.heads import Head, digest

LEAST_PART = 2**14  # bytes; smaller parts cost more than they save


def payload_digest(payload: Tensor) -> str:
    """Digest (hex) of encoded bytes (uint8)."""
    return blake3(payload.numpy().data).hexdigest()


def update_ranges(nbytes: int) -> list[tuple[int, int]]:
    """The half-open ranges of bytes of the parts of an update; only the last is shorter."""
    size = max(LEAST_PART, -(-nbytes // UPDATE_PARTS))
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


def update_digest(digests: tuple[str, ...]) -> str:
    """Digest (hex) of an update in its head, from those of its parts."""
    return digests[0] if len(digests) == 1 else digest("update", digests)


class Update(NamedTuple):
    """An encoded update (uint8), and the digests of its parts."""

    payload: Tensor
    digests: tuple[str, ...]

    @classmethod
    def of(cls, payload: Tensor) -> Update:
        """Make an update of an encoded payload. This hashes it, so call it in a thread."""
        ranges = update_ranges(payload.numel())
        return cls(payload, tuple(payload_digest(payload[start:stop]) for start, stop in ranges))

    def part(self, number: int) -> Tensor:
        """The bytes of a part, as a view."""
        start, stop = update_ranges(self.payload.numel())[number]
        return self.payload[start:stop]


@dataclass(eq=False)
class Arrival:
    """A record whose update is arriving. Peers that fetch it from here wait for `parts` while its
    own stream is `live`, or was a short while ago; another donor continues where it broke."""

    head: Head
    update: Update
    parts: int = 0  # parts that are here and match their digests
    live: bool = True

    @property
    def is_whole(self) -> bool:
        """True if all parts are here."""
        return self.parts == len(self.update.digests)
