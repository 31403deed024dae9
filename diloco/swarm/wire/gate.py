"""Admission of peers: which may open streams to this one, and which it trusts. Every stream and DHT
call passes the gate.

1. Before its first stream to a peer this one sends a `Greeting` with its credential, on a stream of
   its own.
2. The other side checks it against the libp2p identity that opened the stream, and answers with its
   own credential, or with a `Refusal`. The side with the newer revocation list sends it.
3. From an unknown identity at most `MAX_GREETING_BYTES` are read on any stream, and its DHT calls
   are not parsed (the daemon delivers whole calls, of at most 4 MiB).
4. When a credential expires or is revoked, the streams of its peer are closed at once.

An open run has no admission: everybody is admitted, and greetings are empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from diloco.admission import Admission, Memory, Revoked, RunKey, Token, issue
from diloco.admission.keys import is_sealed
from diloco.config.run_settings import KEYLESS
from diloco.errors import ConfigError, PayloadError
from diloco.messages.base import MEMBERS, Message, Refusal
from diloco.messages.codec import expect
from diloco.messages.control import MAX_GREETING_BYTES, Greeting, Revocations
from diloco.protocol import Role
from diloco.swarm.limits import Newest
from diloco.swarm.wire.streams import BROKEN, PeerStream, Traffic
from diloco.swarm.wire.transport import ByteReader, ByteWriter, Handler, Refused, Untrusted

GREETING = "diloco/1/greeting"
GREETING_TIMEOUT_S = 10.0
OWN_LIFE_S = 366 * 86400  # of the invitation that the owner issues to itself at each start
VISIT_LIFE_S = 86400
IN_USE = "its identity is in use by a running peer; give this one another swarm.identity_path"

Opener = Callable[[], Awaitable[tuple[ByteReader, ByteWriter]]]


async def _unused(peer: str, instance: str) -> None:
    """Return None: no other process has the identity."""


class Gate:
    """Applies one peer's admission to its network; without an admission everybody is admitted.

    `role` is the role in its greetings, by default that of its token; a visitor is an observer.

    `on_refused` is called with peer and reason, and `on_revoked` with a newer list, once it is in
    force. `identity_in_use` returns the reason to refuse the process `instance` of a peer, if
    another living process has the same identity.
    """

    def __init__(self, admission: Admission | None = None, role: Role | None = None) -> None:
        self.admission = admission
        self.memory = Memory() if admission is None else admission.memory
        self.me = self.instance = ""  # set by the transport
        self.identity_in_use: Callable[[str, str], Awaitable[str | None]] = _unused
        self.on_refused: Callable[[str, str], None] = lambda peer, reason: None
        self.on_revoked: Callable[[Revocations], None] = lambda revoked: None
        self._role = role
        self._greeted: set[str] = set()
        # dicts, because the order of sets depends on memory addresses
        self._serving: defaultdict[str, dict[ByteWriter, None]] = defaultdict(dict)
        self._strangers: Newest[ByteWriter] = Newest()

    @property
    def run_key(self) -> str | None:
        """The public key (hex) of the run; None in an open run."""
        return None if self.admission is None else self.admission.run_key.hex()

    # -- greetings ---------------------------------------------------------------------------------

    async def greet(self, peer: str, opener: Opener, again: bool = False) -> None:
        """Exchange greetings; `Refused` or `Untrusted` if one side does not admit the other."""
        if not again and peer in self._greeted and self.trusts(peer):
            return
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            reader, writer = await opener()
        stream, mine = PeerStream(peer, reader, writer, Traffic()), self.greeting()
        try:
            await stream.send(mine)
            answer = await stream.receive(GREETING_TIMEOUT_S, MAX_GREETING_BYTES)
            if isinstance(answer, Refusal):
                raise Refused(answer.reason)
            theirs = expect(answer, Greeting)
            reason = self.admit(peer, theirs)
            if reason is None:
                await self._exchange_revocations(stream, mine, theirs)
                reason = None if self.trusts(peer) else "its invitation allows to watch only"
            # the other peer may be on the list, and has to learn that
            elif mine.revoked > theirs.revoked:
                with contextlib.suppress(*BROKEN):
                    await self._exchange_revocations(stream, mine, theirs)
        except PayloadError as error:
            text = f"{peer} does not greet as a peer of a run does: {error}"
            raise ConnectionError(text) from None
        finally:
            stream.close()
        if reason is not None:
            self.on_refused(peer, reason)
            raise Untrusted(f"{peer} is not believed: {reason}")
        self._greeted.add(peer)

    async def welcome(self, peer: str, reader: ByteReader, writer: ByteWriter) -> None:
        """Answer a greeting."""
        stream = PeerStream(peer, reader, writer, Traffic())
        try:
            if not self.trusts(peer):
                self._end_older_strangers(peer, writer)
            theirs = expect(await stream.receive(GREETING_TIMEOUT_S, MAX_GREETING_BYTES), Greeting)
            reason = self.admit(peer, theirs)
            if reason is None and theirs.instance:
                reason = await self.identity_in_use(peer, theirs.instance)
            mine = self.greeting()
            if reason is None:
                await stream.send(mine)
                await self._exchange_revocations(stream, mine, theirs)
            else:
                self.on_refused(peer, reason)
                await stream.send(Refusal(reason=reason))
            if reason is not None or mine.revoked >= theirs.revoked:
                await stream.drained()
        except PayloadError as error:
            self.on_refused(peer, str(error))
        except BROKEN:
            pass
        finally:
            self._strangers.remove(writer)
            stream.close()

    def greeting(self) -> Greeting:
        """Return the greeting of this peer: its credential, if it has one."""
        if self.admission is None:
            return Greeting(credential="", revoked=0, instance=self.instance)
        token, number = self.admission.token, self.admission.revoked.number
        shown = "" if token is None else token.credential(self.me, self._role)
        return Greeting(credential=shown, revoked=number, instance=self.instance)

    def admit(self, peer: str, greeting: Greeting) -> str | None:
        """Check a credential; return the reason if it admits nobody here, or None."""
        if self.admission is None:
            return None
        return self.admission.admit(peer, greeting.credential, time.time())

    async def _exchange_revocations(
        self, stream: PeerStream, mine: Greeting, theirs: Greeting
    ) -> None:
        """Send the list if it is newer, and wait for the end of the stream; else receive it."""
        if mine.revoked < theirs.revoked:
            self.hear(expect(await stream.receive(), Revocations))
        elif mine.revoked > theirs.revoked and self.admission is not None:
            await stream.send(message_of(self.admission.revoked))
            await stream.drained()

    def _end_older_strangers(self, peer: str, writer: ByteWriter) -> None:
        """End older streams of strangers for a new one, as identities cost strangers nothing."""
        for older in self._strangers.add(peer, writer):
            older.close()

    async def serve(
        self, peer: str, reader: ByteReader, writer: ByteWriter, handler: Handler
    ) -> None:
        """Pass a stream to the handler, if its peer is known."""
        if self.admission is not None and self.role_of(peer) is None:
            self.on_refused(peer, self.admission.unknown)
            self._end_older_strangers(peer, writer)
            stream = PeerStream(peer, reader, writer, Traffic())
            with contextlib.suppress(*BROKEN, PayloadError):
                await stream.refuse(self.admission.unknown, discard=MAX_GREETING_BYTES)
            self._strangers.remove(writer)
            stream.close()
            return
        self._serving[peer][writer] = None
        try:
            await handler(peer, reader, writer)
        finally:
            self._serving[peer].pop(writer, None)
            if not self._serving[peer]:
                del self._serving[peer]

    # -- permissions -------------------------------------------------------------------------------

    def objection(self, peer: str, message: Message) -> str | None:
        """Return the reason why the peer may not begin a stream with this message, or None."""
        if getattr(message, "trains", False) and self.role_of(peer) == "host":
            remedy = "use diloco host, or ask for another one"
            return f"an invitation for role host does not allow training; {remedy}"
        barred = self.forbids(peer, message.kind, message.roles)
        if barred is None and getattr(message, "authors", False) and not self.authors(peer):
            barred = "who was not invited to this run contributes and makes no versions"
            barred += "; ask its owner for a link"
        return barred

    def forbids(self, peer: str, what: str, roles: Collection[Role]) -> str | None:
        """Return the reason why a peer may not do `what`; None if it has one of these roles."""
        if self.admission is None:
            return None
        return self.admission.objection(peer, what, roles, time.time())

    def trusts(self, peer: str) -> bool:
        """Return True if this peer's statements, such as refusals, count; an observer's do not."""
        return self.admission is None or self.role_of(peer) in MEMBERS

    def authors(self, peer: str) -> bool:
        """Return True if a peer, or this one, may make versions: in a public run, if invited."""
        if self.admission is None or not self.admission.public:
            return True
        return self.admission.token is not None if peer == self.me else self.admission.invited(peer)

    def role_of(self, peer: str) -> Role | None:
        """Return the role of an admitted peer; None if it is not, and in an open run."""
        return None if self.admission is None else self.admission.role_of(peer, time.time())

    def expel(self) -> dict[str, str]:
        """Close the streams of peers that are no longer admitted; return the reasons by peer."""
        out = {} if self.admission is None else self.admission.expel(time.time())
        for peer, reason in out.items():
            self._greeted.discard(peer)
            self.on_refused(peer, reason)
            for writer in self._serving.pop(peer, ()):
                writer.close()
        return out

    def lapsed(self) -> str | None:
        """Return the reason why this peer itself is no longer admitted, or None."""
        return None if self.admission is None else self.admission.lapsed(self.me, time.time())

    def hear(self, revoked: Revocations) -> bool:
        """Adopt a revocation list; return True if the owner signed it and it is newer."""
        newer = Revoked.of(revoked.number, revoked.token_ids, revoked.peer_ids, revoked.signature)
        if self.admission is None or not self.admission.revoke(newer):
            return False
        self.on_revoked(revoked)
        return True

    def sealed(self, manifest_hash: str, seal: str) -> bool:
        """Return True in an open run, or if the run's owner signed settings with this hash."""
        admitted = self.admission
        if admitted is None:
            return True
        return is_sealed(admitted.run_key, admitted.run_id, manifest_hash, seal)

    def learn_seal(self, manifest_hash: str, seal: str) -> None:
        """Keep the owner's signature of this peer's manifest, to pass it on to newcomers."""
        is_new = self.admission is not None and seal != self.memory.seal
        if is_new and self.sealed(manifest_hash, seal):
            self.memory.seal = seal
            self.memory.keep()


