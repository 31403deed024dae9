"""Decoders survive mutated bytes, and what the fuzzer found once stays mended."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from diloco.errors import CheckpointError, PayloadError
from diloco.messages.codec import decode
from tests.support.places import script_module

fuzz = script_module("fuzz_decoders")


@pytest.mark.parametrize("name", list(fuzz.targets()))
def test_every_decoder_takes_valid_input_and_survives_what_is_made_of_it(name: str) -> None:
    target, dice = fuzz.targets()[name](), random.Random(name)
    for example in target.examples:
        target.decode(example)
    base = fuzz.peak_bytes()
    for _ in range(20):
        fuzz.check(target, fuzz.mutated(target.examples, dice), base)


def test_a_message_of_an_unknown_kind_writes_no_second_line_into_our_log() -> None:
    with pytest.raises(PayloadError, match="no kind is called re eipt") as caught:
        decode(bytes.fromhex("81a46b696e64a772650a65697074"))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_whose_checksum_fits_and_whose_fields_do_not_is_unusable() -> None:
    target = fuzz.targets()["checkpoint"]()
    for body in (
        b"{}",
        b'{"files": [], "step": 1, "state": {}}',
        b'{"files": {"../a": {}}, "step": 1, "state": {}}',
    ):
        with pytest.raises(CheckpointError, match="something is missing"):
            target.decode(b"b" + body)


def test_a_name_that_is_no_peer_id_cannot_be_reached_and_nothing_more() -> None:
    """Anybody may say it in a hello or write it to the DHT, and it is dialled."""
    from diloco.swarm.wire.gate import Gate
    from diloco.swarm.wire.libp2p import Libp2p

    libp2p = Libp2p(SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: "me")), Gate())  # type: ignore[arg-type]
    for name in ("!!!", "é", "Qm\0"):
        with pytest.raises(ConnectionError, match="is no peer id"):
            asyncio.run(libp2p.open(name, "x"))
