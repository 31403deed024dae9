"""Grants, tokens and credentials: small, versioned, and each with exactly one encoding.

    grant       version, run key, invitation key, role, expiry, run id, bound peer id (or none);
                signed by the run key
    token       grant + private half of the invitation key: the text in an invitation
    credential  grant + role + signature of the invitation key over role and peer id: is shown

Each is urlsafe base64 without padding. A reader accepts only the exact text that a writer makes, so
every flipped bit is noticed: there, by a signature, or because two halves of a key do not match.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from diloco.admission.keys import KEY_BYTES, SIGNATURE_BYTES, RunKey, check_private, new_key, verify
from diloco.errors import ConfigError, PayloadError
from diloco.protocol import MAX_CHARACTERS, Role
from diloco.text import decoded

# roles of invitations, most powerful first; the wire has the index
ROLES: tuple[Role, ...] = ("worker", "host", "observer")

VERSION = 1
_HEAD = struct.Struct(f">B{KEY_BYTES}s{KEY_BYTES}sBQ")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PEER = re.compile(r"[1-9A-HJ-NP-Za-km-z]{8,100}|")
_IN_FILE = re.compile(r"(?<=token=)[\w-]+|(?<![\w/-])[\w-]{200,}", re.ASCII)  # in a link, or alone
_GRANT_CONTEXT, _PROOF_CONTEXT = b"diloco grant\0", b"diloco credential\0"


@dataclass(frozen=True)
class Grant:
    """The rights that a run's owner gives to the holder of the private `invitation_key`."""

    run_key: bytes  # public, 32 bytes
    invitation_key: bytes  # public, 32 bytes
    role: Role  # the most powerful role that it allows
    expires_at: int  # Unix time, in whole seconds
    run_id: str
    peer: str  # the only peer that may use it; if empty, the first peer that uses it keeps it
    signature: bytes

    @property
    def token_id(self) -> str:
        """The grant's name in lists and logs: 16 hexadecimal digits."""
        return self.invitation_key[:8].hex()

    @property
    def signed(self) -> bool:
        """True if `run_key` signed the grant."""
        return verify(self.run_key, _GRANT_CONTEXT + self._body(), self.signature)

    def _body(self) -> bytes:
        role = ROLES.index(self.role)
        head = _HEAD.pack(VERSION, self.run_key, self.invitation_key, role, self.expires_at)
        return head + _short(self.run_id) + _short(self.peer)

    def to_bytes(self) -> bytes:
        """Encode the grant, with the signature."""
        return self._body() + self.signature

    @classmethod
    def from_bytes(cls, raw: bytes) -> tuple[Grant, bytes]:
        """Decode the grant at the start of untrusted bytes, unverified; also return the rest."""
        if not raw:
            raise PayloadError("it is empty")
        if len(raw) < _HEAD.size or raw[0] != VERSION:
            raise PayloadError(f"it has version {raw[0]}, this diloco reads {VERSION}")
        _, run_key, invitation_key, role, expires_at = _HEAD.unpack_from(raw)
        run_id, rest = _read_short(raw[_HEAD.size :])
        peer, rest = _read_short(rest)
        if role >= len(ROLES) or not _RUN_ID.fullmatch(run_id) or not _PEER.fullmatch(peer):
            raise PayloadError("its role, run id or peer id is impossible")
        if len(rest) < SIGNATURE_BYTES:
            raise PayloadError("it is cut short")
        signature, rest = rest[:SIGNATURE_BYTES], rest[SIGNATURE_BYTES:]
        grant = cls(run_key, invitation_key, ROLES[role], expires_at, run_id, peer, signature)
        return grant, rest


@dataclass(frozen=True)
class Credential:
    """A grant as used by one peer: for one role, at most the grant's, and for one identity."""

    grant: Grant
    role: Role
    proof: bytes

    def proves(self, peer: str) -> bool:
        """Return True if the owner signed the grant, and the invitation key this peer's id."""
        proven = verify(self.grant.invitation_key, _proof_of(self.role, peer), self.proof)
        lower = ROLES.index(self.role) >= ROLES.index(self.grant.role)
        return proven and self.grant.signed and lower

    def to_text(self) -> str:
        return _to_text(self.grant.to_bytes() + bytes([ROLES.index(self.role)]) + self.proof)

    @classmethod
    def from_text(cls, text: str) -> Credential:
        """Read untrusted text and verify no signature. `PayloadError` describes a fault."""
        grant, rest = Grant.from_bytes(_from_text(text))
        if len(rest) != 1 + SIGNATURE_BYTES or rest[0] >= len(ROLES):
            raise PayloadError("it has the wrong length")
        return cls(grant, ROLES[rest[0]], rest[1:])


