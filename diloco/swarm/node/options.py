"""What a node is told when it is made, and the core and the context that are made from it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

VALUE_CHARS = 40  # of a value of a manifest, in an error
MODEL_KEYS = ("model.name", "frozen_parameters")
# versions that a base may be behind; where each contribution is a version
LATE, LATE_AT_ONCE = 8, 64
SHORT_NAME = 24


@dataclass(frozen=True)
class RunSpec:
    """The run as its peers know it on the wire. Peers with another manifest hash are refused.

    `tokens_per_step` is what an honest peer reports for one inner step; None where every peer
    chooses its own batch.
    """

    id: str
    manifest_hash: str  # 64 hexadecimal digits
    manifest_text: str  # JSON
    tokens_per_step: int | None = None

    def differences(self, manifest: str) -> list[str]:
        """Where an untrusted manifest differs (`key is A there, B here`), or `PayloadError`."""
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
    identity_path: Path  # the private key; it is made when it is missing
    name: str = "peer"  # in tables and logs
    saved: Saved | None = None
    gate: Gate = field(default_factory=Gate)  # decides who is let in; the default lets everybody in
    trains: bool = True  # False: this peer only makes versions
    device: str = ""  # shown to watchers
    data: str = ""  # names the sequences that numbers stand for here (see `Hello`)
    # the inner optimizer's state for a joiner; called in other threads
    inner_state: Callable[[], InnerState | None] = lambda: None
    blank: bool = False  # it has not got what the run starts from
    files: Mapping[str, FilePart] = field(default_factory=dict)  # for joiners, by digest
    planned: Sequence[int] = (0, 0, 0)  # how long the run is by the settings here (see `Status`)
    wall: float | None = None  # seconds of the clock on the wall; None asks the machine
    record: Path | None = None  # where what happens is recorded (see `recording`)


def core_settings(outer: OuterConfig, network: SwarmConfig) -> ProtocolSettings:
    """How histories grow in a run with these settings."""
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
        delay=outer.delay,
        windowed=outer.windowed,
        late=LATE_AT_ONCE if at_once else LATE,
        staleness_exponent=0.5 if outer.barrier else outer.staleness_exponent,
        leased=False,
        min_peers=network.min_peers,
        heartbeat_s=network.heartbeat_s,
    )


class OuterArithmetic:
    """`Arithmetic` of the outer optimizer. Reaches are rounded, so that no machine's logarithm
    makes another book; and they are those of the whole momentum, which rises with a plan that not
    all peers hear of at once.
    """

    def __init__(self, replica: Replica) -> None:
        settings = replica.settings.model_copy(update={"momentum_warmup": 0, "rounds": None})
        self._optimizer = type(replica.optimizer)(settings)

    def bounds(
        self, number: int, contributions: int, pushes: int, delay: int, longest: float, reach: Reach
    ) -> Bounds:
        """How far the step to version `number` may move an anchor, and the reach after it."""
        step = OuterStep(number - 1, contributions, pushes, delay)
        limit, after = self._optimizer.reach(step, longest, reach)
        momentum, window, lost = (float(f"{min(bound, MAX_LENGTH):.6g}") for bound in after)
        return Bounds(limit, (momentum, window, lost))


async def make_context(
    options: NodeOptions, replica: Replica, transport: Transport, on_event: OnEvent
) -> Context:
    """What the parts of a node share, from where `options.saved` stopped."""
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
    core = Peer(
        identity,
        core_settings(replica.settings, options.network),
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
    """What the anchors of a node are that begins."""
    if options.saved is not None:
        return list(options.saved.tips)
    if options.blank:
        return [blank(fragment) for fragment in range(len(replica.fragments))]
    parts = [await in_thread(part_digests, anchor) for anchor in replica.anchors]
    return [genesis(fragment, options.run.id, digests) for fragment, digests in enumerate(parts)]
