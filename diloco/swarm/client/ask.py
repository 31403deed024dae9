"""Inspects a swarm before joining it, and brings it the revocations of its owner. Each call
connects and closes."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from diloco.admission import Revoked, RunKey
from diloco.atomic import replace_file
from diloco.config import Manifest, SwarmConfig
from diloco.config.address import is_mailbox
from diloco.config.manifest import check_foreign, hash_of
from diloco.errors import ConfigError, PayloadError, SwarmError
from diloco.swarm.rpc.probe import ProbeResult, ask_to_be_called, probe
from diloco.swarm.rpc.registry import FOR_DOCTOR, load_questions
from diloco.swarm.rpc.watch import request_file, request_manifest
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import BROKEN
from diloco.swarm.wire.transport import Transport
from diloco.text import plain

if TYPE_CHECKING:  # a process that only watches does not load torch
    from diloco.swarm.context import FilePart
    from diloco.swarm.wire.libp2p import Libp2p

CLOCK_LIMIT_S = 3.0  # hivemind's DHT refuses peers whose clocks differ by more
PEERS_ASKED = 4
FAILURES = 3  # in a row, after which a peer is not asked for files any more
PATIENCE_S = 15.0  # for each of the peers that are asked at once
UNSEALED = (
    "no peer there shows the settings of the run with the signature of its owner; the owner has to"
    " start a peer with swarm.key_path"
)

T = TypeVar("T")
FilesByDigest = Mapping[str, tuple[Sequence["FilePart"], int]]
"""By digest: where the bytes go, and how many they are at most."""


@dataclass(frozen=True)
class SwarmInfo:
    """The answers of a swarm about itself."""

    manifest_text: str
    peers: list[ProbeResult]  # that answered; those at the given addresses come first
    silent: dict[str, str] = field(default_factory=dict)  # addresses without an answer, and why
    lines: dict[str, list[str]] = field(default_factory=dict)  # by line of `diloco doctor`

    @property
    def addresses(self) -> list[str]:
        """List the best address of every peer that answered."""
        return [peer.reply.addresses[0] for peer in self.peers if peer.reply.addresses]

    @property
    def ahead_s(self) -> float | None:
        """Seconds by which this clock is ahead of the swarm's: the median over the peers."""
        return statistics.median(peer.ahead_s for peer in self.peers) if self.peers else None


async def _first_answer(
    peers: Iterable[str], question: Callable[[str], Awaitable[T]]
) -> tuple[T | None, list[str]]:
    """Ask the peers in turn; return the first answer, and the errors of those before it."""
    reasons = list[str]()
    for peer in peers:
        try:
            return await question(peer), reasons
        except (*BROKEN, PayloadError) as error:
            reasons.append(str(error) or type(error).__name__)
    return None, reasons


def inspect_swarm(
    initial_peers: Sequence[str],
    identity_path: Path | None = None,
    for_doctor: bool = False,
    gate: Gate | None = None,
) -> SwarmInfo:
    """Connect to the swarm at these addresses and describe it; some peers answer `diloco doctor`.

    The `gate` shows the invitation to a closed run, and trusts only peers of that run. Raises
    `SwarmError` when no peer of a run is there, or none admits this one, and `ConfigError` when an
    entry is no address.
    """
    gate = gate or Gate()
    if is_mailbox(initial_peers[0]):
        return asyncio.run(_inspect_mailbox(initial_peers[0], gate))
    from diloco.swarm.wire.libp2p import Libp2p  # imports hivemind

    async def ask() -> SwarmInfo:
        async with aclosing(await Libp2p.client(initial_peers, gate, identity_path)) as visitor:

            async def manifest(peer: str) -> str:
                text, seal = await request_manifest(visitor, peer)
                if not gate.sealed(hash_of(text), seal):
                    raise PayloadError(UNSEALED)
                return text

            peers = await _probe_all(visitor, visitor.seeds)
            met = {visitor.me, *(result.peer for result in peers)}
            named = dict.fromkeys(peer for result in peers for peer in result.reply.known)
            more = [peer for peer in named if peer not in met]
            peers += await _probe_all(visitor, more[: max(0, PEERS_ASKED - len(peers))])
            answering = [result.peer for result in peers] or visitor.seeds
            text, reasons = await _first_answer(answering, manifest)
            if text is None:
                raise SwarmError(_no_manifest(initial_peers, reasons))
            lines = await ask_for_doctor(visitor, peers) if for_doctor else {}
            if for_doctor and (ways := await _ways(visitor, peers)):
                lines["bulk bytes"] = ways
            return SwarmInfo(text, peers, visitor.silent, lines)

    return asyncio.run(ask())


