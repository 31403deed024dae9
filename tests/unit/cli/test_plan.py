"""Predictions for a link: hand-computed numbers, the figures of the paper, and inverses that agree."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diloco import model as models
from diloco.config import OuterConfig, compose
from diloco.errors import ConfigError
from diloco.fit.speed import step_seconds
from diloco.outer.codecs import codec
from diloco.sim.run import simulate
from diloco.train.memory import parameters_of
from diloco.train.planning import (
    TRIPS,
    Exchange,
    Link,
    arithmetic,
    needed_bits_per_s,
    needed_sync_every,
    parse_bandwidth,
    predict,
    recommend,
)
from tests.support.exit_codes import exit_code

FOUR = Exchange(bytes_up=1000, bytes_down=1000, peers=4, sync_every=9, fragments=4)
SLOW = Link(bits_per_s=12_000)  # 1500 bytes per second

exchanges = st.builds(
    Exchange,
    bytes_up=st.integers(1, 10**10),
    bytes_down=st.integers(1, 10**10),
    peers=st.integers(1, 64),
    sync_every=st.just(100),
    fragments=st.integers(1, 24),
    overlap=st.integers(0, 3),
    staggered=st.booleans(),
)
links = st.builds(Link, st.floats(1e3, 1e12), st.floats(0, 0.2))
steps_s = st.floats(1e-3, 10)
targets = st.floats(0.05, 0.999)


# --- By hand ----------------------------------------------------------------------------------------------------------


def test_each_of_four_peers_holds_a_fragment() -> None:
    # Each sends 3/4 of its model up and three times 1/4 of it down: 750 + 750 bytes, which take a second.
    found = predict(FOUR, SLOW, step_s=1.0)
    assert (found.bytes_sent, found.peak_bytes) == (1500, 1500)
    assert (found.compute_s, found.exchange_s, found.wait_s) == (9.0, 1.0, 1.0)
    assert found.utilization == pytest.approx(0.9)


def test_a_single_fragment_goes_through_one_link() -> None:
    # Three whole models in and three whole updates out: 6000 bytes, while an average peer sends what it did before.
    found = predict(replace(FOUR, fragments=1), SLOW, step_s=1.0)
    assert (found.bytes_sent, found.peak_bytes) == (1500, 6000)
    assert found.wait_s == 4.0


def test_six_fragments_leave_two_with_the_busiest_of_four() -> None:
    assert predict(replace(FOUR, fragments=6), SLOW, 1.0).peak_bytes == 2000  # 3 x 2/6 x 2000


def test_overlap_hides_its_inner_steps_and_no_more() -> None:
    assert predict(replace(FOUR, fragments=1, overlap=3), SLOW, 1.0).wait_s == 1.0
    assert predict(replace(FOUR, fragments=1, overlap=4), SLOW, 1.0).utilization == 1.0


def test_staggered_fragments_wait_one_after_another() -> None:
    # Each is 3 x 1/4 x 2000 bytes through its syncer, a second, of which half is hidden; four of them in a cycle.
    found = predict(replace(FOUR, staggered=True, overlap=1), SLOW, step_s=0.5)
    assert (found.exchange_s, found.wait_s) == (1.0, 2.0)


def test_the_latency_is_paid_for_every_trip_of_an_exchange() -> None:
    assert predict(FOUR, Link(12_000, 0.05), 1.0).exchange_s == pytest.approx(1.0 + TRIPS * 0.05)


def test_one_peer_exchanges_nothing() -> None:
    found = predict(replace(FOUR, peers=1), Link(1.0, 10.0), 1.0)
    assert (found.utilization, found.bytes_sent, found.exchange_s) == (1.0, 0, 0.0)
    assert needed_bits_per_s(replace(FOUR, peers=1), 10.0, 1.0, 0.95) == 0.0


@pytest.mark.parametrize(
    ("peers", "quorum", "codec_down", "back"),
    [(2, 1, "int8", 2), (3, 1, "int8", 3), (8, 1, "int8", 4), (8, 4, "int8", 2), (6, 1, "e3m0", 3), (8, 1, "fp16", 2)],
)
def test_without_a_barrier_the_updates_of_a_round_come_back_or_the_state_if_that_is_smaller(
    peers: int, quorum: int, codec_down: str, back: int
) -> None:
    outer = OuterConfig.parse({"method": "diloco", "sync_every": 8, "quorum": quorum, "codec_down": codec_down})
    exchange = Exchange.of(outer, 10**6, peers)
    assert exchange.bytes_back == pytest.approx(back * 10**6, rel=0.001)
    expected = (1 - 1 / peers) * (exchange.bytes_up + exchange.bytes_back)
    assert predict(exchange, SLOW, 1.0).bytes_sent == round(expected)
    assert dict(arithmetic(exchange, SLOW, 1.0, 0.9))["sent per peer and outer step"].endswith(
        f"{expected / 1e6:.3g} MB"
    )


@pytest.mark.parametrize(("bits", "needed"), [(8, 91e6), (16, 182e6), (4, 46e6)])
def test_many_peers_need_what_the_paper_computes(bits: int, needed: float) -> None:
    """150M parameters, H = 500, a second per step, 95 % (arXiv 2501.18512 in the form of INTELLECT-1)."""
    nbytes = 150_000_000 * bits // 8
    exchange = Exchange(nbytes, nbytes, peers=10_000, sync_every=500, fragments=10_000)
    assert needed_bits_per_s(exchange, 0.0, 1.0, 0.95) == pytest.approx(needed, rel=0.01)


def test_a_latency_longer_than_what_may_be_waited_cannot_be_bought_off() -> None:
    assert math.isinf(needed_bits_per_s(FOUR, 1.0, 1.0, 0.95))


# --- Properties -------------------------------------------------------------------------------------------------------


@given(exchanges, links, steps_s)
def test_utilization_is_a_share_and_grows_with_the_link(exchange: Exchange, link: Link, step_s: float) -> None:
    now = predict(exchange, link, step_s).utilization
    assert 0 < now <= predict(exchange, replace(link, bits_per_s=2 * link.bits_per_s), step_s).utilization <= 1


@given(exchanges, st.floats(0, 0.2), steps_s, targets)
def test_the_needed_bandwidth_gives_the_target(
    exchange: Exchange, latency_s: float, step_s: float, target: float
) -> None:
    needed = needed_bits_per_s(exchange, latency_s, step_s, target)
    if 0 < needed < math.inf:
        assert predict(exchange, Link(needed, latency_s), step_s).utilization == pytest.approx(target, rel=1e-6)


@given(exchanges, links, steps_s, targets)
@example(Exchange(1, 111951, 2, 100, 1, 0, False), Link(1000.0, 0.0), 0.001, 0.9)  # 8,060,544 steps, and none more
def test_the_needed_interval_is_the_smallest(exchange: Exchange, link: Link, step_s: float, target: float) -> None:
    needed = needed_sync_every(exchange, link, step_s, target)
    assert predict(replace(exchange, sync_every=needed), link, step_s).utilization >= target - 1e-9
    fewer = needed - exchange.per_cycle
    if fewer > exchange.overlap * exchange.per_cycle:
        assert predict(replace(exchange, sync_every=fewer), link, step_s).utilization < target


@given(exchanges, links, steps_s, targets)
def test_what_is_recommended_reaches_the_target_and_is_allowed(
    exchange: Exchange, link: Link, step_s: float, target: float
) -> None:
    found = recommend(exchange, ("fp32", "fp32"), lambda name: codec(name).nbytes(10**6), link, step_s, target)
    assert found.prediction.utilization >= target - 1e-9
    interval = found.exchange.sync_every // (found.exchange.fragments if found.exchange.staggered else 1)
    assert found.exchange.overlap < interval
    assert found.exchange.sync_every >= exchange.sync_every


# --- Recommendations --------------------------------------------------------------------------------------------------


def advise(bits_per_s: float, target: float = 0.95) -> tuple[int, int, int, str]:
    exchange = Exchange(10**6, 10**6, peers=4, sync_every=100, fragments=1)
    found = recommend(
        exchange, ("int8", "int8"), lambda name: {"int8": 10**6, "e3m0": 5 * 10**5}[name], Link(bits_per_s), 0.1, target
    )
    return found.exchange.fragments, found.exchange.sync_every, found.exchange.overlap, found.codec_up


def test_spreading_the_fragments_comes_first() -> None:
    # 1.5 MB in 12 Mbit: a second; 19 seconds of compute for it are 190 steps.
    assert advise(12e6) == (4, 190, 0, "int8")
    assert advise(120e6) == (4, 100, 0, "int8")


def test_overlap_and_four_bits_come_when_the_interval_would_be_too_long() -> None:
    # 12 Mbit take 3 s, which would be 570 steps; with .5 s hidden 475.
    assert advise(4e6) == (4, 475, 5, "int8")
    # 3.75 s would be 617 steps; at 4 bits 9 Mbit take 2.8125 s, of which .5 are hidden: 2.3125 x 19 / .1 = 440.
    assert advise(3.2e6) == (4, 440, 5, "e3m0")


def test_the_arithmetic_shows_its_numbers() -> None:
    lines = dict(arithmetic(FOUR, SLOW, 1.0, 0.9))
    assert lines == {
        "sent per peer and outer step": "(1 - 1/4) x (1 kB + 1 kB) = 1.5 kB",
        "through the busiest syncer": "3 x 1/4 x (1 kB + 1 kB) = 1.5 kB per exchange",
        "one exchange": f"8 x 1.5 kB / 12 kbit/s + {TRIPS} x 0 s = 1 s",
        "compute": "9 x 1 s = 9 s per outer step",
        "waiting": "max(0, 1 s - 0 x 1 s) = 1 s per outer step",
        "utilization": "9 s / (9 s + 1 s) = 90.0%",
        "peak bandwidth for 0.9": f"8 x 1.5 kB / (0 x 1 s + 0.1111 x 9 s - {TRIPS} x 0 s) = 12 kbit/s",
    }


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("100Mbit", 1e8),
        ("1.5Gbit/s", 1.5e9),
        ("20 Mbps", 2e7),
        ("12MB", 9.6e7),
        ("12MB/s", 9.6e7),
        ("56kbit", 56e3),
        ("9600 bit", 9600.0),
        (".5Tbit", 5e11),
    ],
)
def test_bandwidths_are_read(text: str, bits_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bits_per_s)


@pytest.mark.parametrize("text", ["", "100", "fast", "-1Mbit", "0Mbit", "1e3Mbit", "10Mbit/h", "1 000Mbit", "Mbit"])
def test_other_bandwidths_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--bandwidth=.* is no bandwidth; write it like 100Mbit, 1\.5Gbit or 12MB"):
        parse_bandwidth(text)


# --- Models and the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", ["true", "false"])
def test_parameters_are_counted_without_weights(tied: str) -> None:
    settings = compose(["experiment=smoke", f"model.config.tie_word_embeddings={tied}"]).model
    assert parameters_of(settings) == models.num_parameters(models.build(settings, 0))


def test_a_model_that_cannot_be_built_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^model\.config"):
        parameters_of(compose(["experiment=smoke", "model.config.hidden_act=nothing"]).model)


def test_an_inner_step_is_timed() -> None:
    assert 0 < step_seconds(compose(["experiment=smoke"])) < 60


def test_the_command_prints_the_arithmetic_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "experiment=smoke", "local.peers=4", "--step-s", "1", "--bandwidth", "100kbit")
    assert exit_code(*arguments, "--latency-ms", "0") == 0
    shown = capsys.readouterr().out
    assert "smoke, 37,024 parameters\n" in shown
    assert "int8 37,034 B (1 per parameter)" in shown  # one exponent for each of 10 blocks
    assert "3 x 1/2 x (37 kB + 37 kB) = 111 kB per exchange" in shown
    # 8 x 111102 / 1e5 = 8.888 s beside 4 s of compute; spread over four fragments 4.444 s, so 19 x 4.444 = 85 steps.
    assert "4 s / (4 s + 8.888 s) = 31.0%" in shown
    assert "outer.sync_every=85 outer.fragments=4 outer.overlap=0 outer.codec_up=int8 outer.codec_down=int8" in shown


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        exit_code("plan", "experiment=smoke", "--step-s", "1", "--bandwidth", "1Gbit", "--target", "0.5", "--json") == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 37024 and report["recommended"] is None
    assert report["predicted"]["bytes_sent"] == 37034


def test_data_parallel_moves_the_gradients_of_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "experiment=smoke", "outer=data_parallel", "outer.sync_every=4", "--step-s", "1") == 0
    # 2 (1 - 1/n) N x 4 bytes
    assert "(1 - 1/2) x (148 kB + 148 kB) = 148 kB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [("--bandwidth", "ten"), ("--target", "1"), ("--step-s", "0"), ("--latency-ms", "-1"), ("outer.lrr=1",)],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "experiment=smoke", *arguments) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("diloco: error: ") and complaint.count("\n") == 1


def test_the_summary_has_what_was_predicted_beside_what_was_achieved(tmp_path: Path) -> None:
    small = ["experiment=smoke", "local.peers=4", "budget.outer_steps=4", "outer.sync_every=4", "outer.fragments=4"]
    link = ["sim.bandwidth=2000000", "sim.latency_s=0", "model.config.hidden_size=128"]  # not mostly certificates
    summary = simulate(compose([*small, *link, f"run.dir={tmp_path}"]), lambda message: None).summary.to_json()
    predicted = summary["predicted"]
    assert predicted["step_s"] == pytest.approx(1.0) and predicted["bits_per_s"] == 8 * 2000000
    sent, utilization = (median(peer[key] for peer in summary["peers"]) for key in ("bytes_sent", "utilization"))
    assert predicted["bytes_sent"] == pytest.approx(sent, rel=0.1)
    assert predicted["utilization"] == pytest.approx(utilization, abs=0.05)
    assert json.loads((tmp_path / "summary.json").read_text())["predicted"] == predicted
