"""The options of a node, and the core and the context that are made from them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diloco.config import OuterConfig, SwarmConfig, flatten
from diloco.config.address import address_error
from diloco.config.manifest import RISING
from diloco.core.history import Bounds, Reach, Tip, blank, genesis
from diloco.core.peer import Peer
from diloco.core.settings import Identity, ProtocolSettings, Sizes
from diloco.errors import PayloadError
from diloco.messages.fields import MAX_LENGTH
from diloco.outer.digest import part_digests, part_ranges
from diloco.outer.optimizer import OuterStep
from diloco.outer.replica import Replica
from diloco.swarm.context import Context, FilePart, OnEvent
from diloco.swarm.node.recording import Recording
from diloco.swarm.node.saved import Saved
from diloco.swarm.rpc.inner_state import InnerState
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import Traffic
from diloco.swarm.wire.tasks import in_thread
from diloco.swarm.wire.transport import Transport
from diloco.text import plain

VALUE_CHARS = 40  # most characters of a manifest's value in an error
MODEL_KEYS = ("model.name", "frozen_parameters")
# versions that a base may be behind; `LATE_AT_ONCE` if each contribution makes a version
LATE, LATE_AT_ONCE = 8, 64
PROBATION = 8  # contributions for which a peer of a public run weighs a quarter
SHORT_NAME = 24


@dataclass(frozen=True)
class RunSpec:
    """Identity of a run on the wire. Peers with another manifest hash are refused.

    `tokens_per_step` are the tokens of one inner step, the same for all honest peers; None if each
    peer chooses its own batch.
    """

    id: str
    manifest_hash: str  # 64 hexadecimal digits
    manifest_text: str  # JSON
    tokens_per_step: int | None = None

    def differences(self, manifest: str) -> list[str]:
        """List the settings that differ in an untrusted manifest; `PayloadError` if invalid."""
        try:
            texts = (self.manifest_text, manifest)
            here, there = (dict(flatten(json.loads(text))) for text in texts)
        except (ValueError, AttributeError, RecursionError):
            raise PayloadError("the other side's manifest is not valid") from None
        lines, keys = [], sorted(here.keys() | there.keys())
        keys = [key for key in keys if here.get(key) != there.get(key)]
        keys = [key for key in keys if key not in RISING or None in (here.get(key), there.get(key))]
        if any(key.startswith("parameters.") and (key in here) != (key in there) for key in keys):
            names = (values.get("model.name") or "another one" for values in (there, here))
            theirs, ours = (str(name)[:VALUE_CHARS] for name in names)
            lines = [f"the model is {theirs} there, {ours} here, with other parameters"]
            keys = [key for key in keys if not key.startswith(("parameters.", *MODEL_KEYS))]
        for key in keys:
            theirs, ours = (str(values.get(key))[:VALUE_CHARS] for values in (there, here))
            lines.append(f"{key} is {theirs} there, {ours} here")
        return lines


@dataclass(frozen=True)
class NodeOptions:
    """The run that a node joins, and this peer's own settings."""

    run: RunSpec
    network: SwarmConfig
    identity_path: Path  # the private key; made if it is missing
    name: str = "peer"  # in tables and logs
    saved: Saved | None = None
    gate: Gate = field(default_factory=Gate)  # admits peers; the default admits everybody
    trains: bool = True  # False for a peer that only makes versions
    device: str = ""  # shown to watchers
    data: str = ""  # name of the numbered training sequences (see `Hello`)
    # the inner optimizer's state for a joiner; called in other threads
    inner_state: Callable[[], InnerState | None] = lambda: None
    blank: bool = False  # True: this peer lacks the parameters that the run starts from
    files: Mapping[str, FilePart] = field(default_factory=dict)  # for joiners, by digest
    planned: Sequence[int] = (0, 0, 0)  # length of the run in the settings here (see `Status`)
    wall: float | None = None  # unix time in seconds; None reads the machine's clock
    record: Path | None = None  # file for the events of the core (see `recording`)


def core_settings(outer: OuterConfig, network: SwarmConfig) -> ProtocolSettings:
    """Derive the protocol's settings from those of a run."""
    at_once = outer.quorum == 1 and not outer.grace_s and not outer.grace_slack
    return ProtocolSettings(
        fragments=outer.fragments,
        sync_every=outer.sync_every,
        staggered=outer.staggered,
        overlap=outer.overlap,
        quorum=outer.quorum,
        grace_s=outer.grace_s,
        grace_slack=outer.grace_slack,
        weights=outer.weights,
        probation=PROBATION if network.admit == "anyone" else 0,
        delay=outer.delay,
        windowed=outer.windowed,
        late=LATE_AT_ONCE if at_once else LATE,
        staleness_exponent=0.5 if outer.barrier else outer.staleness_exponent,
        leased=False,
        min_peers=network.min_peers,
        heartbeat_s=network.heartbeat_s,
    )


