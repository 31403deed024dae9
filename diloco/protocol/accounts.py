"""What one peer keeps of the run's accounts: what each version of its anchors is made of. Sans-IO.

records, states, checkpoints -> who is merged, up to where; what of the data is handed out -> states, checkpoints
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from diloco.protocol.actions import Action, Note
from diloco.protocol.dealer import Dealer, Word, fields_of
from diloco.protocol.ledger import Units
from diloco.protocol.membership import Member
from diloco.protocol.messages import Claim, Published, Record, StateHeader, Status
from diloco.protocol.view import View

__all__ = ["CONTROL_FRAGMENT", "MERGED_MEMORY", "Accounts"]

MERGED_MEMORY = 1024  # versions after which it is forgotten who contributed to one
CONTROL_FRAGMENT = 0  # its update records carry the swarm clock and the word on the data; its syncer deals out units


class Accounts(View):
    """The base of `Peer`. What is said of a version goes with that version: who adopts it adopts its accounts."""

    def _begin(self) -> None:
        # fragment -> peer -> base version up to which all is in the anchor
        self._merged: dict[int, dict[str, int]] = {}
        self.dealer = Dealer(self.versions[CONTROL_FRAGMENT])

    # -- contributions ------------------------------------------------------------------------------------------------

    def merged(self, fragment: int) -> dict[str, int]:
        """For each peer the base version up to which its contributions are in the anchor here, or were left out; goes
        with the fragment's state, so that a successor merges nothing again.
        """
        oldest = self.versions[fragment] - MERGED_MEMORY
        return {peer: base for peer, base in self._merged.get(fragment, {}).items() if base >= oldest}

    def restore_merged(self, merged: Sequence[Mapping[str, int]]) -> None:
        """What `merged` was for each fragment when a checkpoint was written."""
        self._merged = {fragment: dict(known) for fragment, known in enumerate(merged)}

    # -- work units ---------------------------------------------------------------------------------------------------

    def lease_units(self, peer: str, wanted: int, has: Iterable[Sequence[int]]) -> Units | None:
        """Lease that many sequences more to a member, or to this peer, who has no others than `has`.

        None when another peer deals them out, and for who is no member (nobody would notice that it is gone).
        """
        member = peer == self.me or peer in self.members
        return self.dealer.lease(peer, wanted, has) if member else None

    def word(self, fragment: int, contributors: Collection[str] | None = None) -> dict[str, Any]:
        if fragment != CONTROL_FRAGMENT:
            return {}
        if contributors is not None and self.dealer.ledger is not None:  # of the version that they are about to make
            return fields_of(self.dealer.after(contributors))
        return fields_of(self.dealer.word(self.versions[fragment]))

    def hear_word(self, said: Claim | Published | Record | StateHeader) -> None:
        """What the author of a version says of the data."""
        if said.fragment == CONTROL_FRAGMENT:
            self.dealer.hear(said)

    def restore_word(self, word: Word) -> None:
        """What the word on this peer's version was when a checkpoint was written."""
        self.dealer.know(self.versions[CONTROL_FRAGMENT], word)

    def _heard_units(self, peer: str, status: Status) -> None:
        if status.state in ("leaving", "done"):
            self.dealer.give_back(peer)
        else:
            self.dealer.has(peer, status.units)

    def _deal(self, fragment: int) -> None:
        """As syncer of the control fragment, deal out units behind what is in the anchor here."""
        if fragment == CONTROL_FRAGMENT:
            said = {member.peer: member.status.units for member in self.members.all() if self._live(member.peer)}
            self.dealer.resume(self.versions[fragment], {**said, self.me: self.units})

    def _apply_units(self, version: int, contributors: Collection[str]) -> list[Action]:
        live = {self.me, *(member.peer for member in self.members.all() if self._live(member.peer))}
        twice = self.dealer.published(version, contributors, live)
        return [Note("units_twice", {"count": twice, "version": version})] if twice else []

    def _live(self, peer: str) -> Member | None:
        member = self.members.get(peer)
        return None if member is None or member.status.state in ("leaving", "done") else member
