"""Decides which peers may take part, by their credentials. Sans-IO: the caller passes `now`, Unix
time."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from diloco.admission.invitation import Credential, Grant, Role, Token
from diloco.admission.keys import Revoked
from diloco.atomic import replace_file
from diloco.errors import ConfigError, PayloadError

__all__ = ["Admission", "Memory"]

logger = logging.getLogger(__name__)

TOLERANCE_S = 60  # clocks of honest peers differ by less: `doctor` and `join` check it
MAX_OBSERVERS = 256  # admitted at a time; an observer may come with a new identity each time
MAX_CONTRIBUTORS = 4096  # so may a contributor; the first ones have to greet again
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
_REVOKED = "the owner of the run has revoked the invitation of this peer; ask for a new one"


class Memory:
    """Whom a peer refuses, kept over restarts in a file for each peer and run; without one, as long
    as the process.

    `revoked` is the newest list of the run's owner, `users` the first peer that used a token, by
    the token's id, `seal` that of the manifest, "" while nobody has shown it. A damaged file is a
    ConfigError; one that cannot be written is a warning, and the run goes on.
    """

    def __init__(self, path: Path | None = None, scope: str = "") -> None:
        """`scope`: run id, and its key or the hash of its manifest; a file of another one counts as
        none."""
        self.revoked, self.users, self.seal = Revoked(), dict[str, str](), ""
        self._path, self._scope = path, scope
        if path is None or not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["scope"] == scope:
                self.revoked = Revoked.of(**content["revoked"])
                self.users = {str(token): str(peer) for token, peer in content["users"].items()}
                self.seal = str(content["seal"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(
                f"{path} keeps whom this peer refuses, and is damaged; restore it, or delete it to"
                " refuse nobody"
            ) from None

    def keep(self) -> None:
        """Write everything to the file."""
        if self._path is None:
            return
        content = {
            "scope": self._scope,
            "revoked": asdict(self.revoked),
            "users": self.users,
            "seal": self.seal,
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, (json.dumps(content, indent=1) + "\n").encode(), 0o600)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): the next start forgets whom it refused",
                self._path,
                error,
            )


class Admission:
    """One peer's record of who has been admitted to the run of `token`, this peer's own invitation.

    A peer is admitted by a valid credential, until the credential expires or is revoked. A `public`
    run also admits who shows none, as contributor, until its identity is revoked; a peer that is
    one itself has no token, and names the run by key and id. Untrusted input never raises: `admit`
    returns a reason to refuse, `revoke` returns False.
    """

    def __init__(
        self,
        token: Token | None,
        memory: Memory | None = None,
        public: bool = False,
        run: tuple[bytes, str] = (b"", ""),
    ) -> None:
        self.token, self.public = token, public
        self.run_key, self.run_id = (
            run if token is None else (token.grant.run_key, token.grant.run_id)
        )
        self.memory = memory or Memory()
        self.revoked = Revoked()
        self.revoke(self.memory.revoked)
        self._admitted: dict[str, Credential | None] = {}  # None is a contributor's

    @property
    def unknown(self) -> str:
        """Why a peer that has not greeted may do nothing, with the remedy."""
        if self.public:
            return "whoever contributes to this run greets first; call again"
        return (
            "this run admits invited peers only; ask its owner for a link, or give"
            " swarm.token=@FILE"
        )

    def admit(self, peer: str, text: str, now: float) -> str | None:
        """Admit an authenticated peer by its credential; returns None, or why it is refused, with
        the remedy."""
        credential = None
        if text:
            try:
                credential = Credential.from_text(text)
            except PayloadError as error:
                return f"the credential cannot be read: {error}"
            reason = self._objection(peer, credential, now)
        elif self.public:
            reason = self._lapsed(peer, None, now)
        else:
            reason = self.unknown
        if reason is None and (credential is not None or self.role_of(peer, now) is None):
            self._admitted[peer] = credential
            for role, most in (("observer", MAX_OBSERVERS), ("contributor", MAX_CONTRIBUTORS)):
                crowd = [one for one, shown in self._admitted.items() if _role(shown) == role]
                for one in crowd[:-most]:
                    del self._admitted[one]
        return reason

    def invited(self, peer: str) -> bool:
        """Whether the owner ever invited this peer to more than to look on, as far as it has shown
        that here."""
        return peer in self.memory.users.values()

    def role_of(self, peer: str, now: float) -> Role | None:
        """The role of an admitted peer; None for any other."""
        if peer not in self._admitted or self._lapsed(peer, self._admitted[peer], now) is not None:
            return None
        return _role(self._admitted[peer])

    def objection(self, peer: str, what: str, roles: Collection[Role], now: float) -> str | None:
        """Why this peer may not do `what`, which peers in these roles may do; None when it may."""
        role = self.role_of(peer, now)
        if role is None:
            return self.unknown
        if role in roles:
            return None
        return (
            f"an invitation for role {role} does not allow {what}; ask the owner of the run for"
            " another one"
        )

    def expel(self, now: float) -> dict[str, str]:
        """Remove all peers whose credential has expired or was revoked; returns the reasons by
        peer."""
        reasons = {peer: self._lapsed(peer, shown, now) for peer, shown in self._admitted.items()}
        out = {peer: reason for peer, reason in reasons.items() if reason is not None}
        for peer in out:
            del self._admitted[peer]
        return out

    def revoke(self, revoked: Revoked) -> bool:
        """Adopt a revocation list. Returns False if the owner did not sign it or if it is not newer
        than ours."""
        if revoked.number <= self.revoked.number or not revoked.signed_by(
            self.run_key, self.run_id
        ):
            return False
        self.revoked = self.memory.revoked = revoked
        self.memory.keep()
        return True

    def lapsed(self, me: str, now: float) -> str | None:
        """Why this peer is no longer admitted itself; None while it is."""
        return self._lapsed(me, self.token, now)

    def _objection(self, peer: str, credential: Credential, now: float) -> str | None:
        grant = credential.grant
        if grant.run_key != self.run_key:
            return (
                "the invitation is signed by another key than that of this run; ask its owner for a"
                " link"
            )
        if self._admitted.get(peer) != credential and not credential.proves(peer):
            if grant.signed:
                return (
                    "the credential belongs to another identity; use the invitation itself, or ask"
                    " for one"
                )
            return "the signature of the invitation is wrong; ask the owner of the run for a link"
        if grant.run_id != self.run_id:
            return f"the invitation is for run.id={grant.run_id}, and this is run.id={self.run_id}"
        if grant.peer not in ("", peer):
            return (
                f"the invitation is bound to peer {grant.peer}; use its swarm.identity_path, or ask"
                " for another one"
            )
        return self._lapsed(peer, credential, now) or self._taken(peer, credential.role, grant)

    def _taken(self, peer: str, role: Role, grant: Grant) -> str | None:
        """A token to watch with has any number of users, any other has one. To look on does not
        make a peer its user, so that its owner may look before it joins; once somebody uses it, a
        copy shows nothing either.
        """
        users = self.memory.users
        if grant.role != "observer" and users.get(grant.token_id, peer) != peer:
            return (
                "the invitation is in use by another identity; ask for one for this peer, or for"
                " one to observe"
            )
        if role != "observer" and grant.token_id not in users:
            users[grant.token_id] = peer
            self.memory.keep()
            for other, shown in list(self._admitted.items()):
                if shown is not None and shown.grant.token_id == grant.token_id and other != peer:
                    del self._admitted[other]
        return None

    def _lapsed(self, peer: str, shown: Credential | Token | None, now: float) -> str | None:
        if shown is not None and (ago := now - shown.grant.expires_at) > TOLERANCE_S:
            unit, length = next(one for one in UNITS if ago >= 2 * one[1])
            return (
                f"the invitation expired {ago / length:.0f} {unit} ago; ask the owner of the run"
                " for a new one"
            )
        return (
            _REVOKED
            if self.revoked.names("" if shown is None else shown.grant.token_id, peer)
            else None
        )


def _role(shown: Credential | None) -> Role:
    return "contributor" if shown is None else shown.role