def _with_mailbox(settings: ProtocolSettings) -> ProtocolSettings:
    """Wait for peers that look at their mailboxes every five heartbeats, or less often."""
    look_s = 5.0 * settings.heartbeat_s
    return replace(
        settings,
        looks=True,
        silence_s=120 * look_s,  # the mailbox knows when a peer's box is late
        settle_s=3 * look_s,
        stall_s=max(settings.stall_s, 4 * look_s),
        refresh_s=2 * look_s,
        stuck_s=max(settings.stuck_s, 12 * look_s),
        deadline_s=max(60.0, 12 * look_s),  # for the first bytes of an object, some 16 MB
    )


class OuterArithmetic:
    """`Arithmetic` of the outer optimizer.

    Reaches are rounded, so that books do not depend on a machine's logarithm. They assume the full
    momentum, because not all peers learn the plan by which it rises at the same time.
    """

    def __init__(self, replica: Replica) -> None:
        settings = replica.settings.model_copy(update={"momentum_warmup": 0, "rounds": None})
        self._optimizer = type(replica.optimizer)(settings)

    def bounds(
        self, number: int, contributions: int, pushes: int, delay: int, longest: float, reach: Reach
    ) -> Bounds:
        """Bound the anchor's move in the step to version `number`; also give the reach after it."""
        step = OuterStep(number - 1, contributions, pushes, delay)
        limit, after = self._optimizer.reach(step, longest, reach)
        momentum, window, lost = (float(f"{min(bound, MAX_LENGTH):.6g}") for bound in after)
        return Bounds(limit, (momentum, window, lost))


async def make_context(
    options: NodeOptions, replica: Replica, transport: Transport, on_event: OnEvent
) -> Context:
    """Make the context of a node, which continues from `options.saved`."""
    run, gate, saved = options.run, options.gate, options.saved
    if saved is not None:
        await in_thread(saved.load_, replica)
    identity = Identity(
        transport.me,
        options.name[:SHORT_NAME],
        run.id,
        run.manifest_hash,
        transport,
        trains=options.trains,
        may_author=transport.reachable and gate.authors(transport.me),
        device=options.device,
        data=options.data,
        tokens_per_step=run.tokens_per_step,
        is_author=gate.authors,
    )
    steps, tokens, rounds = options.planned
    up, down = replica.payloads, replica.updates
    settings = core_settings(replica.settings, options.network)
    core = Peer(
        identity,
        settings if transport.store is None else _with_mailbox(settings),
        OuterArithmetic(replica),
        await _tips(options, replica),
        [
            Sizes(up[f.index].nbytes, down[f.index].nbytes, 4 * f.numel, len(part_ranges(f.numel)))
            for f in replica.fragments
        ],
        asyncio.get_running_loop().time(),
        int(1000 * (time.time() if options.wall is None else options.wall)),
        saved.processed if saved else 0,
        saved.stamp if saved else 0,
        (steps, tokens, rounds),
    )
    core.addresses.is_sound = lambda address: address_error(address) is None
    core.addresses.may_call = transport.may_call
    own_addresses = transport.addresses if transport.reachable else []
    core.addresses.hear(transport.me, {transport.me: own_addresses})
    transport.addresses_of = core.addresses.of
    context = Context(
        *(core, replica, transport, gate, on_event),
        traffic=Traffic(upload_limit=options.network.upload_limit),
        manifest=run.manifest_text,
        files=options.files,
        inner_state=options.inner_state,
    )
    gate.on_refused = lambda peer, why: context.note("refused", peer=plain(peer), why=why)
    if options.record is not None:
        context.tap = Recording(options.record, core.facts).event
    return context


async def _tips(options: NodeOptions, replica: Replica) -> list[Tip]:
    """Return the tips of a new node's anchors: saved, blank, or of the run's start."""
    if options.saved is not None:
        return list(options.saved.tips)
    if options.blank:
        return [blank(fragment) for fragment in range(len(replica.fragments))]
    parts = [await in_thread(part_digests, anchor) for anchor in replica.anchors]
    return [genesis(fragment, options.run.id, digests) for fragment, digests in enumerate(parts)]
