"""The owner's list of revoked invitations and peers. It is signed and numbered, and any peer may pass it on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diloco.admission.keys import RunKey, verify
from diloco.errors import ConfigError

__all__ = ["MAX_REVOKED", "Revoked"]

MAX_REVOKED = 4096  # tokens, and as many peers; both together fill a third of a frame
_CONTEXT = b"diloco revoked\0"


@dataclass(frozen=True)
class Revoked:
    """A revocation list. Of two lists with valid signatures the one with the higher number replaces the other."""

    number: int
    token_ids: tuple[str, ...]
    peer_ids: tuple[str, ...]
    signature: bytes

    @classmethod
    def sign(cls, key: RunKey, run_id: str, number: int, token_ids: Iterable[str], peer_ids: Iterable[str]) -> Revoked:
        """A signed list with this number; `ConfigError` if it is too long."""
        tokens, peers = tuple(sorted(set(token_ids))), tuple(sorted(set(peer_ids)))
        if max(len(tokens), len(peers)) > MAX_REVOKED:
            raise ConfigError(f"more than {MAX_REVOKED} are revoked; start a run with a new key")
        return cls(number, tokens, peers, key.sign(_content(run_id, number, tokens, peers)))

    @classmethod
    def remembered(cls, key: RunKey, key_path: Path, run_id: str) -> Revoked:
        """The list that `remember` wrote beside the key, signed again; without one, an empty list with number 0."""
        content = _remembered(key_path).get(run_id)
        return cls(0, (), (), b"") if content is None else cls.sign(key, run_id, *content)

    def remember(self, key_path: Path, run_id: str) -> None:
        """Write the list beside the key: the next list continues it, also when no peer of the run is left."""
        lists = {**_remembered(key_path), run_id: (self.number, self.token_ids, self.peer_ids)}
        place = _place(key_path)
        try:
            place.write_text(json.dumps(lists, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"{place} cannot be written: {error.strerror}; it keeps the revocations, make its directory writable"
            ) from None

    def signed_by(self, run_key: bytes, run_id: str) -> bool:
        """Whether the owner of this run signed it."""
        return verify(run_key, _content(run_id, self.number, self.token_ids, self.peer_ids), self.signature)

    def names(self, token_id: str, peer: str) -> bool:
        """Whether the list has this token or this peer."""
        return token_id in self.token_ids or peer in self.peer_ids


def _place(key_path: Path) -> Path:
    return key_path.with_name(f"{key_path.name}.revoked.json")


def _remembered(key_path: Path) -> dict[str, tuple[int, list[str], list[str]]]:
    place = _place(key_path)
    try:
        lists = json.loads(place.read_text()) if place.exists() else {}
        return {run: (int(number), list(tokens), list(peers)) for run, (number, tokens, peers) in lists.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise ConfigError(f"{place} is not what diloco revoke wrote; repair or delete it") from None


def _content(run_id: str, number: int, tokens: tuple[str, ...], peers: tuple[str, ...]) -> bytes:
    return _CONTEXT + json.dumps([run_id, number, tokens, peers], separators=(",", ":")).encode()
