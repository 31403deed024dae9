"""Peers in network namespaces of their own, joined by a bridge: links that can be cut and slowed. Imported by `chaos`.

    peer ── veth pair ── bridge ── veth pair ── peer

A partition moves one side's ports to another bridge, so that frames vanish, as on the road and unlike a closed socket;
neighbours are written down beforehand, because an unanswered ARP would tell the sender at once. A slow link is a token
bucket on both ends of the pair. Delay needs netem, which not every kernel has. Linux and root only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

__all__ = ["Links", "Loopback", "networks", "unavailable"]

PREFIX = "chs"
MOST = 250  # addresses of one /24, and interface names of at most 15 characters
BURST = "16kb"
PATIENCE = "400ms"  # a queue of that length in front of the bucket, then packets are dropped


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
        _run("ip", "link", "add", f"{PREFIX}p{os.getpid()}", "type", "bridge")
        _run("ip", "link", "del", f"{PREFIX}p{os.getpid()}")
    except OSError as error:
        return str(error)
    finally:
        _try("ip", "netns", "del", name)
    return None


@contextlib.contextmanager
def networks(wanted: bool) -> Iterator[Links | Loopback]:
    """Where the peers of a swarm live; everything that was made is gone afterwards."""
    if not wanted:
        yield Loopback()
        return
    _sweep()
    links = Links(os.getpid())
    try:
        yield links
    finally:
        links.close()


class Loopback:
    """All peers on 127.0.0.1; faults of links cannot happen there."""

    where = "loopback"

    def add(self, peer: int) -> None:
        return

    def address(self, peer: int) -> str:
        return "127.0.0.1"

    def command(self, peer: int) -> list[str]:
        """What a peer's command begins with, to run in its place."""
        return []

    def partition(self, groups: Sequence[Sequence[int]]) -> str | None:
        """These peers no longer reach those; returns why that cannot be, else None. The others likewise."""
        return "peers share the loopback (no namespaces)"

    def heal(self) -> str | None:
        return "peers share the loopback (no namespaces)"

    def slow(self, peer: int, rate: str) -> str | None:
        return "peers share the loopback (no namespaces)"

    def fast(self, peer: int) -> str | None:
        return "peers share the loopback (no namespaces)"

    def delay(self, peer: int, delay: str) -> str | None:
        return "peers share the loopback (no namespaces)"


class Links(Loopback):
    """A namespace per peer. Raises `OSError` with the tool's words where something cannot be made."""

    where = "network namespaces"

    def __init__(self, number: int) -> None:
        self._number = number
        self._peers: list[int] = []
        self._bridges: list[str] = []
        self._bridge(0)

    def add(self, peer: int) -> None:
        """A namespace for a peer, connected with all."""
        if peer in self._peers:
            return
        if peer >= MOST:
            raise OSError(f"{PREFIX}: more than {MOST} peers")
        self._peers.append(peer)
        space, port = self._space(peer), self._port(peer)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", port, "master", self._bridges[0], "up")
        inside = ("ip", "-n", space)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", "eth0", "address", _mac(peer), "up")
        _run(*inside, "addr", "add", f"{self.address(peer)}/24", "dev", "eth0")
        for other in self._peers:
            if other != peer:
                self._know(peer, other)
                self._know(other, peer)

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

    def slow(self, peer: int, rate: str) -> str | None:
        return self._shape(peer, "tbf", "rate", rate, "burst", BURST, "latency", PATIENCE)

    def fast(self, peer: int) -> str | None:
        _try("tc", "qdisc", "del", "dev", self._port(peer), "root")
        _try("ip", "netns", "exec", self._space(peer), "tc", "qdisc", "del", "dev", "eth0", "root")
        return None

    def delay(self, peer: int, delay: str) -> str | None:
        return self._shape(peer, "netem", "delay", delay)

    def close(self) -> None:
        """Take everything away that was made here."""
        for peer in self._peers:
            _try("ip", "link", "del", self._port(peer))  # the kernel would do it too, but some time later
            _try("ip", "netns", "del", self._space(peer))
        for bridge in self._bridges:
            _try("ip", "link", "del", bridge)
        self._peers, self._bridges = [], []

    def _shape(self, peer: int, *discipline: str) -> str | None:
        try:
            _run("tc", "qdisc", "replace", "dev", self._port(peer), "root", *discipline)
            _run("tc", "-n", self._space(peer), "qdisc", "replace", "dev", "eth0", "root", *discipline)
        except OSError as error:
            return f"{discipline[0]}: {error}"
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
