"""Forwards packets between the TUN devices of a swarm's peers, late, few and slowly as asked.

    peer ── eth0 (TUN) ── up pipe ── this process ── down pipe ── eth0 (TUN) ── peer

One process per swarm, started by `links.py`. It reads requests from standard input, one JSON object
per line, and answers each with one line; it ends with its input, and its devices with it. What is
for an address that no peer has goes nowhere. `links.py` moves each device to its namespace.

    {"add": PEER, "device": NAME, "address": IP, "home": BOOL}       {"move": PEER, "address": IP}
    {"shape": PEER, "up": [...], "down": [...]}    {"sides": {PEER: SIDE}}    {"count": 1}
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from tests.harness.links.pipe import Pipe, Shape
from tests.harness.links.router import TARGET, Router

MTU = 65000  # few packets, because each costs an interpreter some 20 microseconds
SET_INTERFACE, TUN_NO_INFO = 0x400454CA, 0x1001
BATCH = 64  # packets from one device before the others have their turn
NAP_S = 1.0


@dataclass
class Port:
    """A peer's device, the two directions of its link, and its router, if it is at home."""

    file: int
    up: Pipe
    down: Pipe
    router: Router | None


class Emulator:
    """Ports by peer. A device that is down, or gone with its namespace, swallows what is written to
    it."""

    def __init__(self) -> None:
        self.ports: dict[int, Port] = {}
        self.peers: dict[bytes, int] = {}  # by public address
        self.sides: dict[int, int] = {}

    def ask(self, request: dict[str, Any]) -> object:
        """Do what a line says; the answer."""
        if "add" in request:
            peer = int(request["add"])
            address = socket.inet_aton(request["address"])
            router, device = Router(address) if request["home"] else None, tun(request["device"])
            self.ports[peer] = Port(device, Pipe(2 * peer), Pipe(2 * peer + 1), router)
            self.peers[address] = peer
        elif "move" in request:
            router, address = (
                self.ports[request["move"]].router,
                socket.inet_aton(request["address"]),
            )
            assert router is not None, "it is at home"
            self.peers[address] = self.peers.pop(router.address)
            router.move(address)
        elif "shape" in request:
            port = self.ports[request["shape"]]
            port.up.shape, port.down.shape = Shape(*request["up"]), Shape(*request["down"])
        elif "sides" in request:
            self.sides = {int(peer): side for peer, side in request["sides"].items()}
        else:
            pipes = [pipe for port in self.ports.values() for pipe in (port.up, port.down)]
            return {
                "lost": sum(pipe.lost for pipe in pipes),
                "dropped": sum(pipe.dropped for pipe in pipes),
                "passed": sum(port.down.passed for port in self.ports.values()),
                "cpu_s": time.process_time(),
            }
        return "done"

    def take(self, peer: int, now: float) -> None:
        """What a peer has sent enters its link."""
        port = self.ports[peer]
        for _ in range(BATCH):
            try:
                packet = os.read(port.file, MTU + 100)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    os.close(port.file)
                    del self.ports[peer]
                return
            if packet[0] >> 4 == 4:  # the kernel tries IPv6, too
                port.up.push(now, packet)

    def turn(self, now: float) -> None:
        """Everything that is due moves on: up pipe to down pipe, down pipe to device."""
        for peer, port in self.ports.items():
            for sent in port.up.pull(now):
                packet = sent if port.router is None else port.router.leave(sent)
                if packet is None:
                    continue
                target = self.peers.get(packet[TARGET], -1)
                if target in self.ports and self.sides.get(target, 0) == self.sides.get(peer, 0):
                    self.ports[target].down.push(now, packet)
        for port in self.ports.values():
            for sent in port.down.pull(now):
                packet = sent if port.router is None else port.router.come(sent)
                if packet is None:
                    continue
                try:
                    os.write(port.file, packet)
                except OSError:
                    port.down.dropped += 1

    @property
    def next_at(self) -> float | None:
        pipes = [pipe for port in self.ports.values() for pipe in (port.up, port.down)]
        return min((pipe.next_at for pipe in pipes if pipe.next_at is not None), default=None)


def tun(name: str) -> int:
    """A TUN device of that name, which lives as long as the returned file. Raises `OSError`."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, SET_INTERFACE, struct.pack("16sH22x", name.encode(), TUN_NO_INFO))
    except OSError:
        os.close(file)
        raise
    return file


def main() -> None:
    emulator, asked = Emulator(), b""
    while True:
        files = {port.file: peer for peer, port in emulator.ports.items()}
        due = emulator.next_at
        wait_s = NAP_S if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([0, *files], [], [], wait_s)
        for file in ready:
            if file:
                emulator.take(files[file], time.monotonic())
        emulator.turn(time.monotonic())
        if 0 in ready:
            more = os.read(0, 65536)
            if not more:
                return
            *lines, asked = (asked + more).split(b"\n")
            for line in lines:
                try:
                    answer: dict[str, object] = {"answer": emulator.ask(json.loads(line))}
                except OSError as error:
                    answer = {"error": error.strerror}
                print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