async def _inspect_mailbox(url: str, gate: Gate) -> SwarmInfo:
    """Read the manifest in a store. Raises as `inspect_swarm`."""
    from diloco.swarm.mailbox.objects import MAX_RUN_BYTES, unpack_run
    from diloco.swarm.mailbox.store import Away, FileStore

    store = FileStore(url)
    try:
        manifest, seal, digest = unpack_run(await store.read("run", MAX_RUN_BYTES))
    except FileNotFoundError:
        remedy = f"start one by diloco train swarm.mailbox={url}, or check the URL"
        raise SwarmError(f"swarm.mailbox={url}: no run is there; {remedy}") from None
    except (PayloadError, Away) as error:
        raise SwarmError(f"swarm.mailbox={url} cannot be read: {error}; try again") from None
    if not gate.sealed(digest, seal):
        raise SwarmError(UNSEALED)
    return SwarmInfo(manifest, [])


def try_store(url: str) -> dict[str, float]:
    """Write, list, read and delete a small object in a store; return seconds by what was done.

    Raises `SwarmError` with what the store does not allow, and `ConfigError` for a URL that cannot
    be opened.
    """
    from diloco.swarm.mailbox.store import Away, FileStore

    name = f"doctor/{secrets.token_hex(8)}"

    async def work() -> dict[str, float]:
        store, took_s, begun_at = FileStore(url), dict[str, float](), time.monotonic()
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "written": lambda: store.write(name, [b"diloco doctor"]),
            "listed": lambda: store.tags("doctor"),
            "read": lambda: store.read(name, 64),
            "deleted": lambda: store.delete([name]),
        }
        for what, call in calls.items():
            try:
                await call()
            except (Away, FileNotFoundError) as error:
                raise SwarmError(f"{url}: an object cannot be {what}: {error}") from None
            took_s[what], begun_at = time.monotonic() - begun_at, time.monotonic()
        return took_s

    return asyncio.run(work())


def _no_manifest(addresses: Sequence[str], reasons: list[str]) -> str:
    if UNSEALED in reasons:
        return UNSEALED
    for reason in reasons:
        if reason.startswith("refused: "):
            return f"the swarm refused this peer: {reason.removeprefix('refused: ')}"
    return f"{','.join(addresses)} answers, but is no diloco peer; check the address"


async def _probe_all(visitor: Libp2p, peers: Sequence[str]) -> list[ProbeResult]:
    """Probe all peers; return the answers, in their order."""
    probes = (asyncio.wait_for(probe(visitor, peer), PATIENCE_S) for peer in peers)
    answers = await asyncio.gather(*probes, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, (*BROKEN, PayloadError)):
            raise answer
    return [answer for answer in answers if isinstance(answer, ProbeResult)]


async def ask_for_doctor(visitor: Transport, peers: Sequence[ProbeResult]) -> dict[str, list[str]]:
    """Ask peers the questions of `diloco doctor`; return answers by the name of their line."""
    load_questions()
    answers: dict[str, list[str]] = {}
    for name, ask in FOR_DOCTOR.items():
        for peer in peers:
            with suppress(*BROKEN, PayloadError):
                text = await asyncio.wait_for(ask(visitor, peer.peer), PATIENCE_S)
                answers.setdefault(name, []).append(f"{peer.reply.name} {plain(text)}")
    return answers


async def _ways(visitor: Libp2p, peers: Sequence[ProbeResult]) -> list[str]:
    """List the route of bulk bytes from here to each peer, such as "ann direct"."""
    visitor.direct = True
    await _probe_all(visitor, [peer.peer for peer in peers])
    return [f"{plain(result.reply.name)} {visitor.way(result.peer)}" for result in peers]


def parse_manifest(text: str) -> Manifest:
    """Parse a swarm's manifest; `ConfigError` if it is invalid, or asks for local files."""
    manifest = Manifest.from_json(text)
    check_foreign(manifest)
    return manifest


def check_clock(info: SwarmInfo) -> str | None:
    """Return a warning if this clock is off by more than a second; `SwarmError` if by too much."""
    ahead_s = info.ahead_s
    if ahead_s is None or abs(ahead_s) <= 1.0:
        return None
    off = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"
    text = f"this machine's clock is {off} the swarm's (median of {len(info.peers)})"
    if abs(ahead_s) > CLOCK_LIMIT_S:
        remedy = "set it, for example by timedatectl set-ntp true"
        raise SwarmError(f"{text}, and {CLOCK_LIMIT_S:.0f} s is the limit; {remedy}")
    return text


