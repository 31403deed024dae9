"""Peers in network namespaces of their own, joined by links that can be cut, slowed, delayed and made to lose packets.

    Links      peer ── veth pair ── bridge ── veth pair ── peer        cut, slowed; with netem also delayed and lossy
    Emulated   peer ── TUN ── emulator.py ── TUN ── peer          all of it, where the kernel has no netem

A partition moves one side's ports to another bridge, so that frames vanish, as on the road and unlike a closed socket;
neighbours are written down beforehand, because an unanswered ARP would tell the sender at once. A slow link is a token
bucket on both ends of the pair. Linux and root only. Imported by `chaos` and `bench_links`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from diloco.testing.links.emulator import MTU, tun
from diloco.testing.links.pipe import WORSE, Shape

__all__ = ["Emulated", "Links", "Loopback", "kernel_delays", "networks", "unavailable", "unemulated"]

PREFIX = "chs"
MOST = 250  # addresses of one /24, and interface names of at most 15 characters
BURST = "16kb"
PATIENCE = "400ms"  # a queue of that length in front of the bucket, then packets are dropped


@functools.cache
def unavailable() -> str | None:
    """Why this machine has no namespaces for us; None when it has."""
    if os.name != "posix" or not hasattr(os, "geteuid"):
        return "not Linux"
    if os.geteuid() != 0:
        return "not root"
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    name = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        with _probe():
            return None
    except OSError as error:
        return str(error)
    finally:
        _try("ip", "netns", "del", name)


@functools.cache
def kernel_delays() -> bool:
    """Whether the kernel has netem."""
    try:
        with _probe() as device:
            _run("tc", "qdisc", "add", "dev", device, "root", "netem", "delay", "1ms")
    except OSError:
        return False
    return True


@functools.cache
def unemulated() -> str | None:
    """Why links cannot be emulated with TUN devices; None where they can."""
    try:
        os.close(tun(f"{PREFIX}p{os.getpid()}"))
    except OSError as error:
        return f"no netem, and /dev/net/tun: {error.strerror}"
    return None


@contextlib.contextmanager
def networks(reason: str | None, delays: bool = False, base: Shape | None = None) -> Iterator[Loopback]:
    """Where the peers of a swarm live; everything that was made is gone afterwards.

    A `reason` against namespaces leaves the loopback. `delays` says that links shall be delayed or lossy, which takes
    the emulator where the kernel has no netem; `base` is what all links do from the beginning (its rate in both
    directions, the rest once between any two peers).
    """
    if reason is not None:
        yield Loopback(reason)
        return
    _sweep()
    emulated = delays and not kernel_delays() and unemulated() is None
    links = (Emulated if emulated else Links)(os.getpid(), base or Shape())
    try:
        yield links
    finally:
        links.close()


class Loopback:
    """All peers on 127.0.0.1; faults of links cannot happen there, for a reason that is said."""

    where = "loopback"

    def __init__(self, reason: str) -> None:
        self.unshaped: str | None = f"peers share the loopback ({reason})"  # why links are not as was asked

    def add(self, peer: int) -> None:
        return

    def address(self, peer: int) -> str:
        return "127.0.0.1"

    def command(self, peer: int) -> list[str]:
        """What a peer's command begins with, to run in its place."""
        return []

    def partition(self, groups: Sequence[Sequence[int]]) -> str | None:
        """These peers no longer reach those; returns why that cannot be, else None. The others likewise."""
        return self.unshaped

    def heal(self) -> str | None:
        return self.unshaped

    def worsen(self, peer: int, kind: str, value: str) -> str | None:
        """Make a peer's link `slow`, `delay` it or make it lossy (`loss`), in both directions, until `fast`."""
        return self.unshaped

    def fast(self, peer: int) -> str | None:
        return self.unshaped

    def counts(self) -> dict[str, Any] | None:
        """What the emulator did: packets lost, dropped and passed, and its processor time; None without one."""
        return None


