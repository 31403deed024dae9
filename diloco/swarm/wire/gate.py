"""The door of a peer: which peers may open a stream to it, and which it believes. Every stream and DHT call passes it.

1. Before its first stream to a peer this one sends a `Greeting` with its credential, on a stream of its own.
2. The other side checks it against the libp2p identity that opened the stream, and answers with its own credential, or
   with a `Refusal`. Either both sides are known now, or neither says any more.
3. The side with the newer list of what is revoked sends it to the other.
4. A stream of an unknown identity is refused before a byte is read, and a DHT call before it is parsed (the daemon
   hands over whole calls, of at most 4 MiB).
5. A peer that expires or is revoked is put out at once: its streams here are closed.

No more than `MAX_GREETING_BYTES` are read of an unknown identity, on any stream; a longer frame is refused by its
length.

An open run has no admission: everybody is let in, and greetings are empty.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from diloco.admission import Admission, Memory, Revoked, Role, RunKey, Token, issue
from diloco.admission.keys import is_sealed
from diloco.config.groups import KEYLESS
from diloco.errors import ConfigError, PayloadError
from diloco.protocol.limits import REFUSALS, REFUSALS_PER_S, Buckets, Newest
from diloco.protocol.messages import Message, Refusal, expect
from diloco.protocol.messages.base import MEMBERS
from diloco.protocol.messages.control import (
    MAX_GREETING_BYTES,
    Claim,
    Greeting,
    Hello,
    Published,
    Revocations,
    Vote,
)
from diloco.swarm.wire.deadline import within
from diloco.swarm.wire.streams import BROKEN, Stream, Traffic
from diloco.swarm.wire.transport import Disbelieved, Reader, Refused, Writer

__all__ = ["GREETING", "IN_USE", "Gate", "gate_for", "revoked_of", "watching"]

GREETING = "diloco/1/greeting"
GREETING_TIMEOUT_S = 10.0
QUIET_S = 60.0
OWN_LIFE_S = 366 * 86400  # life of the invitation that the run's owner gives itself at each start
VISIT_LIFE_S = 86400
_CONTRIBUTES = "who was not invited to this run contributes and makes no versions; ask its owner for a link"
IN_USE = "its identity is in use by a running peer; give this one another swarm.identity_path"
WORDS = 3  # of a reason, that say what kind it is; the rest may name a peer or a run

Opener = Callable[[], Awaitable[tuple[Reader, Writer]]]


async def _no_twin(peer: str, instance: str) -> None:
    """Nobody else has the identity of a peer."""


class Gate:
    """One peer's admission, applied to the network; without an admission everybody is let in.

    It shows itself in a role, by default that of its token; a visitor is an observer.

    `on_refused` is called with peer and reason, seldom enough for a log, and `on_revoked` with a newer list, once it
    counts. `twin` is asked, with peer and instance, why another living process of that identity forbids this one.
    `greet` raises `Refused` when the other side does not admit this one, `Disbelieved` the other way round.
    """

    def __init__(
        self, admission: Admission | None = None, role: Role | None = None, memory: Memory | None = None
    ) -> None:
        self.admission = admission
        self.memory = admission.memory if admission is not None else memory or Memory()
        self.me = self.instance = ""  # the transport sets them
        self.twin: Callable[[str, str], Awaitable[str | None]] = _no_twin
        self.on_refused: Callable[[str, str], None] = lambda peer, reason: None
        self.on_revoked: Callable[[Revocations], None] = lambda revoked: None
        self._role = role
        self._greeted: set[str] = set()
        self._serving: defaultdict[str, dict[Writer, None]] = defaultdict(dict)  # in their order, unlike a set
        self._noted: deque[tuple[float, str, str]] = deque()
        self._lines: Buckets[str] = Buckets(REFUSALS_PER_S, REFUSALS)
        self._unnoted: Counter[str] = Counter()  # refusals by the same words, since the last one that was noted
        self._strangers: Newest[Writer] = Newest()

    @property
    def run_key(self) -> str | None:
        """The public key of the run, in hexadecimal digits; None where everybody is let in."""
        return None if self.admission is None else self.admission.run_key.hex()

    # -- this side begins ---------------------------------------------------------------------------------------------

    def believes(self, peer: str) -> bool:
        """Whether the word of this peer counts. A stranger's refusal, for example, must not end this process, and an
        observer has nothing to say of the run.
        """
        return self.admission is None or self.role_of(peer) in MEMBERS

    async def greet(self, peer: str, opener: Opener, again: bool = False) -> None:
        """Make both sides known to each other, unless they are."""
        if not again and peer in self._greeted and self.believes(peer):
            return
        reader, writer = await within(GREETING_TIMEOUT_S, opener())
        stream, mine = Stream(peer, reader, writer, Traffic()), self._greeting()
        try:
            await stream.send(mine)
            answer = await stream.receive(GREETING_TIMEOUT_S, MAX_GREETING_BYTES)
            if isinstance(answer, Refusal):
                raise Refused(answer.reason)
            theirs = expect(answer, Greeting)
            reason = self._take(peer, theirs)
            if reason is None:
                await self._compare(stream, mine, theirs)
                reason = None if self.believes(peer) else "its invitation allows to watch only"
            elif mine.revoked > theirs.revoked:  # the other may be on the list, and has to hear of that
                with contextlib.suppress(*BROKEN):
                    await self._compare(stream, mine, theirs)
        except PayloadError as error:
            raise ConnectionError(f"{peer} does not greet as a peer of a run does: {error}") from None
        finally:
            stream.close()
        if reason is not None:
            self.refused(peer, reason)
            raise Disbelieved(f"{peer} is not believed: {reason}")
        self._greeted.add(peer)

    # -- the other side begins ----------------------------------------------------------------------------------------

    async def welcome(self, peer: str, reader: Reader, writer: Writer) -> None:
        """Answer a greeting."""
        stream = Stream(peer, reader, writer, Traffic())
        try:
            if not self.believes(peer):
                self._make_room(peer, writer)
            theirs = expect(await stream.receive(GREETING_TIMEOUT_S, MAX_GREETING_BYTES), Greeting)
            reason = self._take(peer, theirs) or (theirs.instance and await self.twin(peer, theirs.instance)) or None
            mine = self._greeting()
            if reason is None:
                await stream.send(mine)
                await self._compare(stream, mine, theirs)
            else:
                self.refused(peer, reason)
                await stream.send(Refusal(reason=reason))
            if reason is not None or mine.revoked >= theirs.revoked:
                await stream.drained()
        except PayloadError as error:
            self.refused(peer, str(error))
        except BROKEN:
            pass
        finally:
            self._strangers.remove(writer)
            stream.close()

    def _make_room(self, peer: str, writer: Writer) -> None:
        """A stream of a stranger: it ends those that others left open, because identities cost a stranger nothing."""
        for older in self._strangers.add(peer, writer):
            older.close()

    async def serve(self, peer: str, reader: Reader, writer: Writer, handler: Callable[..., Awaitable[None]]) -> None:
        """Let the handler have a stream, if the peer is known."""
        if self.admission is not None and self.role_of(peer) is None:
            reason = self.admission.unknown
            self.refused(peer, reason)
            self._make_room(peer, writer)
            stream = Stream(peer, reader, writer, Traffic())
            with contextlib.suppress(*BROKEN, PayloadError):
                await stream.refuse(reason, discard=MAX_GREETING_BYTES)
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

    def call_objection(self, peer: str) -> str | None:
        """Why this peer may not use the DHT here; None when it may."""
        if self.admission is None:
            return None
        return self.admission.objection(peer, "a DHT call", MEMBERS, time.time())

    def objection(self, peer: str, message: Message) -> str | None:
        """Why the peer may not begin a stream with this message; None when it may."""
        if self.admission is None:
            return None
        if getattr(message, "trains", False) and self.role_of(peer) == "host":
            return "an invitation for role host does not allow training; use diloco host, or ask for another one"
        if isinstance(message, Hello) and (message.holds or message.claims or message.votes) and not self.authors(peer):
            return _CONTRIBUTES
        return self.admission.objection(peer, message.kind, message.roles, time.time())

    # -- who is in ----------------------------------------------------------------------------------------------------

    def authors(self, peer: str) -> bool:
        """Whether this peer may make versions, this one included: in a public run, whoever was invited."""
        if self.admission is None or not self.admission.public:
            return True
        return self.admission.token is not None if peer == self.me else self.admission.invited(peer)

    def claim_objection(self, peer: str, message: Message) -> str | None:
        """Why the peer may not say this on a control stream; None when it may."""
        return _CONTRIBUTES if isinstance(message, Claim | Published | Vote) and not self.authors(peer) else None

    def role_of(self, peer: str) -> Role | None:
        """The role of a peer that is in; None too where everybody is."""
        return None if self.admission is None else self.admission.role_of(peer, time.time())

    def expel(self) -> dict[str, str]:
        """Put out the peers that are no longer admitted, and close their streams; returns the reasons by peer."""
        out = {} if self.admission is None else self.admission.expel(time.time())
        for peer, reason in out.items():
            self._greeted.discard(peer)
            self.refused(peer, reason)
            for writer in self._serving.pop(peer, ()):
                writer.close()
        return out

    def lapsed(self) -> str | None:
        """Why this peer itself is no longer admitted; None when it is."""
        return None if self.admission is None else self.admission.lapsed(self.me, time.time())

    # -- revocations --------------------------------------------------------------------------------------------------

    @property
    def revocations(self) -> Revocations | None:
        """The newest list, if there is any."""
        if self.admission is None or self.admission.revoked.number == 0:
            return None
        revoked = self.admission.revoked
        return Revocations(
            number=revoked.number,
            token_ids=list(revoked.token_ids),
            peer_ids=list(revoked.peer_ids),
            signature=revoked.signature.hex(),
        )

    def hear(self, said: Revocations) -> bool:
        """Take in a list from anybody; True when it is the owner's and news."""
        if self.admission is None:
            return False
        news = self.admission.revoke(revoked_of(said))
        if news:
            self.on_revoked(said)
        return news

    # -- the owner's manifest ------------------------------------------------------------------------------------------

    def sealed(self, manifest_hash: str, seal: str) -> bool:
        """Whether settings with this hash may be believed: the run's owner signed them, or everybody is let in."""
        admission = self.admission
        return admission is None or is_sealed(admission.run_key, admission.run_id, manifest_hash, seal)

    def learn_seal(self, manifest_hash: str, seal: str) -> None:
        """Keep the owner's signature of the manifest of this peer's run, to show it to newcomers."""
        if self.admission is not None and seal != self.memory.seal and self.sealed(manifest_hash, seal):
            self.memory.seal = seal
            self.memory.keep()

    def refused(self, peer: str, reason: str) -> None:
        """Note a refusal, unless the same was noted lately, or there were too many for a reason in the same words.

        So whoever makes up identities or reasons hides no refusal of another kind.
        """
        now, words = time.time(), " ".join(reason.split()[:WORDS])
        while self._noted and self._noted[0][0] < now - QUIET_S:
            self._noted.popleft()
        if any((peer, reason) == known[1:] for known in self._noted):
            return
        if not self._lines.take(words, now):
            self._unnoted[words] += 1
            return
        self._noted.append((now, peer, reason))
        suppressed = self._unnoted.pop(words, 0)
        self.on_refused(peer, f"{reason} ({suppressed} more were not noted)" if suppressed else reason)

    def _greeting(self) -> Greeting:
        revoked = 0 if self.admission is None else self.admission.revoked.number
        token = None if self.admission is None else self.admission.token
        credential = "" if token is None else token.credential(self.me, self._role)
        return Greeting(credential=credential, revoked=revoked, instance=self.instance)

    def _take(self, peer: str, greeting: Greeting) -> str | None:
        if self.admission is None:
            return None
        return self.admission.admit(peer, greeting.credential, time.time())

    async def _compare(self, stream: Stream, mine: Greeting, theirs: Greeting) -> None:
        """The side with the newer list sends it, and waits until the other has read it and ends the stream."""
        if mine.revoked < theirs.revoked:
            self.hear(expect(await stream.receive(), Revocations))
        elif mine.revoked > theirs.revoked and self.revocations is not None:
            await stream.send(self.revocations)
            await stream.drained()


