"""Decides which peers may take part, by their credentials. The caller passes `now`, Unix time."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from diloco.admission.invitation import Credential, Grant, Token
from diloco.admission.keys import Revoked
from diloco.atomic import replace_file
from diloco.errors import ConfigError, PayloadError
from diloco.protocol import Role

__all__ = ["Admission", "Memory"]

logger = logging.getLogger(__name__)

TOLERANCE_S = 60  # clocks of honest peers differ by less: `doctor` and `join` check it
MAX_OBSERVERS = 256  # admitted at a time; an observer may come with a new identity each time
MAX_CONTRIBUTORS = 4096  # so may a contributor; the first ones have to greet again
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
_REVOKED = "the owner of the run has revoked the invitation of this peer; ask for a new one"


class Memory:
    """The peers that a peer refuses, kept over restarts in a file of its own for each run.

    `revoked` is the newest list of the run's owner, `users` the first peer that used a token, by
    the token's id, `seal` that of the manifest, "" while no peer has shown it. A damaged file is a
    ConfigError; a file that cannot be written is a warning, and the run goes on.

    `scope` is run id, and its key or the hash of its manifest; a file of another scope is ignored.
    """

    def __init__(self, path: Path | None = None, scope: str = "") -> None:
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
            damaged = f"{path} keeps whom this peer refuses, and is damaged"
            raise ConfigError(f"{damaged}; restore it, or delete it to refuse nobody") from None

    def keep(self) -> None:
        """Write everything to the file."""
        if self._path is None:
            return
        content = {"scope": self._scope, "revoked": asdict(self.revoked)}
        content |= {"users": self.users, "seal": self.seal}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, (json.dumps(content, indent=1) + "\n").encode(), 0o600)
        except OSError as error:
            line = "%s cannot be written (%s): the next start forgets whom it refused"
            logger.warning(line, self._path, error)


class Admission:
    """A peer's record of the peers admitted to the run of `token`, this peer's own invitation.

    A peer is admitted by a valid credential, until the credential expires or is revoked. A `public`
    run also admits peers without one, as contributors, until their identity is revoked; a
    contributor has no token itself, and names the run by key and id. Untrusted input never raises:
    `admit` returns a reason to refuse, `revoke` returns False.
    """

    def __init__(
        self,
        token: Token | None,
        memory: Memory | None = None,
        public: bool = False,
        run: tuple[bytes, str] = (b"", ""),
    ) -> None:
        self.token, self.public = token, public
        if token is not None:
            run = (token.grant.run_key, token.grant.run_id)
        self.run_key, self.run_id = run
        self.memory = memory or Memory()
        self.revoked = Revoked()
        self.revoke(self.memory.revoked)
        self._admitted: dict[str, Credential | None] = {}  # None is a contributor's

    @property
    def unknown(self) -> str:
        """The reason, with the remedy, to refuse everything to a peer that has not greeted."""
        if self.public:
            return "whoever contributes to this run greets first; call again"
        only = "this run admits invited peers only"
        return f"{only}; ask its owner for a link, or give swarm.token=@FILE"

    def admit(self, peer: str, text: str, now: float) -> str | None:
        """Admit an authenticated peer by its credential; return None, or the reason to refuse."""
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
                crowd = [member for member, shown in self._admitted.items() if _role(shown) == role]
                for member in crowd[:-most]:
                    del self._admitted[member]
        return reason

    def invited(self, peer: str) -> bool:
        """Return True if this peer has ever used an invitation above the role of observer."""
        return peer in self.memory.users.values()

    def role_of(self, peer: str, now: float) -> Role | None:
        """The role of an admitted peer; None for any other."""
        if peer not in self._admitted or self._lapsed(peer, self._admitted[peer], now) is not None:
            return None
        return _role(self._admitted[peer])

    def objection(self, peer: str, action: str, roles: Collection[Role], now: float) -> str | None:
        """Return why this peer may not do `action`, allowed to peers in `roles`; None if it may."""
        role = self.role_of(peer, now)
        if role is None:
            return self.unknown
        if role in roles:
            return None
        other = "ask the owner of the run for another one"
        return f"an invitation for role {role} does not allow {action}; {other}"

    def expel(self, now: float) -> dict[str, str]:
        """Remove peers whose credential has expired or was revoked; return the reasons by peer."""
        reasons = {peer: self._lapsed(peer, shown, now) for peer, shown in self._admitted.items()}
        out = {peer: reason for peer, reason in reasons.items() if reason is not None}
        for peer in out:
            del self._admitted[peer]
        return out

    def revoke(self, revoked: Revoked) -> bool:
        """Adopt a revocation list if the owner signed it and it is newer; return True if so."""
        is_newer = revoked.number > self.revoked.number
        if not is_newer or not revoked.signed_by(self.run_key, self.run_id):
            return False
        self.revoked = self.memory.revoked = revoked
        self.memory.keep()
        return True

    def lapsed(self, me: str, now: float) -> str | None:
        """Return why this peer itself is no longer admitted; None while it is."""
        return self._lapsed(me, self.token, now)

    def _objection(self, peer: str, credential: Credential, now: float) -> str | None:
        grant, link = credential.grant, "ask the owner of the run for a link"
        if grant.run_key != self.run_key:
            return f"the invitation is signed by another key than that of this run; {link}"
        if self._admitted.get(peer) != credential and not credential.proves(peer):
            if not grant.signed:
                return f"the signature of the invitation is wrong; {link}"
            use = "use the invitation itself, or ask for one"
            return f"the credential belongs to another identity; {use}"
        if grant.run_id != self.run_id:
            return f"the invitation is for run.id={grant.run_id}, and this is run.id={self.run_id}"
        if grant.peer not in ("", peer):
            use = "use its swarm.identity_path, or ask for another one"
            return f"the invitation is bound to peer {grant.peer}; {use}"
        return self._lapsed(peer, credential, now) or self._taken(peer, credential.role, grant)

    def _taken(self, peer: str, role: Role, grant: Grant) -> str | None:
        """Return an objection if another peer uses the token; else record this peer as its user."""
        users = self.memory.users
        if grant.role != "observer" and users.get(grant.token_id, peer) != peer:
            ask = "ask for one for this peer, or for one to observe"
            return f"the invitation is in use by another identity; {ask}"
        if role != "observer" and grant.token_id not in users:
            users[grant.token_id] = peer
            self.memory.keep()
            for member, shown in list(self._admitted.items()):
                if shown is not None and shown.grant.token_id == grant.token_id and member != peer:
                    del self._admitted[member]
        return None

    def _lapsed(self, peer: str, shown: Credential | Token | None, now: float) -> str | None:
        if shown is not None and (ago := now - shown.grant.expires_at) > TOLERANCE_S:
            unit, length = next(unit for unit in UNITS if ago >= 2 * unit[1])
            new = "ask the owner of the run for a new one"
            return f"the invitation expired {ago / length:.0f} {unit} ago; {new}"
        token_id = "" if shown is None else shown.grant.token_id
        return _REVOKED if self.revoked.names(token_id, peer) else None


def _role(shown: Credential | None) -> Role:
    return "contributor" if shown is None else shown.role
