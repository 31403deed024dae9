"""What a node is told when it is made, and the protocol core and the context that are made from it."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.config import SwarmConfig, flatten
from diloco.config.manifest import RISING
from diloco.errors import PayloadError
from diloco.outer.replica import Replica
from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.protocol.ledger import union
from diloco.protocol.peer import Peer
from diloco.swarm.conversations.context import Context, OnEvent
from diloco.swarm.conversations.inner_state import Snapshot
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import Traffic
from diloco.swarm.wire.transport import Transport

__all__ = ["NodeOptions", "RunSpec", "make_context"]

TERM_GAP = 2**16
SHOWN = 40  # characters of a value of a manifest


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
    trains: bool = True  # False: this peer only holds fragments
    device: str = ""  # shown to watchers
    data: str = ""  # names the sequences that numbers stand for here (see `Hello`)
    inner_state: Snapshot = lambda: None  # what a joiner gets of the inner optimizer; called in other threads
    blank: bool = False  # it has not got what the run starts from
    files: Mapping[str, Path] = field(default_factory=dict)  # that the manifest names, by digest
    planned: Sequence[int] = (0, 0, 0)  # how long the run is by the settings here (see `Status`)
    seed: str | None = None  # for choices that no other peer may foresee; None takes the operating system's randomness


async def make_context(options: NodeOptions, replica: Replica, transport: Transport, on_event: OnEvent) -> Context:
    """What the conversations of a node share. The replica and the protocol go on where `options.saved` stopped."""
    saved = options.saved
    if saved is not None:
        await in_thread(saved.load_, replica)
    protocol = Peer(
        me=transport.me,
        name=options.name,
        run_id=options.run.id,
        manifest_hash=options.run.manifest_hash,
        digests=await in_thread(replica.digests),
        versions=None if saved is None else list(saved.versions),
        applied_tokens=0 if saved is None else saved.applied_tokens,
        trains=options.trains,
        holds=transport.reachable and options.gate.authors(transport.me),
        min_peers=options.network.min_peers,
        newcomer=bool(transport.seeds),
        outer=replica.settings,
        tokens_per_step=options.run.tokens_per_step,
        device=options.device,
        data=options.data,
        signer=transport,
        planned=options.planned,
        payload_bytes=[replica.payload_nbytes(fragment) for fragment in range(len(replica.fragments))],
    )
    if options.blank and saved is None:
        protocol.blank, protocol.holds = True, False
    if saved is not None:
        _go_on(protocol, saved, options.seed)
    protocol.may_author = options.gate.authors
    protocol.on_planned = lambda planned: replica.plan(planned[-1] or None)
    protocol.address_book.may_call = transport.may_call
    protocol.address_book.hear(transport.me, {transport.me: transport.addresses if transport.reachable else []})
    transport.where = protocol.address_book.of
    context = Context(
        protocol=protocol,
        replica=replica,
        transport=transport,
        manifest_text=options.run.manifest_text,
        gate=options.gate,
        on_event=on_event,
        files=options.files,
        traffic=Traffic(upload_limit=options.network.upload_limit),
    )
    options.gate.on_refused = lambda peer, why: context.note("refused", peer=peer, why=why)
    return context


def _go_on(protocol: Peer, saved: Saved, seed: str | None) -> None:
    """The protocol goes on where a checkpoint was written."""
    # An author signs a version under a term once. Terms that came after the checkpoint are not in it.
    gap = random.Random(seed).randint(1, TERM_GAP) if seed else secrets.randbelow(TERM_GAP) + 1
    for fragment, term in enumerate(saved.terms):
        protocol.leases.see_term(fragment, term)
        protocol.fragments[fragment].floor = term + gap if term else 0
    protocol.accounts.restore_shares(saved.shares)
    for known, record in zip(protocol.fragments, saved.records, strict=False):
        known.certified(record)
        if record is not None:
            known.authors[record.head.term] = record.head.author
    protocol.accounts.dealer.know(protocol.versions[CONTROL_FRAGMENT], (saved.units[0], union(saved.units[1])))
