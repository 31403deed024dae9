"""Signatures of libp2p identities. A peer id is the hash of an RSA key, and a signature contains
that key: a receiver can check it without a key store or a third party.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import base58
import msgpack
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from diloco.admission.keys import check_private
from diloco.errors import ConfigError

MAX_KEY_BYTES = 1024
WORD = b"diloco word"  # context of signatures other than those of DHT records
_RSA = b"\x08\x00\x12"  # protobuf: field 1 is the type, 0 for RSA; field 2 the key
_NO_SIGNATURE = (ValueError, TypeError, RecursionError, msgpack.UnpackException)


class SigningKey:
    """Private key of a peer. Signing takes 0.2 ms, and a check 0.02 ms."""

    def __init__(self, key: rsa.RSAPrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.me = _known(self.public)[0]

    @classmethod
    def read(cls, path: Path) -> SigningKey:
        """Read the key in a file, which is made if missing; `ConfigError` if it holds no key."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _make_identity(path)
            with path.open("rb") as file:
                check_private(file, path, "swarm.identity_path")
                private = file.read()
        except OSError as error:
            why = f"swarm.identity_path={path} cannot be used: {error.strerror}; name another file"
            raise ConfigError(why) from None
        key: object = None
        with suppress(Exception):  # of the cryptography library
            der = private[len(_RSA) + 2 :]
            if private == _as_libp2p(der):
                key = serialization.load_der_private_key(der, password=None)
        if not isinstance(key, rsa.RSAPrivateKey):
            why = f"swarm.identity_path={path} holds no private key"
            raise ConfigError(f"{why}; name another file, or a new one")
        return cls(key)

    def sign(self, context: bytes, content: bytes) -> bytes:
        """Return a signature with its key (556 bytes), which is valid in this context only."""
        signature = self._key.sign(context + b"\0" + content, padding.PKCS1v15(), hashes.SHA256())
        return bytes(msgpack.packb([self.public, signature]))


def own_id(path: Path) -> str:
    """Return the peer id of the key in a file; see `SigningKey.read`."""
    return SigningKey.read(path).me


def identity_number(path: Path) -> int:
    """Return a number below 2**48 derived from the key in a file; see `SigningKey.read`."""
    return int.from_bytes(hashlib.sha256(own_id(path).encode()).digest()[:6], "big")


def verify(context: bytes, peer: str, content: bytes, signature: bytes) -> bool:
    """Return True if the peer has signed the content in that context. Never raises."""
    try:
        public, signed = msgpack.unpackb(signature)
        if len(public) > MAX_KEY_BYTES:
            return False
        owner, key = _known(public)
        key.verify(signed, context + b"\0" + content, padding.PKCS1v15(), hashes.SHA256())
    except (*_NO_SIGNATURE, UnsupportedAlgorithm, InvalidSignature):
        return False
    return owner == peer


@lru_cache(maxsize=4096)
def _known(public: bytes) -> tuple[str, rsa.RSAPublicKey]:
    """Return libp2p's peer id of an RSA key (DER), and the key; or raise `ValueError`."""
    key = serialization.load_der_public_key(public)
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError("not an RSA key")
    # multihash: SHA-256, 32 bytes
    named = b"\x12\x20" + hashlib.sha256(_as_libp2p(public)).digest()
    return base58.b58encode(named).decode(), key


def _as_libp2p(der: bytes) -> bytes:
    """Return a DER key as libp2p's protobuf message of an RSA key, public or private."""
    nbytes = len(der)
    assert 2**7 <= nbytes < 2**14, "such a length is a varint of two bytes"
    return _RSA + bytes((nbytes & 127 | 128, nbytes >> 7)) + der


def _make_identity(path: Path) -> None:
    """Write a new key, which other users can never read."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    der = key.private_bytes(
        serialization.Encoding.DER,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as private:
        file = Path(private, "key")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as writer:
            writer.write(_as_libp2p(der))
        os.replace(file, path)