async def fetch_files(
    initial_peers: Sequence[str],
    wanted: FilesByDigest,
    most_bytes: int,
    identity_path: Path | None,
    gate: Gate | None,
    on_progress: Callable[[int], None] = lambda left: None,
) -> None:
    """Fetch files and parts of files from several peers at these addresses at once, `most_bytes` in
    all; each is written whole or not at all. `on_progress` gets how many of those are left.

    `SwarmError`: nobody answers there, or no peer has one of the files; `ConfigError`: no space or
    permission.
    """
    left, reasons = dict(wanted), [""]
    if is_mailbox(initial_peers[0]):
        return await _read_files(initial_peers[0], wanted, most_bytes, on_progress)
    from diloco.swarm.wire.libp2p import Libp2p

    at_once = asyncio.Semaphore(min(PEERS_ASKED, len(wanted)))

    async def ask(peer: str) -> None:
        nonlocal most_bytes
        failures = 0
        while failures < FAILURES:
            async with at_once:
                if not left:
                    return
                digest, (places, limit) = next(iter(left.items()))
                left[digest] = left.pop(digest)  # the next task asks for another file
                try:
                    content = await request_file(visitor, peer, digest, min(limit, most_bytes))
                except (*BROKEN, PayloadError) as error:
                    reasons.append(str(error) or type(error).__name__)
                    failures += 1
                    continue
            failures = 0
            if left.pop(digest, None) is not None:  # at the end several peers send the same part
                _write(places, content)
                most_bytes -= len(content) * len(places)
                on_progress(most_bytes)

    async with aclosing(await Libp2p.client(initial_peers, gate, identity_path)) as visitor:
        visitor.direct = True
        tasks = [asyncio.create_task(ask(peer)) for peer in visitor.seeds]
        try:
            for task in asyncio.as_completed(tasks):
                await task
                if not left:
                    break  # what is still sent has come from another peer
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if left:
        name = next(iter(left.values()))[0][0].path.name
        needed = f"no peer there gives {name}, which the run needs ({reasons[-1]})"
        raise SwarmError(f"{needed}; try another address of the run")


async def _read_files(
    url: str,
    wanted: FilesByDigest,
    most_bytes: int,
    on_progress: Callable[[int], None],
) -> None:
    """Fetch files from a store, as `fetch_files`."""
    from diloco.swarm.mailbox.store import Away, FileStore

    store = FileStore(url)
    for digest, (places, limit) in wanted.items():
        name = f"file/{digest}"
        try:
            content = bytes(await store.read(name, min(limit, most_bytes)))
        except (FileNotFoundError, Away, PayloadError) as error:
            why = f"{store.url}: the run needs {name} ({error})"
            raise SwarmError(f"{why}; try again while one of its peers runs") from None
        if sha256(content).hexdigest() != digest:
            raise SwarmError(f"{store.url}/{name} is not the run's; delete it there, and try again")
        _write(places, content)
        most_bytes -= len(content) * len(places)
        on_progress(most_bytes)


def _write(places: Sequence[FilePart], content: bytes) -> None:
    for path, offset, nbytes in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if nbytes is None:
                replace_file(path, content)
                continue
            path.touch()
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(content)
        except OSError as error:
            why = f"{path} cannot be written ({error.strerror})"
            raise ConfigError(f"run.dir: {why}; choose another") from error


def try_to_listen(
    seeds: Sequence[str],
    listen: Sequence[str],
    announce: Sequence[str],
    gate: Gate,
    identity_path: Path,
) -> tuple[list[str], bool, str]:
    """Listen briefly with these settings, and have a peer at `seeds` call back. Raises as
    `Libp2p.connect`.

    Returns the addresses, True if others can connect there, and the remedy if they cannot.
    """
    from diloco.swarm.wire.libp2p import Libp2p, in_vpn

    places = {"initial_peers": tuple(seeds), "listen": tuple(listen), "announce": tuple(announce)}
    network = SwarmConfig().model_copy(update={**places, "reachable": "yes"})

    async def listen_and_ask() -> tuple[list[str], bool, str]:
        async with aclosing(await Libp2p.connect(network, identity_path, gate)) as peer:
            if not seeds or in_vpn(announce):
                return peer.addresses, peer.reachable, ""
            return peer.addresses, *await ask_to_be_called(peer)

    return asyncio.run(listen_and_ask())


async def spread_revocations(
    initial_peers: Sequence[str], gate: Gate, key: RunKey, revoked: Revoked
) -> Revoked:
    """Give a list to some peers of a swarm, which tell all others; return it merged with their own
    list.

    The gate is that of an observer with the owner's key. `SwarmError` if no peer answers there, or
    takes the list.
    """
    from diloco.swarm.wire.libp2p import Libp2p

    mine = gate.admission
    assert mine is not None
    # the greeting brings the swarm's list
    async with aclosing(await Libp2p.client(initial_peers, gate)) as visitor:
        there = mine.revoked
        if there.number:
            before = (there.token_ids, there.peer_ids, there.number)
            revoked = revoked.extended(key, mine.run_id, *before)
        mine.revoke(revoked)
        answers = await asyncio.gather(*map(visitor.greet, visitor.seeds), return_exceptions=True)
        if all(isinstance(answer, Exception) for answer in answers):
            why = f"nobody there took the list: {answers[0]}"
            raise SwarmError(f"{why}; try another address of the swarm")
        return revoked