class Links(Loopback):
    """A namespace per peer. Raises `OSError` with the tool's words where something cannot be made."""

    where = "network namespaces"

    def __init__(self, number: int, base: Shape) -> None:
        self.unshaped = None
        self._number, self._base = number, base
        self._peers: list[int] = []
        self._troubles: dict[int, Shape] = {}
        self._begin()

    def add(self, peer: int) -> None:
        """A namespace for a peer, connected with all."""
        if peer in self._peers:
            return
        if peer >= MOST:
            raise OSError(f"{PREFIX}: more than {MOST} peers")
        self._peers.append(peer)
        space = self._space(peer)
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        self._connect(peer, space)
        _run("ip", "-n", space, "addr", "add", f"{self.address(peer)}/24", "dev", "eth0")
        self._introduce(peer)
        if self._base != Shape():
            self.unshaped = self._apply(peer)

    def address(self, peer: int) -> str:
        return f"10.77.0.{peer + 1}"

    def command(self, peer: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._space(peer)}"]

    def partition(self, groups: Sequence[Sequence[int]]) -> str | None:
        for side, group in enumerate(groups):
            for peer in group:
                _run("ip", "link", "set", self._port(peer), "master", self._bridge(side))
        return None

    def heal(self) -> str | None:
        for peer in self._peers:
            _run("ip", "link", "set", self._port(peer), "master", self._bridges[0])
        return None

    def worsen(self, peer: int, kind: str, value: str) -> str | None:
        name, _, read = WORSE[kind]
        self._troubles[peer] = replace(self._troubles.get(peer, Shape()), **{name: read(value)})
        return self._apply(peer)

    def fast(self, peer: int) -> str | None:
        self._troubles.pop(peer, None)
        return self._apply(peer)

    def close(self) -> None:
        """Take everything away that was made here."""
        for peer in self._peers:
            _try("ip", "link", "del", self._port(peer))  # the kernel would do it too, but some time later
            _try("ip", "netns", "del", self._space(peer))
        for bridge in self._bridges:
            _try("ip", "link", "del", bridge)
        self._peers.clear()
        self._bridges.clear()

    # -- how peers are connected --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._bridges: list[str] = []
        self._bridge(0)

    def _connect(self, peer: int, space: str) -> None:
        """Make eth0 in that namespace."""
        port = self._port(peer)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", port, "master", self._bridges[0], "up")
        _run("ip", "-n", space, "link", "set", "eth0", "address", _mac(peer), "up")

    def _introduce(self, peer: int) -> None:
        for other in self._peers:
            if other != peer:
                self._know(peer, other)
                self._know(other, peer)

    def _shapes(self, peer: int) -> tuple[Shape, Shape]:
        """What a peer's link does to what it sends, and to what it receives."""
        trouble = self._troubles.get(peer, Shape())
        return self._base.then(trouble), Shape(rate=self._base.rate).then(trouble)

    def _apply(self, peer: int) -> str | None:
        """Shape both directions; returns why that cannot be, else None."""
        up, down = self._shapes(peer)
        for place, device, shape in (((), self._port(peer), down), (("-n", self._space(peer)), "eth0", up)):
            command = ("tc", *place, "qdisc")
            if shape == Shape():
                _try(*command, "del", "dev", device, "root")
                continue
            discipline = _discipline(shape)
            try:
                _run(*command, "replace", "dev", device, "root", *discipline)
            except OSError as error:
                return unemulated() or f"{discipline[0]}: {error}"
        return None

    def _know(self, peer: int, other: int) -> None:
        neighbour = (self.address(other), "lladdr", _mac(other), "dev", "eth0", "nud", "permanent")
        _run("ip", "-n", self._space(peer), "neigh", "replace", *neighbour)

    def _bridge(self, side: int) -> str:
        while len(self._bridges) <= side:
            name = f"{PREFIX}{self._number}b{len(self._bridges)}"
            _run("ip", "link", "add", name, "type", "bridge")
            self._bridges.append(name)
            _run("ip", "link", "set", name, "up")
        return self._bridges[side]

    def _space(self, peer: int) -> str:
        return f"{PREFIX}-{self._number}-{peer}"

    def _port(self, peer: int) -> str:
        return f"{PREFIX}{self._number}v{peer}"


class Emulated(Links):
    """Links that a process of ours forwards packets over; it is told by JSON lines, see `emulator.py`."""

    where = "network namespaces with emulated links"

    def partition(self, groups: Sequence[Sequence[int]]) -> str | None:
        self._ask(sides={peer: side for side, group in enumerate(groups) for peer in group})
        return None

    def heal(self) -> str | None:
        self._ask(sides={})
        return None

    def counts(self) -> dict[str, Any] | None:
        counted = self._ask(count=1)
        assert isinstance(counted, dict)
        return counted

    def close(self) -> None:
        super().close()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _begin(self) -> None:
        self._bridges = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "diloco.testing.links.emulator"],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl+C is not for it; it ends with its input
        )

    def _connect(self, peer: int, space: str) -> None:
        self._ask(add=peer, device=self._port(peer))
        _run("ip", "link", "set", self._port(peer), "netns", space, "name", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "mtu", str(MTU), "up")

    def _introduce(self, peer: int) -> None:
        return  # packets carry no hardware addresses here

    def _apply(self, peer: int) -> str | None:
        up, down = self._shapes(peer)
        self._ask(shape=peer, up=astuple(up), down=astuple(down))
        return None

    def _ask(self, **request: Any) -> object:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "it has ended"}')
        if "error" in answer:
            raise OSError(f"link emulator: {answer['error']}")
        return answer["answer"]


def _discipline(shape: Shape) -> list[str]:
    """What `tc` is told; the token bucket needs no netem."""
    rate = [] if shape.rate is None else ["rate", f"{shape.rate * 8:.0f}bit"]
    if shape == Shape(rate=shape.rate):
        return ["tbf", *rate, "burst", BURST, "latency", PATIENCE]
    delay = ["delay", f"{shape.delay_s * 1e6:.0f}us", *([f"{shape.jitter_s * 1e6:.0f}us"] if shape.jitter_s else [])]
    return ["netem", *delay, "loss", f"{shape.loss * 100:.4f}%", *rate]


@contextlib.contextmanager
def _probe() -> Iterator[str]:
    """A device to try things on."""
    name = f"{PREFIX}p{os.getpid()}"
    _run("ip", "link", "add", name, "type", "bridge")
    try:
        yield name
    finally:
        _try("ip", "link", "del", name)


def _sweep() -> None:
    """What a killed run left, whose number no process has any more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    links = subprocess.run(["ip", "-o", "link", "show"], capture_output=True, text=True).stdout
    for space, number in re.findall(rf"^({PREFIX}-(\d+)-\w+)", listed, re.MULTILINE):
        if not os.path.exists(f"/proc/{number}"):
            _try("ip", "netns", "del", space)
    for link, number in re.findall(rf"\b({PREFIX}(\d+)[bv]\d+)[:@]", links):
        if not os.path.exists(f"/proc/{number}"):
            _try("ip", "link", "del", link)


def _mac(peer: int) -> str:
    return f"02:d1:10:c0:00:{peer + 1:02x}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command[:4])}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")


def _try(*command: str) -> None:
    with contextlib.suppress(OSError):
        _run(*command)
