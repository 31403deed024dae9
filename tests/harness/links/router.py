"""The router of a home: an address translation (NAT) for one machine, on whole IPv4 packets.

    192.168.1.2 ── leaves: from the router's public address ──> anybody
    192.168.1.2 <── comes: only from a host and port to which the machine has sent ── anybody

As one machine is behind it, ports stay as they are. Other protocols than TCP and UDP do not pass.
"""

from __future__ import annotations

INSIDE = "192.168.1.2"
CHECKSUMS = {6: 16, 17: 6}  # TCP and UDP: place of the checksum, from the end of the IP header
SOURCE, TARGET = slice(12, 16), slice(16, 20)


class Router:
    """Translates packets between a machine and the public `address` (4 bytes)."""

    def __init__(self, address: bytes) -> None:
        self.address = address
        self._inside = bytes(map(int, INSIDE.split(".")))
        self._flows: set[bytes] = set()  # protocol, port inside, address and port outside

    def move(self, address: bytes) -> None:
        """Take another public address; answers to the old one do not come in any more."""
        self.address, self._flows = address, set()

    def leave(self, packet: bytes) -> bytes | None:
        """Translate a packet of the machine; None if it does not pass."""
        if packet[9] not in CHECKSUMS or packet[SOURCE] != self._inside:
            return None
        ports = _ports(packet)
        self._flows.add(packet[9:10] + ports[:2] + packet[TARGET] + ports[2:])
        return _readdressed(packet, SOURCE, self.address)

    def come(self, packet: bytes) -> bytes | None:
        """Translate a packet for the machine; None if it has not asked for it."""
        ports = _ports(packet)
        flow = packet[9:10] + ports[2:] + packet[SOURCE] + ports[:2]
        return _readdressed(packet, TARGET, self._inside) if flow in self._flows else None


def _ports(packet: bytes) -> bytes:
    """Source and target port, 2 bytes each."""
    head = 4 * (packet[0] & 15)
    return packet[head : head + 4]


def _readdressed(packet: bytes, which: slice, address: bytes) -> bytes:
    """Replace an address; both checksums change by the difference (RFC 1624)."""
    changed = bytearray(packet)
    changed[which] = address
    for at in (10, 4 * (packet[0] & 15) + CHECKSUMS[packet[9]]):
        total = ~_words(packet[at : at + 2]) & 0xFFFF
        total += sum(~_words(packet[part]) & 0xFFFF for part in _halves(which))
        total += sum(_words(changed[part]) for part in _halves(which))
        while total > 0xFFFF:
            total = (total & 0xFFFF) + (total >> 16)
        changed[at : at + 2] = (~total & 0xFFFF).to_bytes(2)
    return bytes(changed)


def _words(two: bytes | bytearray) -> int:
    return int.from_bytes(two)


def _halves(which: slice) -> tuple[slice, slice]:
    middle = which.start + 2
    return slice(which.start, middle), slice(middle, which.stop)
