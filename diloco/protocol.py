"""Common terms of the protocol: its version, the roles of peers, and limits of tokens."""

from __future__ import annotations

from typing import Literal

WIRE_VERSION = 13  # raised whenever peers of the old and the new version could not train together

Role = Literal["worker", "host", "observer", "contributor"]

MAX_CHARACTERS = 1024  # the longest token or credential that is read; real ones have about 300
MAX_REVOKED = 4096  # tokens, and as many peers; both together fill a third of a frame


class Schedule:
    """Properties that follow from the settings of when pseudo-gradients are exchanged."""

    quorum: int | None
    staggered: bool
    overlap: int

    @property
    def barrier(self) -> bool:
        """True if a version waits for every live peer; else a quorum closes it."""
        return self.quorum is None

    @property
    def lockstep(self) -> bool:
        """True if all peers exchange all fragments at one barrier, and do not train meanwhile."""
        return self.barrier and not self.staggered and not self.overlap
