"""The run key: an Ed25519 key pair. Its private half signs invitations to a run, its public half verifies them."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from diloco.errors import ConfigError

__all__ = ["KEY_BYTES", "SIGNATURE_BYTES", "RunKey", "new_key", "verify"]

KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_FILE_BYTES = 4096


class RunKey:
    """The private half. Anybody who has the file can invite and revoke; a run cannot change its key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @property
    def public(self) -> bytes:
        """The public half: the 32 bytes that verify signatures of this key."""
        return self._private.public_key().public_bytes_raw()

    def sign(self, what: bytes) -> bytes:
        """The signature, 64 bytes; equal content has equal signatures."""
        return self._private.sign(what)

    @classmethod
    def create(cls, path: Path) -> RunKey:
        """Make a key and write it to a file that only its owner can read.

        Raises ConfigError: the file exists or cannot be written.
        """
        key = cls(new_key())
        text = key._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"FILE={path} exists, and may be the key of a run; name another file") from None
        except OSError as error:
            raise ConfigError(f"FILE={path} cannot be written: {error.strerror}; name another file") from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        return key

    @classmethod
    def read(cls, path: Path, setting: str = "swarm.key_path") -> RunKey:
        """The key in a file that `create` (or openssl) wrote.

        Raises ConfigError: the file is unreadable or holds no run key; the text names `setting`.
        """
        try:
            with path.open("rb") as file:
                private = serialization.load_pem_private_key(file.read(MAX_FILE_BYTES), password=None)
        except OSError as error:
            raise ConfigError(f"{setting}={path} cannot be read: {error.strerror}; diloco keygen makes a key") from None
        except (ValueError, TypeError):  # TypeError: the file has a password
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise ConfigError(f"{setting}={path} holds no run key; diloco keygen makes one")
        return cls(private)


def new_key() -> Ed25519PrivateKey:
    """A new key from the system's random numbers."""
    return Ed25519PrivateKey.generate()


def verify(public: bytes, what: bytes, signature: bytes) -> bool:
    """Whether `signature` is valid for `what` under this public key. All three may be arbitrary bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, what)
    except (InvalidSignature, ValueError):
        return False
    return True
