"""The harness of `scripts/attacks`: what is contained is told from what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.testing import attacks
from diloco.testing.attacks.arena import ATTACKS, Attack
from diloco.testing.attacks.attacker import Attacker
from diloco.testing.attacks.catalogue import OPEN
from diloco.testing.attacks.real import REAL
from diloco.testing.attacks.stage import Outcome, play
from diloco.testing.attacks.verdict import judge, rows

CALM = Outcome((), True, 80.0, 16, 1, 0.004, 0.008, 1.0, 1.0, 20, 5, 4000)


@pytest.fixture(scope="module")
def calm() -> Outcome:
    return play(ATTACKS["sign-flip"], alone=True)


def test_a_peer_that_sends_the_wrong_sign_is_left_out_and_named(calm: Outcome) -> None:
    attack = replace(ATTACKS["sign-flip"], proof=True)
    verdict = judge(attack, play(attack, calm=calm), calm)
    assert verdict.contained and "left_out" in verdict.named


async def falls_silent_after_spoiling_anchors(x: Attacker) -> None:
    """What no defence can contain: it reaches into the others' memory."""
    for life in x.arena.honest():
        assert life.node is not None
        life.node.replica.anchors[0].add_(100.0)


def test_what_an_uncontained_attack_does_is_told_in_words(calm: Outcome) -> None:
    attack = Attack("spoils", "", "nobody", "adds 100 to all anchors", falls_silent_after_spoiling_anchors, proof=True)
    verdict = judge(attack, play(attack, calm=calm), calm)
    assert not verdict.contained and verdict.harm[-1] == "nobody names it"
    assert any(line.startswith(("loss x ", "DivergedError in", "the others stop")) for line in verdict.harm)


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (replace(CALM, crashed=("b: ValidationError",)), "ValidationError in b"),
        (replace(CALM, done=False, version=5), "the others stop at version 5"),
        (replace(CALM, version=12), "the run ends at version 12 of 16"),
        (replace(CALM, digests=2), "2 different models"),
        (replace(CALM, loss=4.0), "loss x 1000"),
        (replace(CALM, worst=0.08), "loss x 10 in a chunk"),
        (replace(CALM, loss=float("nan")), "loss x nan"),
        (replace(CALM, clock=1e12), "clock x 10^12"),
        (replace(CALM, kept=0.25), "75% of the honest work lost"),
        (replace(CALM, seconds=200.0), "2.5 times as long"),
        (replace(CALM, streams=2600), "2600 streams of a peer, 20 without it"),
        (replace(CALM, measured={}), "copies: nan"),
        (replace(CALM, measured={"copies": 5.0}), "copies: 5"),
    ],
)
def test_each_harm_has_its_words(outcome: Outcome, says: str) -> None:
    attack = replace(ATTACKS["sign-flip"], limits={"copies": 4} if "copies" in says else {})
    assert judge(attack, outcome, CALM).harm == (says,)


def test_known_attacks_have_reasons_and_what_they_did_before() -> None:
    assert OPEN.keys() <= ATTACKS.keys() and all(OPEN.values())
    assert set(REAL) <= ATTACKS.keys() and len(REAL) == 10
    before = json.loads((Path(attacks.__file__).parent / "before.json").read_text())["shown"]
    assert before.keys() == ATTACKS.keys()


def test_the_table_has_a_row_for_each_attack() -> None:
    """With what it did before."""
    verdict = judge(ATTACKS["zeros"], CALM, CALM)
    [row] = rows([ATTACKS["zeros"]], {"zeros": "loss x 3"}, {"zeros": verdict}, {})
    assert row[0] == "zeros" and row[4:] == ("loss x 3", "as without it", "yes")
    harmed = judge(ATTACKS["slow-word"], replace(CALM, done=False, version=5), CALM)
    [row] = rows([ATTACKS["slow-word"]], {}, {"slow-word": harmed}, {"slow-word": "a reason"})
    assert row[4:] == ("-", "the others stop at version 5", "no: a reason")
