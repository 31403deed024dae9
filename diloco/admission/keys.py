"""The run key, an Ed25519 key pair, and the list of revocations that the owner signs with it.

The private half signs invitations to a run, the public half verifies them. Any peer may pass the
list on.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from diloco.atomic import replace_file
from diloco.errors import ConfigError
from diloco.protocol import MAX_REVOKED

logger = logging.getLogger(__name__)

KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_FILE_BYTES = 4096


class RunKey:
    """The private half. Its holder can invite and revoke; a run cannot change its key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @property
    def public(self) -> bytes:
        """The public half: 32 bytes."""
        return self._private.public_key().public_bytes_raw()

    def sign(self, content: bytes) -> bytes:
        """Return the signature, 64 bytes; equal content has equal signatures."""
        return self._private.sign(content)

    def seal(self, run_id: str, manifest_hash: str) -> str:
        """Return the signature (hex) by which peers know that a manifest is the owner's."""
        return self.sign(_content("manifest", run_id, manifest_hash)).hex()

    @classmethod
    def create(cls, path: Path) -> RunKey:
        """Create a key in a new file that only its owner can read; raises ConfigError."""
        key = cls(new_key())
        kinds = serialization
        text = key._private.private_bytes(
            kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, kinds.NoEncryption()
        )
        write_private(path, text, f"FILE={path}")
        return key

    @classmethod
    def read(cls, path: Path, setting: str = "swarm.key_path") -> RunKey:
        """Read a key that `create` (or openssl) wrote; a `ConfigError` names `setting`."""
        try:
            with path.open("rb") as file:
                check_private(file, path, setting)
                content = file.read(MAX_FILE_BYTES)
            private = serialization.load_pem_private_key(content, password=None)
        except OSError as error:
            wrong = f"{setting}={path} cannot be read: {error.strerror}"
            raise ConfigError(f"{wrong}; diloco keygen makes a key") from None
        except (ValueError, TypeError):  # TypeError: the file has a password
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError(f"{setting}={path} holds no run key; diloco keygen makes one")
        return cls(private)


def write_private(path: Path, content: bytes, title: str) -> None:
    """Write a new file that only its owner can read; a ConfigError begins with `title`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{title} cannot be written: {error.strerror}; name a new file") from None


def new_key() -> Ed25519PrivateKey:
    """Create a key from the system's random numbers."""
    return Ed25519PrivateKey.generate()


def check_private(file: IO[Any], path: Path, setting: str) -> None:
    """Raise `ConfigError` if others can read our secret; warn where files have no modes."""
    status = os.fstat(file.fileno())
    if status.st_uid != os.getuid() or not status.st_mode & 0o077:
        return
    with suppress(OSError):
        os.fchmod(file.fileno(), 0o600)
    if os.fstat(file.fileno()).st_mode & 0o077:
        _warn_of(path.parent)
        return
    os.fchmod(file.fileno(), status.st_mode & 0o777)
    secret = f"{setting}={path} holds a secret, and other users of this machine can read it"
    raise ConfigError(f"{secret}; chmod 600 {path}")


@functools.cache
def _warn_of(folder: Path) -> None:
    line = "%s is on a file system without modes: others may read the secrets there"
    logger.warning(line, folder)


def is_sealed(run_key: bytes, run_id: str, manifest_hash: str, seal: str) -> bool:
    """Return True if the run's owner signed the manifest with this hash; `seal` may be any text."""
    return _signed(run_key, _content("manifest", run_id, manifest_hash), seal)


def _signed(public: bytes, content: bytes, digits: str) -> bool:
    try:
        return verify(public, content, bytes.fromhex(digits))
    except ValueError:
        return False


def verify(public: bytes, content: bytes, signature: bytes) -> bool:
    """Return True if `signature` is valid for `content`. All three may be arbitrary bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Revoked:
    """A revocation list. Of two with valid signatures the one with the higher number counts."""

    number: int = 0
    token_ids: tuple[str, ...] = ()
    peer_ids: tuple[str, ...] = ()
    signature: str = ""  # hexadecimal digits

    @classmethod
    def of(
        cls, number: int, token_ids: Iterable[str], peer_ids: Iterable[str], signature: str
    ) -> Revoked:
        """Return a list as it was read, unverified."""
        tokens, peers = tuple(map(str, token_ids)), tuple(map(str, peer_ids))
        return cls(int(number), tokens, peers, str(signature))

    @classmethod
    def sign(
        cls,
        key: RunKey,
        run_id: str,
        number: int,
        token_ids: Iterable[str],
        peer_ids: Iterable[str],
    ) -> Revoked:
        """Sign a list with this number; `ConfigError` if it is too long."""
        tokens, peers = tuple(sorted(set(token_ids))), tuple(sorted(set(peer_ids)))
        if max(len(tokens), len(peers)) > MAX_REVOKED:
            raise ConfigError(f"more than {MAX_REVOKED} are revoked; start a run with a new key")
        signature = key.sign(_content("revoked", run_id, number, tokens, peers))
        return cls(number, tokens, peers, signature.hex())

    def extended(
        self,
        key: RunKey,
        run_id: str,
        token_ids: Iterable[str],
        peer_ids: Iterable[str],
        above: int = 0,
    ) -> Revoked:
        """Return a longer list, which replaces this one and all with numbers up to `above`."""
        tokens, peers = {*self.token_ids, *token_ids}, {*self.peer_ids, *peer_ids}
        return self.sign(key, run_id, 1 + max(self.number, above), tokens, peers)

    @classmethod
    def remembered(cls, key: RunKey, key_path: Path, run_id: str) -> Revoked:
        """Return the list that `remember` wrote beside the key, signed anew; else an empty one."""
        content = _remembered(key_path).get(run_id)
        return cls() if content is None else cls.sign(key, run_id, *content)

    def remember(self, key_path: Path, run_id: str) -> None:
        """Write the list beside the key, for the next list, should no peer of the run be left."""
        lists = {**_remembered(key_path), run_id: (self.number, self.token_ids, self.peer_ids)}
        path = _place(key_path)
        try:
            replace_file(path, (json.dumps(lists, indent=2) + "\n").encode())
        except OSError as error:
            remedy = "it keeps the revocations, make its directory writable"
            raise ConfigError(f"{path} cannot be written: {error.strerror}; {remedy}") from None

    def signed_by(self, run_key: bytes, run_id: str) -> bool:
        """Return True if the owner of this run signed the list."""
        content = _content("revoked", run_id, self.number, self.token_ids, self.peer_ids)
        return _signed(run_key, content, self.signature)

    def names(self, token_id: str, peer: str) -> bool:
        """Return True if the list has this token or this peer."""
        return token_id in self.token_ids or peer in self.peer_ids


def _place(key_path: Path) -> Path:
    return key_path.with_name(f"{key_path.name}.revoked.json")


def _remembered(key_path: Path) -> dict[str, tuple[int, list[str], list[str]]]:
    path = _place(key_path)
    try:
        lists = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return {
            run: (int(number), list(tokens), list(peers))
            for run, (number, tokens, peers) in lists.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"{path} is not what diloco revoke wrote; restore it from a copy, as without it those"
            " whom you revoked come in again"
        ) from None


def _content(label: str, *values: object) -> bytes:
    """Return the bytes to sign; the label keeps a signature of one kind from use as another."""
    return f"diloco {label}\0{json.dumps(values, separators=(',', ':'))}".encode()
