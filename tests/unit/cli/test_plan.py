"""Predictions for a link: numbers by hand, the figures of the paper, and inverses that agree."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from diloco import model as models
from diloco.cli.plan import (
    TRIPS,
    ExchangeSize,
    NetworkLink,
    arithmetic,
    compare_fragments,
    most_fragments,
    needed_link,
    needed_sync_every,
    parse_link,
    predict,
)
from diloco.config import OuterConfig, compose
from diloco.errors import ConfigError
from diloco.train.machine import Machine, parameters_of, step_seconds
from tests.support.command_line import Typed

FOUR = ExchangeSize(6_400_000, 6_400_000, peers=4, sync_every=100, fragments=4)
SLOW = NetworkLink(1.6e6, 1.6e6)  # it carries one of them in 4 seconds

exchanges = st.builds(
    ExchangeSize,
    bytes_up=st.integers(1, 10**10),
    bytes_down=st.integers(1, 10**10),
    peers=st.integers(1, 64),
    sync_every=st.just(100),
    fragments=st.integers(1, 24),
    overlap=st.integers(0, 3),
    staggered=st.booleans(),
    versions=st.integers(1, 4),
    state_bytes=st.integers(1, 10**10),
)
links = st.builds(NetworkLink, st.floats(1e2, 1e11), st.floats(1e2, 1e11), st.floats(0, 0.2))
steps_s = st.floats(1e-3, 10)
targets = st.floats(0.05, 0.999)


def test_fragments_spread_the_load_over_peers() -> None:
    # Three quarters go up, and as many come; then the updates, of which a peer passes on 5/4 of
    # the mean. Two parts of 1.6 MB / 64 follow.
    found = predict(FOUR, SLOW, step_s=1.0)
    assert (found.bytes_sent, found.peak_bytes) == (9_600_000, 10_800_000)
    assert (found.compute_s, found.exchange_s, found.wait_s) == (100.0, 6.78125, 6.78125)
    assert found.utilization == pytest.approx(100 / 106.78125)
    # Three whole models come to the author, which sends two; the average stays.
    found = predict(replace(FOUR, fragments=1), SLOW, step_s=1.0)
    assert (found.bytes_sent, found.peak_bytes) == (9_600_000, 25_600_000)
    assert found.exchange_s == 12 + 8 + 0.125
    # Six leave two with the busiest of four: 3 x 2/6 come to it, then 3/4 x 5/4 go out.
    found = predict(replace(FOUR, fragments=6), SLOW, 1.0)
    assert found.exchange_s == pytest.approx(4 + 3.75 + 1 / 48)
    # To one other peer it is sent once, and nobody passes it on.
    assert predict(replace(FOUR, peers=2, fragments=1), SLOW, 1.0).exchange_s == 4 + 4 + 0.0625
    # One peer exchanges nothing.
    alone = replace(FOUR, peers=1)
    found = predict(alone, NetworkLink(1.0, 1.0, 10.0), 1.0)
    assert (found.utilization, found.bytes_sent, found.exchange_s) == (1.0, 0, 0.0)
    assert needed_link(alone, replace(SLOW, latency_s=9.0), 1.0, 0.9) == NetworkLink(0, 0, 9.0)


def test_the_directions_of_a_link_and_small_updates_count() -> None:
    one, home = replace(FOUR, fragments=1), NetworkLink(6.4e6, 1.6e6)
    assert predict(one, home, 1.0).exchange_s == 4 + 8 + 0.125  # now the uplinks are slower
    needed = needed_link(one, home, 1.0, 0.5)
    assert needed and needed.down_bytes_per_s == pytest.approx(4 * needed.up_bytes_per_s)
    # An update below 16 KiB is one part, which each of log2(4) peers has before it passes it on.
    tiny = replace(FOUR, bytes_up=4000, bytes_down=4000)
    assert predict(tiny, NetworkLink(1e3, 1e3), 1.0).exchange_s == 3 + 3.75 + 2


def test_overlap_hides_its_inner_steps_and_no_more() -> None:
    one = replace(FOUR, fragments=1)
    assert predict(replace(one, overlap=20), SLOW, 1.0).wait_s == 0.125
    assert predict(replace(one, overlap=21), SLOW, 1.0).utilization == 1.0
    # Staggered fragments wait one after another: four times 3 + 2 s and two parts, half hidden.
    found = predict(replace(FOUR, staggered=True, overlap=1), SLOW, step_s=0.5)
    assert (found.exchange_s, found.wait_s) == (5.03125, 4 * 4.53125)


def test_the_latency_is_paid_for_every_trip_of_an_exchange() -> None:
    link = replace(SLOW, latency_s=0.05)
    assert predict(FOUR, link, 1.0).exchange_s == pytest.approx(6.78125 + (TRIPS + 1) * 0.05)
    far = replace(SLOW, latency_s=1.0)
    assert needed_link(FOUR, far, 1.0, 0.95) is None, "bandwidth is no remedy for it"
    rows = dict(arithmetic(FOUR, far, 1.0, 0.95))
    assert rows["peak bandwidth for 0.95"] == "more than any link"


def test_the_number_of_fragments_with_which_peers_wait_least_is_named() -> None:
    one = replace(FOUR, fragments=1)
    best, waits = compare_fragments(one, SLOW, 1.0, 10**6)
    assert best == 4 and list(waits) == [1, 2, 4, 8, 16, 24, 32]
    assert (waits[1], waits[4]) == (20.125, 6.78125)
    # What is set stays, where another number saves less than 5 %; peers are a candidate, too.
    assert compare_fragments(replace(FOUR, fragments=8), SLOW, 1.0, 99)[0] == 8
    assert compare_fragments(replace(one, peers=6), SLOW, 1.0, 99)[0] == 6
    assert compare_fragments(one, SLOW, 1.0, 2)[0] == 2
    assert compare_fragments(replace(one, overlap=21), SLOW, 1.0, 99)[0] == 1
    wide = ["model=20m", "data.tokenizer=x/"]
    for settings, most in {
        "outer=data_parallel": 0,
        "outer.pattern=strided": 6,
        "outer.staggered=true": 100,
        "": 13_012_224,
    }.items():
        assert most_fragments(compose([*wide, *settings.split()]), 13_012_224) == most


@pytest.mark.parametrize(
    ("peers", "quorum", "codec_down", "back"),
    [(2, 1, "int8", 2), (8, 1, "int8", 4), (8, 4, "int8", 2), (6, 1, "e3m0", 3), (8, 1, "fp16", 2)],
)
def test_without_a_barrier_updates_or_a_smaller_state_come(
    peers: int, quorum: int, codec_down: str, back: int
) -> None:
    settings = {"method": "diloco", "sync_every": 8, "quorum": quorum, "codec_down": codec_down}
    exchange = ExchangeSize.of(OuterConfig.parse(settings), 10**6, peers)
    assert exchange.bytes_back == pytest.approx(back * 10**6, rel=0.001)
    expected = (1 - 1 / peers) * (exchange.bytes_up + exchange.bytes_back)
    assert predict(exchange, SLOW, 1.0).bytes_sent == round(expected)
    said = dict(arithmetic(exchange, SLOW, 1.0, 0.9))["sent per peer and outer step"]
    assert said.endswith(f"{expected / 1e6:.1f} MB")


def test_with_a_quorum_a_peer_waits_only_for_a_link_that_cannot_carry_its_cycle() -> None:
    one = replace(FOUR, fragments=1, versions=4, state_bytes=12_800_000)
    assert predict(one, SLOW, 1.0).exchange_s == 12 + 16 + 0.25  # the state is two updates
    assert predict(one, SLOW, 1.0).wait_s == 0.0
    assert predict(one, SLOW, 0.25).wait_s == 3.25  # over 100 steps of .25 s
    assert needed_sync_every(one, SLOW, 0.25, 0.5) == 57  # of 56.5
    turns = replace(FOUR, staggered=True, versions=2, state_bytes=12_800_000)
    exchange_s = predict(turns, SLOW, 1.0).exchange_s
    assert predict(turns, SLOW, 0.25).wait_s == pytest.approx(max(0, 4 * exchange_s - 25))


def test_many_peers_need_what_the_paper_computes() -> None:
    """150M parameters, H = 500, a second per step, 95 % (arXiv 2501.18512, as INTELLECT-1), and
    half of that more, as the busiest peer passes on twice the mean."""
    for bits, needed in ((8, 91e6), (16, 182e6), (4, 46e6)):
        nbytes = 150_000_000 * bits // 8
        exchange = ExchangeSize(nbytes, nbytes, peers=10_000, sync_every=500, fragments=10_000)
        link = needed_link(exchange, SLOW, 1.0, 0.95)
        assert link and astuple(link) == pytest.approx(
            (1.5 * needed / 8, 1.5 * needed / 8, 0), rel=0.01
        )


@given(exchanges, links, steps_s, targets)
@example(ExchangeSize(1, 111951, 2, 100), NetworkLink(125.0, 125.0), 0.001, 0.9)
def test_predictions_and_their_inverses_agree(
    exchange: ExchangeSize, link: NetworkLink, step_s: float, target: float
) -> None:
    now = predict(exchange, link, step_s).utilization
    faster = replace(link, up_bytes_per_s=2 * link.up_bytes_per_s)
    assert 0 < now <= predict(exchange, faster, step_s).utilization <= 1
    enough = needed_link(exchange, link, step_s, target)
    if enough is not None and exchange.peers > 1:
        there = predict(exchange, enough, step_s)
        assert there.utilization == pytest.approx(target, rel=1e-6)
    needed = needed_sync_every(exchange, link, step_s, target)
    assert predict(replace(exchange, sync_every=needed), link, step_s).utilization >= target - 1e-9
    fewer = needed - exchange.per_cycle
    if fewer > exchange.overlap * exchange.per_cycle:
        assert predict(replace(exchange, sync_every=fewer), link, step_s).utilization < target


def test_a_link_is_read_or_refused_in_one_line() -> None:
    for text, both in {
        "100Mbit": (1.25e7, 1.25e7),
        "100Mbit/20Mbit": (1.25e7, 2.5e6),
        "1.5Gbit/s / .2Gbit/s": (1.875e8, 2.5e7),
        "12MB/s/20 Mbps": (1.2e7, 2.5e6),
    }.items():
        assert astuple(parse_link(text, 0.1)) == (*both, 0.1)
    unclear = "could be bits or bytes per second; write 100B (which is 800 bit/s) or 100bit"
    for text in ("100", "1Mbit/100", "100/1Mbit"):
        with pytest.raises(ConfigError) as caught:
            parse_link(text)
        assert str(caught.value) == f"--bandwidth={text!r} {unclear}"
    for text in ("", "-1Mbit", "0Mbit", "10Mbit/h", "Mbit", "1Mbit/", "1Mbit/2Mbit/3Mbit"):
        with pytest.raises(ConfigError, match=r"^--bandwidth='.*' is no rate above 0; write it li"):
            parse_link(text)


def test_parameters_are_counted_without_weights_and_a_step_is_timed() -> None:
    assert 0 < step_seconds(compose(["experiment=smoke"])) < math.inf
    for tied in ("true", "false"):
        settings = compose(["experiment=smoke", f"model.config.tie_word_embeddings={tied}"]).model
        assert parameters_of(settings) == models.num_parameters(models.build(settings, 0))
    with pytest.raises(ConfigError, match=r"^model\.config"):
        parameters_of(compose(["experiment=smoke", "model.config.hidden_act=nothing"]).model)


def test_a_step_of_a_model_that_does_not_fit_is_not_measured(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Machine(torch.device("cpu"), "CPU", 2, 1e8, 1e8, "fp32")
    monkeypatch.setattr("diloco.train.machine.machine_at", lambda *_: small)
    text = typed.refused("plan", "experiment=smoke")
    assert "this machine is too small for the run's model of 37.0k parameters" in text
    assert text.endswith("; or give --step-s, and no step is measured here\n")


def test_the_command_prints_the_arithmetic(typed: Typed) -> None:
    plan = ("plan", "experiment=smoke", "--step-s", "1")
    shown = typed(*plan, "local.peers=4", "--bandwidth", "100kbit", "--latency-ms", "0")
    assert "smoke, 37,024 parameters\n" in shown
    assert "int8 37,034 B (1 per parameter)" in shown  # one exponent for each of 10 blocks
    # 55551 / 12500 s, two fragments as updates and two parts of 16 KiB, so 19 x 10.03 = 191 steps.
    assert "4 s / (4 s + 10.03 s) = 28.5%" in shown and "191 between exchanges" in shown
    assert "100 kbit/s each way, 0 ms one way" in shown
    assert (
        "\nfragments                     waiting 10.03 s with 2 fragments, 5.37 s with 16" in shown
    )
    report = json.loads(typed(*plan, "--bandwidth", "1Gbit/1Mbit", "--target", "0.5", "--json"))
    assert report["parameters"] == 37024 and report["needed_sync_every"] == 1
    assert report["predicted"]["bytes_sent"] == 37034
    assert report["link"] == {
        "down_bytes_per_s": 1.25e8,
        "up_bytes_per_s": 1.25e5,
        "latency_s": 0.05,
    }
    assert report["fragments"]["best"] == 8 and report["fragments"]["wait_s"]["1"] > 1.27
    wide = ("model=20m", "data.tokenizer=x/", "local.peers=8", "--bandwidth", "50Mbit")
    shown = typed("plan", *wide, "--step-s", "1")
    both = "waiting 19.49 s with 1 fragment, 5.218 s with 8 fragments: outer.fragments=8\n"
    assert both in shown and "one exchange                  5.218 s\n" in shown, "8 is the default"
    for command in ("local", "simulate"):
        assert typed(command, "local.peers=4", "--cfg", "job", "-p", "outer.fragments") == "4\n"
    # Data parallel moves the gradients of every step: 2 (1 - 1/n) N x 4 bytes.
    shown = typed(*plan, "outer=data_parallel", "outer.sync_every=4")
    assert "(1 - 1/2) x (148 kB + 148 kB) = 148 kB" in shown