def message_of(revoked: Revoked) -> Revocations:
    """Convert a revocation list to its message."""
    tokens, peers = list(revoked.token_ids), list(revoked.peer_ids)
    return Revocations(
        number=revoked.number, token_ids=tokens, peer_ids=peers, signature=revoked.signature
    )


def gate_for(
    run_id: str,
    run_key: str | None,
    token: str | None,
    key_path: str | None,
    trains: bool = True,
    manifest_hash: str = "",
    memory_path: Path | None = None,
    public: bool = False,
) -> Gate:
    """Make the gate of a peer with these settings (`run.key`, `swarm.token`, `swarm.key_path`;
    `public`: `swarm.admit`).

    With the private key it signs the manifest. The file at `memory_path` lists peers refused in
    earlier sessions. Raises `ConfigError` if the settings contradict each other, or the file is
    damaged.
    """
    key = None if key_path is None else RunKey.read(Path(key_path))
    own = None
    if key is not None:
        own = issue(key, run_id, "worker" if trains else "host", int(time.time()) + OWN_LIFE_S)
    elif token is not None:
        own = Token.read(token)
    elif run_key is None:
        if public:
            raise ConfigError(KEYLESS)
        return Gate()
    elif not public:
        problem = f"run.key={run_key} is the key of a run that admits invited peers only"
        remedy = "swarm.token=@FILE with an invitation, or swarm.key_path=FILE if the run is yours"
        raise ConfigError(f"{problem}; give {remedy}")
    elif not trains:
        remedy = "give swarm.token=@FILE, or use diloco join"
        raise ConfigError(f"whoever hosts a public run is invited; {remedy}")
    if own is not None:
        _check_fits(own, run_id, run_key)
    public_half = own.grant.run_key if own is not None else bytes.fromhex(run_key or "")
    memory = Memory(memory_path, f"{run_id}/{public_half.hex()}")
    admission = Admission(own, memory, public, (public_half, run_id))
    if key is not None and key_path is not None:
        admission.revoke(Revoked.remembered(key, Path(key_path), run_id))
    hosts = own is not None and own.grant.role == "worker" and not trains
    gate = Gate(admission, "host" if hosts else None)
    if not gate.sealed(manifest_hash, memory.seal):  # no seal, or of an earlier manifest
        memory.seal = "" if key is None else key.seal(run_id, manifest_hash)
    return gate


def _check_fits(own: Token, run_id: str, run_key: str | None) -> None:
    grant, why = own.grant, ""
    if grant.role == "observer":
        why = "swarm.token allows to watch only; ask the owner of the run for another invitation"
    elif grant.run_id != run_id:
        why = f"swarm.token is for run.id={grant.run_id}, and this is run.id={run_id}"
        why += "; ask for another"
    elif run_key not in (None, grant.run_key.hex()):
        problem = f"run.key={run_key} is not the key that signed swarm.token"
        why = f"{problem}; ask the owner for another one"
    if why:
        raise ConfigError(why)


def observer_gate(run_id: str, token: str | None, key_path: str | None = None) -> Gate:
    """Make the gate of an observer, which uses no invitation up. `run_id` is needed with a key."""
    if token is not None:
        return Gate(Admission(Token.read(token)), "observer")
    if key_path is None:
        return Gate()
    until = int(time.time()) + VISIT_LIFE_S
    return Gate(Admission(issue(RunKey.read(Path(key_path)), run_id, "observer", until)))
