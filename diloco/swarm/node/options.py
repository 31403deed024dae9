"""What a node is told when it is made, and the core and the context that are made from it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.config import OuterConfig, SwarmConfig, flatten
from diloco.config.manifest import RISING
from diloco.core.facts import Identity, Settings, Sizes
from diloco.core.history import Bounds, Reach, Tip, blank, genesis
from diloco.core.limits import MIN_BYTES_PER_S
from diloco.core.peer import Peer
from diloco.errors import PayloadError
from diloco.messages.fields import MAX_LENGTH
from diloco.outer.digest import part_digests, part_ranges
from diloco.outer.optimizer import OuterStep
from diloco.outer.replica import Replica
from diloco.swarm.context import Context, OnEvent
from diloco.swarm.node.recording import Recording
from diloco.swarm.node.saved import Saved
from diloco.swarm.rpc.inner_state import Snapshot
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import Traffic
from diloco.swarm.wire.tasks import in_thread
from diloco.swarm.wire.transport import Transport
from diloco.text import plain

__all__ = ["NodeOptions", "RunSpec", "core_settings", "make_context"]

SHOWN = 40  # characters of a value of a manifest
LATE, LATE_AT_ONCE = 8, 64  # versions that a base may be behind; where each contribution is a version
SHORT_NAME = 24


@dataclass(frozen=True)
class RunSpec:
    """The run as its peers know it on the wire. Peers with another manifest hash are refused.

    `tokens_per_step` is what an honest peer reports for one inner step; None where every peer chooses its own batch.
    """

    id: str
    manifest_hash: str  # 64 hexadecimal digits
    manifest_text: str  # JSON
    tokens_per_step: int | None = None

    def differences(self, theirs: str) -> list[str]:
        """The keys in which another peer's manifest differs from this one, as `key is THERE there, HERE here`.

        Raises `PayloadError` when the text, which is untrusted, is no manifest.
        """
        try:
            here, there = (dict(flatten(json.loads(text))) for text in (self.manifest_text, theirs))
        except (ValueError, AttributeError, RecursionError):
            raise PayloadError("the other side's manifest is not valid") from None
        differing = (key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
        keys = sorted(key for key in differing if key not in RISING or None in (here.get(key), there.get(key)))
        found = [f"{key} is {str(there.get(key))[:SHOWN]} there, {str(here.get(key))[:SHOWN]} here" for key in keys]
        if not any(key.startswith("parameters.") and (key in here) != (key in there) for key in keys):
            return found
        names = [str(one.get("model.name") or "another one") for one in (there, here)]
        rest = [
            text for text in found if not text.startswith(("model.name is ", "parameters.", "frozen_parameters is "))
        ]
        return [f"the model is {names[0][:SHOWN]} there, {names[1][:SHOWN]} here, with other parameters", *rest]


@dataclass(frozen=True)
class NodeOptions:
    """The run that a node joins, and this peer's own settings.

    `network` travels whole: a new setting of `swarm.` needs no change here. `saved` is what a checkpoint kept; without
    it the node begins with the parameters of its replica, at version 0.
    """

    run: RunSpec
    network: SwarmConfig
    identity_path: Path  # the private key; it is made when it is missing
    name: str = "peer"  # in tables and logs
    saved: Saved | None = None
    gate: Gate = field(default_factory=Gate)  # decides who is let in; the default lets everybody in
    trains: bool = True  # False: this peer only makes versions
    device: str = ""  # shown to watchers
    data: str = ""  # names the sequences that numbers stand for here (see `Hello`)
    inner_state: Snapshot = lambda: None  # what a joiner gets of the inner optimizer; called in other threads
    blank: bool = False  # it has not got what the run starts from
    files: Mapping[str, Path] = field(default_factory=dict)  # that the manifest names, by digest
    planned: Sequence[int] = (0, 0, 0)  # how long the run is by the settings here (see `Status`)
    wall: float | None = None  # seconds of the clock on the wall; None asks the machine
    record: Path | None = None  # where what happens is recorded (see `recording`)


def core_settings(outer: OuterConfig, network: SwarmConfig) -> Settings:
    """How histories grow in a run with these settings."""
    at_once = outer.quorum == 1 and not outer.grace_s and not outer.grace_slack
    return Settings(
        fragments=outer.fragments, sync_every=outer.sync_every, staggered=outer.staggered, overlap=outer.overlap,
        quorum=outer.quorum, grace_s=outer.grace_s, grace_slack=outer.grace_slack,
        late=LATE_AT_ONCE if at_once else LATE,
        staleness_exponent=0.5 if outer.barrier else outer.staleness_exponent, weights=outer.weights,
        delay=outer.delay, windowed=outer.windowed, leased=False, min_peers=network.min_peers,
        heartbeat_s=network.heartbeat_s, min_bytes_per_s=MIN_BYTES_PER_S,
    )  # fmt: skip


class OuterArithmetic:
    """`Arithmetic` of the outer optimizer. Reaches are rounded, so that no machine's logarithm makes another book; and
    they are those of the whole momentum, which rises with a plan that not all peers hear of at once.
    """

    def __init__(self, replica: Replica) -> None:
        settings = replica.settings.model_copy(update={"momentum_warmup": 0, "rounds": None})
        self._optimizer = type(replica.optimizer)(settings)

    def bounds(self, number: int, contributions: int, pushes: int, delay: int, longest: float, reach: Reach) -> Bounds:
        """How far the step to version `number` may move an anchor, and the reach after it."""
        step = OuterStep(number - 1, contributions, pushes, delay)
        limit, after = self._optimizer.reach(step, longest, reach)
        momentum, window, lost = (float(f"{min(one, MAX_LENGTH):.6g}") for one in after)
        return Bounds(limit, (momentum, window, lost))


async def make_context(options: NodeOptions, replica: Replica, transport: Transport, on_event: OnEvent) -> Context:
    """What the parts of a node share. The replica and the core go on where `options.saved` stopped."""
    saved, settings = options.saved, core_settings(replica.settings, options.network)
    if saved is not None:
        await in_thread(saved.load_, replica)
    identity = Identity(
        transport.me, options.name[:SHORT_NAME], options.run.id, options.run.manifest_hash, transport, options.trains,
        transport.reachable and options.gate.authors(transport.me), options.device, options.data,
        options.run.tokens_per_step, options.gate.authors,
    )  # fmt: skip
    now, wall = _clocks(options)
    first, tokens, rounds = options.planned
    core = Peer(
        identity, settings, OuterArithmetic(replica), await _tips(options, replica), _sizes(replica), now,
        int(wall * 1000), saved.processed if saved else 0, saved.stamp if saved else 0, (first, tokens, rounds),
    )  # fmt: skip
    core.addresses.may_call = transport.may_call
    core.addresses.hear(transport.me, {transport.me: transport.addresses if transport.reachable else []})
    transport.where = core.addresses.of
    traffic = Traffic(upload_limit=options.network.upload_limit)
    context = Context(core, replica, transport, options.gate, on_event, traffic)
    options.gate.on_refused = lambda peer, why: context.note("refused", peer=plain(peer), why=why)
    if options.record is not None:
        context.tap = Recording(options.record, core.facts).event
    return context


def _clocks(options: NodeOptions) -> tuple[float, float]:
    return asyncio.get_running_loop().time(), time.time() if options.wall is None else options.wall


async def _tips(options: NodeOptions, replica: Replica) -> list[Tip]:
    """What the anchors of a node are that begins."""
    if options.saved is not None:
        return list(options.saved.tips)
    fragments = range(len(replica.fragments))
    if options.blank:
        return [blank(fragment) for fragment in fragments]
    parts = [await in_thread(part_digests, replica.anchors[fragment]) for fragment in fragments]
    return [genesis(fragment, options.run.id, parts[fragment]) for fragment in fragments]


def _sizes(replica: Replica) -> list[Sizes]:
    return [
        Sizes(
            replica.payload_nbytes(f.index), replica.update_nbytes(f.index), 4 * f.numel, len(part_ranges(f.numel))
        )
        for f in replica.fragments
    ]  # fmt: skip
