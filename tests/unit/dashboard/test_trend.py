"""Whether a loss still falls: least squares, its standard error, and what is not known."""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from diloco.dashboard.trend import LEAST_POINTS, Slope, slope_of, trend
from diloco.messages.snapshot import LossPoint
from tests.support.fake_swarm import snapshot

DAY = 86_400.0


def test_the_slope_and_its_error_are_those_of_least_squares() -> None:
    """Residuals of alternating sign are not alike, so the error is the textbook's."""
    at = np.arange(64.0) * 600
    losses = 5 - at / DAY + np.where(np.arange(64) % 2, 0.25, -0.25)
    slope = slope_of(list(at), list(losses))
    last = at >= at[-1] * 3 / 4
    (expected, _), covariance = np.polyfit(at[last], losses[last], 1, cov=True)
    assert slope is not None and slope.per_s == pytest.approx(expected)
    assert slope.error_per_s == pytest.approx(covariance[0, 0] ** 0.5)
    assert slope.span_s == at[-1]


def test_only_the_last_quarter_of_the_time_counts() -> None:
    at = [float(second) for second in range(101)]
    losses = [100.0 - second if second < 75 else 25.0 for second in at]
    slope = slope_of([*map(float, at)], losses)
    assert slope is not None and slope.per_s == pytest.approx(0.0, abs=1e-9)
    assert str(slope).startswith("is flat")


def test_errors_that_last_make_the_error_larger() -> None:
    """A loss that is read ten times is one measurement: its error must not shrink."""
    rng, count = random.Random(0), 400
    noise = [rng.gauss(0, 0.1) for _ in range(count)]
    once = slope_of([10.0 * i for i in range(count)], noise)
    often = slope_of(
        [float(i) for i in range(10 * count)], [noise[i // 10] for i in range(10 * count)]
    )
    assert once is not None and often is not None
    assert 0.7 * once.error_per_s < often.error_per_s < 1.6 * once.error_per_s


def test_too_few_points_are_not_known() -> None:
    line = [float(index) for index in range(4 * LEAST_POINTS)]
    assert slope_of(line, line) is not None
    assert slope_of([0.0, *line[-LEAST_POINTS + 1 :]], line[:LEAST_POINTS]) is None
    assert slope_of([], []) is None and slope_of([3.0] * 99, line[:1] * 99) is None
    seen = replace(snapshot(2), loss=[], held_out=[])
    assert trend(seen) == "whether it falls is not known yet"


@pytest.mark.parametrize(
    ("slope", "text"),
    [
        (Slope(-0.012 / DAY, 0.003 / DAY, 3 * DAY), "falls .012 ± .003 a day"),
        (Slope(0.4 / 3600, 0.02 / 3600, 7200.0), "rises .40 ± .02 an hour"),
        (Slope(-12 / 60, 3.4 / 60, 90.0), "falls 12 ± 3 a minute"),
        (Slope(-0.004 / DAY, 0.003 / DAY, 3 * DAY), "is flat (-.004 ± .003 a day)"),
        (Slope(0.0, 0.0, DAY), "is flat (.000 ± .000 a day)"),
    ],
)
def test_a_slope_is_words(slope: Slope, text: str) -> None:
    assert str(slope) == text


def test_the_held_out_loss_is_meant_where_it_is_known() -> None:
    seen = snapshot(2)
    assert trend(seen).startswith("held-out loss falls ")
    few = replace(seen, held_out=seen.held_out[-3:])
    assert trend(few).startswith("training loss falls ")
    assert isinstance(few.loss[0], LossPoint)
