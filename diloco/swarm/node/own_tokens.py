"""What became of this peer's own contributions to the control fragment. No clock, no network.

A version that this peer has may be replaced by one of another history, for example when a swarm that was split meets
again. Then tokens that were applied may be missing from the anchor, and tokens that were left out may be in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from diloco.protocol.numbers import forget_oldest

__all__ = ["COUNTED", "OwnTokens", "Recount"]

COUNTED = 1024  # contributions whose fate is remembered


class Recount(NamedTuple):
    """Tokens by base version that another history changes."""

    lost: Mapping[int, int]  # were applied, and are discarded now
    found: Mapping[int, int]  # are applied after all


class OwnTokens:
    """Tokens by the version that they were learned from, for the newest `COUNTED` contributions of either fate."""

    def __init__(self, applied: Mapping[int, int] | None = None) -> None:
        self._applied = dict(sorted((applied or {}).items()))
        self._left_out: dict[int, int] = {}
        self._balance = 0  # found to be lost since `take_lost`, less those that were found to be applied
        forget_oldest(self._applied, COUNTED)

    @property
    def applied(self) -> dict[int, int]:
        """Tokens in the anchor, for a checkpoint."""
        return dict(self._applied)

    def was_applied(self, base_version: int, tokens: int) -> None:
        """A contribution is in the anchor."""
        self._applied[base_version] = tokens
        forget_oldest(self._applied, COUNTED)

    def was_left_out(self, base_version: int, tokens: int) -> None:
        """The swarm went on without a contribution."""
        self._left_out[base_version] = tokens
        forget_oldest(self._left_out, COUNTED)

    def recount(self, newest: int, total: int) -> Recount:
        """The anchor was replaced by one with `total` tokens of this peer, the last from base version `newest`.

        What it lacks of this peer's tokens is discarded. Its newest contribution there is applied, though this peer
        believed that it had been left out; so are earlier ones, as far as the total says that they are in it. (Nothing
        is known while the fate of the newest is open.) Without any, `newest` is -1.
        """
        lost = {base: tokens for base, tokens in self._applied.items() if base > newest}
        for base in lost:
            del self._applied[base]
        found: dict[int, int] = {}
        settled = newest in self._applied or newest in self._left_out
        missing = total - sum(self._applied.values()) if settled else 0
        for base in sorted((base for base in self._left_out if base <= newest), reverse=True):
            tokens = self._left_out[base]
            if base not in self._applied and (base == newest or tokens <= missing):
                missing -= tokens
                found[base] = self._left_out.pop(base)
        self._left_out.pop(newest, None)
        for base, tokens in lost.items():
            self.was_left_out(base, tokens)
        for base in sorted(found):
            self.was_applied(base, found[base])
        self._balance += sum(lost.values()) - sum(found.values())
        return Recount(lost, found)

    def take_lost(self) -> int:
        """Tokens that recounts discarded since this was asked last; negative when more were applied after all."""
        lost, self._balance = self._balance, 0
        return lost
