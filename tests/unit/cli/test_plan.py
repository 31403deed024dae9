"""Predictions for a link: numbers by hand, the figures of the paper, and inverses that agree."""

from __future__ import annotations

import json
import math
from dataclasses import replace

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
    needed_bits_per_s,
    needed_sync_every,
    parse_bandwidth,
    predict,
)
from diloco.config import OuterConfig, compose
from diloco.errors import ConfigError
from diloco.train.machine import Machine, parameters_of, step_seconds
from tests.support.command_line import Typed

FOUR = ExchangeSize(bytes_up=1000, bytes_down=1000, peers=4, sync_every=9, fragments=4)
SLOW = NetworkLink(bits_per_s=12_000)  # 1500 bytes per second

exchanges = st.builds(
    ExchangeSize,
    bytes_up=st.integers(1, 10**10),
    bytes_down=st.integers(1, 10**10),
    peers=st.integers(1, 64),
    sync_every=st.just(100),
    fragments=st.integers(1, 24),
    overlap=st.integers(0, 3),
    staggered=st.booleans(),
)
links = st.builds(NetworkLink, st.floats(1e3, 1e12), st.floats(0, 0.2))
steps_s = st.floats(1e-3, 10)
targets = st.floats(0.05, 0.999)


def test_fragments_spread_the_load_over_peers() -> None:
    # Each sends 3/4 of its model up and three times 1/4 of it down: 1500 bytes, a second.
    found = predict(FOUR, SLOW, step_s=1.0)
    assert (found.bytes_sent, found.peak_bytes) == (1500, 1500)
    assert (found.compute_s, found.exchange_s, found.wait_s) == (9.0, 1.0, 1.0)
    assert found.utilization == pytest.approx(0.9)
    # Three whole models in and three updates out: 6000 bytes, while the average stays.
    found = predict(replace(FOUR, fragments=1), SLOW, step_s=1.0)
    assert (found.bytes_sent, found.peak_bytes, found.wait_s) == (1500, 6000, 4.0)
    # Six leave two with the busiest of four: 3 x 2/6 x 2000.
    assert predict(replace(FOUR, fragments=6), SLOW, 1.0).peak_bytes == 2000
    # One peer exchanges nothing.
    found = predict(replace(FOUR, peers=1), NetworkLink(1.0, 10.0), 1.0)
    assert (found.utilization, found.bytes_sent, found.exchange_s) == (1.0, 0, 0.0)
    assert needed_bits_per_s(replace(FOUR, peers=1), 10.0, 1.0, 0.95) == 0.0


def test_overlap_hides_its_inner_steps_and_no_more() -> None:
    assert predict(replace(FOUR, fragments=1, overlap=3), SLOW, 1.0).wait_s == 1.0
    assert predict(replace(FOUR, fragments=1, overlap=4), SLOW, 1.0).utilization == 1.0
    # Staggered fragments wait one after another: four times 3 x 1/4 x 2000 bytes, half hidden.
    found = predict(replace(FOUR, staggered=True, overlap=1), SLOW, step_s=0.5)
    assert (found.exchange_s, found.wait_s) == (1.0, 2.0)


def test_the_latency_is_paid_for_every_trip_of_an_exchange() -> None:
    exchange_s = predict(FOUR, NetworkLink(12_000, 0.05), 1.0).exchange_s
    assert exchange_s == pytest.approx(1.0 + TRIPS * 0.05)
    assert math.isinf(needed_bits_per_s(FOUR, 1.0, 1.0, 0.95)), "bandwidth is no remedy for it"


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
    assert said.endswith(f"{expected / 1e6:.3g} MB")


def test_many_peers_need_what_the_paper_computes() -> None:
    """150M parameters, H = 500, a second per step, 95 % (arXiv 2501.18512, as INTELLECT-1)."""
    for bits, needed in ((8, 91e6), (16, 182e6), (4, 46e6)):
        nbytes = 150_000_000 * bits // 8
        exchange = ExchangeSize(nbytes, nbytes, peers=10_000, sync_every=500, fragments=10_000)
        assert needed_bits_per_s(exchange, 0.0, 1.0, 0.95) == pytest.approx(needed, rel=0.01)


@given(exchanges, links, steps_s, targets)
@example(ExchangeSize(1, 111951, 2, 100), NetworkLink(1000.0), 0.001, 0.9)  # 8,060,544 steps
def test_predictions_and_their_inverses_agree(
    exchange: ExchangeSize, link: NetworkLink, step_s: float, target: float
) -> None:
    now = predict(exchange, link, step_s).utilization
    faster = replace(link, bits_per_s=2 * link.bits_per_s)
    assert 0 < now <= predict(exchange, faster, step_s).utilization <= 1
    bandwidth = needed_bits_per_s(exchange, link.latency_s, step_s, target)
    if 0 < bandwidth < math.inf:
        there = predict(exchange, NetworkLink(bandwidth, link.latency_s), step_s)
        assert there.utilization == pytest.approx(target, rel=1e-6)
    needed = needed_sync_every(exchange, link, step_s, target)
    assert predict(replace(exchange, sync_every=needed), link, step_s).utilization >= target - 1e-9
    fewer = needed - exchange.per_cycle
    if fewer > exchange.overlap * exchange.per_cycle:
        assert predict(replace(exchange, sync_every=fewer), link, step_s).utilization < target


def test_bandwidths_are_read_or_refused_in_one_line() -> None:
    bits_per_s = {"100Mbit": 1e8, "1.5Gbit/s": 1.5e9, "20 Mbps": 2e7, "12MB": 9.6e7, "56kbit": 56e3}
    for text, expected in {**bits_per_s, "9600 bit": 9600.0, ".5Tbit": 5e11}.items():
        assert parse_bandwidth(text) == pytest.approx(expected)
    said = r"^--bandwidth=.* is no bandwidth; write it like 100Mbit, 1\.5Gbit or 12MB"
    for text in ("", "100", "-1Mbit", "0Mbit", "1e3Mbit", "10Mbit/h", "Mbit"):
        with pytest.raises(ConfigError, match=said):
            parse_bandwidth(text)


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
    # 8 x 111102 / 1e5 = 8.888 s beside 4 s of compute, so 19 x 8.888 = 169 steps.
    assert "4 s / (4 s + 8.888 s) = 31.0%" in shown and "169 between exchanges" in shown
    report = json.loads(typed(*plan, "--bandwidth", "1Gbit", "--target", "0.5", "--json"))
    assert report["parameters"] == 37024 and report["needed_sync_every"] == 1
    assert report["predicted"]["bytes_sent"] == 37034
    # Data parallel moves the gradients of every step: 2 (1 - 1/n) N x 4 bytes.
    shown = typed(*plan, "outer=data_parallel", "outer.sync_every=4")
    assert "(1 - 1/2) x (148 kB + 148 kB) = 148 kB" in shown