@dataclass(frozen=True)
class Token:
    """An invitation. Its text is a secret: keep it out of logs and command lines."""

    grant: Grant
    _seed: bytes

    def __repr__(self) -> str:
        return f"Token({self.grant.token_id})"

    def to_text(self) -> str:
        return _to_text(self.grant.to_bytes() + self._seed)

    def credential(self, peer: str, role: Role | None = None) -> str:
        """Return the text of a `Credential`, in the token's role or in a less powerful one."""
        role = role or self.grant.role
        return Credential(self.grant, role, _key(self._seed).sign(_proof_of(role, peer))).to_text()

    @classmethod
    def from_text(cls, text: str, where: str = "") -> Token:
        """Read a token that a user typed; a `ConfigError` does not repeat it."""
        try:
            grant, seed = Grant.from_bytes(_from_text(text))
        except PayloadError as error:
            unread = f"{where}the token of the invitation cannot be read: {error}"
            raise ConfigError(f"{unread}; copy all of it") from None
        public = _key(seed).public_key().public_bytes_raw() if len(seed) == KEY_BYTES else None
        if public != grant.invitation_key or not grant.signed:
            damaged = f"{where}the token of the invitation is damaged"
            raise ConfigError(f"{damaged}; copy all of it, or ask for a new one")
        return cls(grant, seed)

    @classmethod
    def read(cls, setting: str) -> Token:
        """Read the value of `swarm.token`: a token, or `@FILE`, a file with it or with a link."""
        if not setting.startswith("@"):
            return cls.from_text(setting)
        path = Path(setting[1:])
        try:
            with path.open("rb") as file:
                check_private(file, path, "swarm.token")
                text = decoded(file.read(16 * MAX_CHARACTERS))
        except OSError as error:
            wrong = f"swarm.token={setting} cannot be read: {error.strerror}"
            raise ConfigError(f"{wrong}; name another file") from None
        tokens = set(_IN_FILE.findall(text)) or {text.strip()}
        if len(tokens) > 1:
            wrong = f"swarm.token={setting} holds {len(tokens)} tokens"
            raise ConfigError(f"{wrong}; leave one of them there")
        return cls.from_text(tokens.pop(), f"swarm.token={setting}: ")


def issue(key: RunKey, run_id: str, role: Role, expires_at: int, peer: str = "") -> Token:
    """Issue an invitation to a run; `ConfigError` if the run id or the peer id is invalid."""
    if not _RUN_ID.fullmatch(run_id):
        expected = "1 to 64 letters, digits, '.', '_' or '-'"
        raise ConfigError(f"--run={run_id} is no run id; expected {expected}")
    if not _PEER.fullmatch(peer):
        expected = "one such as QmXoypiz... or 12D3Koo..., as a peer prints"
        raise ConfigError(f"--bind={peer} is no peer id; expected {expected}")
    invitation = new_key()
    public = invitation.public_key().public_bytes_raw()
    unsigned = Grant(key.public, public, role, expires_at, run_id, peer, b"")
    grant = replace(unsigned, signature=key.sign(_GRANT_CONTEXT + unsigned.to_bytes()))
    return Token(grant, invitation.private_bytes_raw())


def _key(seed: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed)


def _proof_of(role: Role, peer: str) -> bytes:
    return _PROOF_CONTEXT + bytes([ROLES.index(role)]) + peer.encode()


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("ascii")


def _read_short(raw: bytes) -> tuple[str, bytes]:
    if not raw or len(raw) <= raw[0]:
        raise PayloadError("it is cut short")
    return raw[1 : 1 + raw[0]].decode("latin-1"), raw[1 + raw[0] :]


def _to_text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _from_text(text: str) -> bytes:
    if len(text) > MAX_CHARACTERS:
        raise PayloadError(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise PayloadError("it has characters that are not base64") from None
    if _to_text(raw) != text:  # some bits of the last character have no meaning
        raise PayloadError("its last character is wrong")
    return raw
