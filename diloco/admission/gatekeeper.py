"""Decides which peers may take part, by their credentials. Sans-IO: the caller passes `now`, Unix time."""

from __future__ import annotations

from collections.abc import Collection

from diloco.admission.invitation import Credential, Grant, Role, Token
from diloco.admission.keys import Revoked
from diloco.admission.memory import Memory
from diloco.errors import PayloadError

__all__ = ["Admission"]

TOLERANCE_S = 60  # clocks of honest peers differ by less: `doctor` and `join` check it
MAX_OBSERVERS = 256  # admitted at a time; an observer may come with a new identity each time
MAX_CONTRIBUTORS = 4096  # so may a contributor; the first ones have to greet again
_REVOKED = "the owner of the run has revoked the invitation of this peer; ask for a new one"


class Admission:
    """One peer's record of who has been admitted to the run of `token`, this peer's own invitation.

    A peer is admitted by a valid credential, until the credential expires or is revoked. A `public` run also admits who
    shows none, as contributor, until its identity is revoked; a peer that is one itself has no token, and names the run
    by key and id. Untrusted input never raises: `admit` returns a reason to refuse, `revoke` returns False. `memory`
    keeps revocations and first users.
    """

    def __init__(
        self,
        token: Token | None,
        memory: Memory | None = None,
        public: bool = False,
        run: tuple[bytes, str] = (b"", ""),
    ) -> None:
        self.token, self.public = token, public
        self.run_key, self.run_id = run if token is None else (token.grant.run_key, token.grant.run_id)
        self.memory = memory or Memory()
        self.revoked = Revoked(0, (), (), b"")
        self.revoke(self.memory.revoked)
        self._admitted: dict[str, Credential] = {}
        self._contributors: dict[str, None] = {}

    @property
    def unknown(self) -> str:
        """Why a peer that has not greeted may do nothing, with the remedy."""
        if self.public:
            return "whoever contributes to this run greets first; call again"
        return "this run admits invited peers only; ask its owner for a link, or give swarm.token=@FILE"

    def admit(self, peer: str, text: str, now: float) -> str | None:
        """Admit an authenticated peer by its credential; returns None, or why it is refused, with the remedy."""
        if not text:
            return self._admit_contributor(peer, now)
        try:
            credential = Credential.from_text(text)
        except PayloadError as error:
            return f"the credential cannot be read: {error}"
        reason = self._objection(peer, credential, now)
        if reason is None:
            self._admitted[peer] = credential
            observers = [one for one, credential in self._admitted.items() if credential.role == "observer"]
            for one in observers[:-MAX_OBSERVERS]:
                del self._admitted[one]
        return reason

    def _admit_contributor(self, peer: str, now: float) -> str | None:
        if not self.public or self.revoked.names("", peer):
            return _REVOKED if self.public else self.unknown
        if self.role_of(peer, now) is None:
            self._contributors[peer] = None
        while len(self._contributors) > MAX_CONTRIBUTORS:
            del self._contributors[next(iter(self._contributors))]
        return None

    def invited(self, peer: str) -> bool:
        """Whether the owner ever invited this peer to more than to look on, as far as it has shown that here."""
        return peer in self.memory.users.values()

    def role_of(self, peer: str, now: float) -> Role | None:
        """The role of an admitted peer; None for any other."""
        credential = self._admitted.get(peer)
        if credential is not None and self._lapsed(peer, credential.grant, now) is None:
            return credential.role
        return "contributor" if peer in self._contributors and not self.revoked.names("", peer) else None

    def objection(self, peer: str, what: str, roles: Collection[Role], now: float) -> str | None:
        """Why this peer may not do `what`, which peers in these roles may do; None when it may."""
        role = self.role_of(peer, now)
        if role is None:
            return self.unknown
        if role in roles:
            return None
        return f"an invitation for role {role} does not allow {what}; ask the owner of the run for another one"

    def expel(self, now: float) -> dict[str, str]:
        """Remove all peers whose credential has expired or was revoked; returns the reasons by peer."""
        out = {
            peer: reason
            for peer, credential in self._admitted.items()
            if (reason := self._lapsed(peer, credential.grant, now)) is not None
        }
        out |= {peer: _REVOKED for peer in self._contributors if self.revoked.names("", peer)}
        for peer in out:
            self._admitted.pop(peer, None)
            self._contributors.pop(peer, None)
        return out

    def revoke(self, revoked: Revoked) -> bool:
        """Adopt a revocation list. Returns False if the owner did not sign it or if it is not newer than ours."""
        if revoked.number <= self.revoked.number or not revoked.signed_by(self.run_key, self.run_id):
            return False
        self.revoked = self.memory.revoked = revoked
        self.memory.keep()
        return True

    def lapsed(self, me: str, now: float) -> str | None:
        """Why this peer is no longer admitted itself; None while it is."""
        if self.token is None:
            return _REVOKED if self.revoked.names("", me) else None
        return self._lapsed(me, self.token.grant, now)

    def _objection(self, peer: str, credential: Credential, now: float) -> str | None:
        grant = credential.grant
        if grant.run_key != self.run_key:
            return "the invitation is signed by another key than that of this run; ask its owner for a link"
        if self._admitted.get(peer) != credential and not credential.proves(peer):
            if grant.signed:
                return "the credential belongs to another identity; use the invitation itself, or ask for one"
            return "the signature of the invitation is wrong; ask the owner of the run for a link"
        if grant.run_id != self.run_id:
            return f"the invitation is for run.id={grant.run_id}, and this is run.id={self.run_id}"
        if grant.peer not in ("", peer):
            return f"the invitation is bound to peer {grant.peer}; use its swarm.identity_path, or ask for another one"
        return self._lapsed(peer, grant, now) or self._taken(peer, credential)

    def _taken(self, peer: str, credential: Credential) -> str | None:
        """A token to watch with has any number of users, any other has one. To look on does not make a peer its user,
        so that its owner may look before it joins; once somebody uses it, a copy shows nothing either.
        """
        grant, users = credential.grant, self.memory.users
        if grant.role == "observer" or users.get(grant.token_id, peer) == peer:
            if credential.role != "observer" and grant.token_id not in users:
                users[grant.token_id] = peer
                self.memory.keep()
                for other, shown in list(self._admitted.items()):
                    if shown.grant.token_id == grant.token_id and other != peer:
                        del self._admitted[other]
            return None
        return "the invitation is in use by another identity; ask for one for this peer, or for one to observe"

    def _lapsed(self, peer: str, grant: Grant, now: float) -> str | None:
        if now > grant.expires_at + TOLERANCE_S:
            return f"the invitation expired {_ago(now - grant.expires_at)} ago; ask the owner of the run for a new one"
        if self.revoked.names(grant.token_id, peer):
            return _REVOKED
        return None


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