def revoked_of(said: Revocations) -> Revoked:
    """The list in a message, whose signature is not verified yet."""
    return Revoked(said.number, tuple(said.token_ids), tuple(said.peer_ids), bytes.fromhex(said.signature))


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
    """The gate of a peer with these settings (`run.key`, `swarm.token`, `swarm.key_path`; `public`: `swarm.admit`).

    With the private half it seals the manifest. The file at `memory_path` has whom this peer refused before. Raises
    `ConfigError` when the run has a key and there is neither an invitation nor the private half, and it is not public,
    or they do not fit, or the file is damaged.
    """
    if public and run_key is None and token is None and key_path is None:
        raise ConfigError(KEYLESS)
    if run_key is None and token is None and key_path is None:
        return Gate(memory=Memory(memory_path, f"{run_id}/{manifest_hash}"))
    key, revoked = None, None
    if key_path is not None:
        key = RunKey.read(Path(key_path))
        own = issue(key, run_id, "worker" if trains else "host", int(time.time()) + OWN_LIFE_S)
        revoked = Revoked.remembered(key, Path(key_path), run_id)
    elif token is not None:
        own = Token.read(token)
    elif public and run_key is not None:
        if not trains:
            raise ConfigError("whoever hosts a public run is invited; give swarm.token=@FILE, or use diloco join")
        memory = Memory(memory_path, f"{run_id}/{run_key}")
        return Gate(Admission(None, memory, True, (bytes.fromhex(run_key), run_id)))
    else:
        raise ConfigError(
            f"run.key={run_key} is the key of a run that admits invited peers only; give swarm.token=@FILE with an "
            "invitation, or swarm.key_path=FILE if the run is yours"
        )
    if own.grant.role == "observer":
        raise ConfigError("swarm.token allows to watch only; ask the owner of the run for another invitation")
    if own.grant.run_id != run_id:
        raise ConfigError(f"swarm.token is for run.id={own.grant.run_id}, and this is run.id={run_id}; ask for another")
    if run_key not in (None, own.grant.run_key.hex()):
        raise ConfigError(f"run.key={run_key} is not the key that signed swarm.token; ask the owner for another one")
    admission = Admission(own, Memory(memory_path, f"{run_id}/{own.grant.run_key.hex()}"), public)
    if revoked is not None:
        admission.revoke(revoked)
    gate = Gate(admission, "host" if own.grant.role == "worker" and not trains else None)
    if not gate.sealed(manifest_hash, gate.memory.seal):  # of an earlier manifest, or none yet
        gate.memory.seal = "" if key is None else key.seal(run_id, manifest_hash)
    return gate


def watching(run_id: str, token: str | None, key_path: str | None = None) -> Gate:
    """The gate of a visitor. It shows itself as observer, whatever its invitation allows, and does not use that up.

    Without an invitation and a key it is the gate of an open run. Only a key needs the `run_id`.
    """
    if token is not None:
        return Gate(Admission(Token.read(token)), "observer")
    if key_path is None:
        return Gate()
    key = RunKey.read(Path(key_path))
    return Gate(Admission(issue(key, run_id, "observer", int(time.time()) + VISIT_LIFE_S)))
