"""Peers in network namespaces of their own, joined by links that can be cut, slowed, delayed and
made to lose packets.

    peer ── TUN ── emulator.py ── TUN ── peer

In a partition packets vanish, as on the road and unlike a closed socket. Linux and root only.
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

from tests.harness.links.emulator import MTU, tun
from tests.harness.links.pipe import WORSE, Shape
from tests.harness.links.router import INSIDE

PREFIX = "chs"
# A network of AS112 (RFC 7535): its addresses count as public, and no peer has one in earnest.
NETWORK, PORT = "192.31.196", 4100
MOST = 125  # peers with two addresses each in one /24; interface names have 15 characters


@functools.cache
def unavailable() -> str | None:
    """Why this machine has no namespaces and links for us; None when it has."""
    if os.name != "posix" or not hasattr(os, "geteuid"):
        return "not Linux"
    if os.geteuid() != 0:
        return "not root"
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    name = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        os.close(tun(f"{PREFIX}p{os.getpid()}"))
    except OSError as error:
        return str(error)
    finally:
        _try("ip", "netns", "del", name)
    return None


@contextlib.contextmanager
def networks(reason: str | None, base: Shape, homes: bool = False) -> Iterator[Loopback]:
    """Where the peers of a swarm live; everything that was made is gone afterwards.

    A `reason` against namespaces leaves the loopback. `base` is what all links do from the
    beginning: its rate in both directions, the rest once between any two peers. With `homes`, all
    but peer 0 are behind routers of their own.
    """
    if reason is not None:
        yield Loopback(reason)
        return
    _sweep()
    with contextlib.closing(Links(os.getpid(), base, homes)) as links:
        yield links


class Loopback:
    """All peers on 127.0.0.1; faults of links cannot happen there, for a reason that is said."""

    where = "loopback"

    def __init__(self, reason: str) -> None:
        # why links are not as was asked; "" if they are
        self.unshaped = f"peers share the loopback ({reason})"

    def add(self, peer: int) -> None:
        """A place for a peer, connected with all."""

    def listen(self, peer: int) -> str:
        """The address on which a peer listens."""
        return "/ip4/127.0.0.1/tcp/0"

    def is_home(self, peer: int) -> bool:
        """Whether nobody can call the peer, as it is behind a router."""
        return False

    def command(self, peer: int) -> list[str]:
        """What a peer's command begins with, to run in its place."""
        return []

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """The peers of a group reach no other group any more; no groups heal all."""

    def worsen(self, peer: int, kind: str, value: str) -> None:
        """Make a link `slow`, `delay` it, or let it lose (`loss`), both ways, until `fast`."""

    def fast(self, peer: int) -> None:
        """The peer's link is as at first."""

    def move(self, peer: int) -> None:
        """The router of the peer gets another public address."""

    def counts(self) -> object:
        """Packets that the emulator lost, dropped, passed, and its processor time; else None."""
        return None


class Links(Loopback):
    """A namespace per peer, and a process of ours that forwards packets between them. It is told by
    JSON lines.

    Raises `OSError` with the tool's words where something cannot be made.
    """

    where = "network namespaces"

    def __init__(self, number: int, base: Shape, homes: bool = False) -> None:
        self.unshaped = ""
        self._number, self._base, self._homes = number, base, homes
        self._moved: set[int] = set()
        self._peers: list[int] = []
        self._troubles: dict[int, Shape] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.links.emulator"],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl+C is not for it; it ends with its input
        )

    def add(self, peer: int) -> None:
        if peer in self._peers:
            return
        if peer >= MOST:
            raise OSError(f"{PREFIX}: more than {MOST} peers")
        self._peers.append(peer)
        space, port = self._space(peer), f"{PREFIX}{self._number}v{peer}"
        _run(*f"ip netns add {space}".split())
        _run(*f"ip -n {space} link set lo up".split())
        home, address = self.is_home(peer), self._address(peer)
        self._ask(add=peer, device=port, address=address, home=home)
        _run(*f"ip link set {port} netns {space} name eth0".split())
        _run(*f"ip -n {space} link set eth0 mtu {MTU} up".split())
        _run(*f"ip -n {space} addr add {INSIDE if home else address}/24 dev eth0".split())
        _run(*f"ip -n {space} route add default dev eth0".split())
        self._shape(peer)

    def listen(self, peer: int) -> str:
        return f"/ip4/0.0.0.0/tcp/{PORT}"

    def is_home(self, peer: int) -> bool:
        return self._homes and peer > 0

    def command(self, peer: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._space(peer)}"]

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        self._ask(sides={peer: side for side, group in enumerate(groups) for peer in group})

    def worsen(self, peer: int, kind: str, value: str) -> None:
        name, _, read = WORSE[kind]
        self._troubles[peer] = replace(self._troubles.get(peer, Shape()), **{name: read(value)})
        self._shape(peer)

    def fast(self, peer: int) -> None:
        self._troubles.pop(peer, None)
        self._shape(peer)

    def move(self, peer: int) -> None:
        if not self.is_home(peer):
            raise OSError(f"p{peer} is not behind a router")
        self._moved ^= {peer}
        self._ask(move=peer, address=self._address(peer))

    def counts(self) -> object:
        return self._ask(count=1)

    def close(self) -> None:
        """Take everything away that was made here; the devices go with the emulator."""
        for peer in self._peers:
            _try("ip", "netns", "del", self._space(peer))
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _address(self, peer: int) -> str:
        return f"{NETWORK}.{peer + 1 + MOST * (peer in self._moved)}"

    def _shape(self, peer: int) -> None:
        """Tell what a peer's link does to what it sends, and to what it receives."""
        trouble = self._troubles.get(peer, Shape())
        up, down = self._base.then(trouble), Shape(rate=self._base.rate).then(trouble)
        self._ask(shape=peer, up=astuple(up), down=astuple(down))

    def _ask(self, **request: Any) -> object:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "it has ended"}')
        if "error" in answer:
            raise OSError(f"link emulator: {answer['error']}")
        return answer["answer"]

    def _space(self, peer: int) -> str:
        return f"{PREFIX}-{self._number}-{peer}"


def _sweep() -> None:
    """What a killed run left, whose number no process has any more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for space, number in re.findall(rf"^({PREFIX}-(\d+)-\w+)", listed, re.MULTILINE):
        if not os.path.exists(f"/proc/{number}"):
            _try("ip", "netns", "del", space)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise OSError(f"{' '.join(command[:4])}: {why}")


def _try(*command: str) -> None:
    with contextlib.suppress(OSError):
        _run(*command)
