"""What a run costs: prices from a file, the prediction of `diloco plan`, and the seconds and bytes of finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.config import Config, compose, launch_files
from diloco.config.prices import Machine, read_machine
from diloco.errors import ConfigError
from diloco.train.forecast import Forecast, forecast
from diloco.train.planning import Exchange, Link, predict
from tests.support.errors import error_text
from tests.support.exit_codes import exit_code
from tests.support.run_directories import make

PRICES = """
h100: {usd_per_hour: 3.6, egress_usd_per_gb: 0.5, tokens_per_s: 64}
pc: {usd_per_hour: 0, flops_per_s: 1e9}
slow: {usd_per_hour: 1}
"""


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    (tmp_path / "prices.yaml").write_text(PRICES)
    return tmp_path / "prices.yaml"


def test_a_machine_has_prices_and_a_speed(prices: Path) -> None:
    name, h100 = read_machine(prices, "h100")
    assert name == "h100" and h100.step_s(10**9, 128) == 2.0
    assert h100.cost(1000, 4e9) == (1.0, 2.0) and h100.cost(1000, 4e9).total == 3.0
    assert read_machine(prices, "pc")[1].step_s(10**6, 100) == 0.6  # 6 x 10^6 x 100 operations
    assert read_machine(prices, "slow")[1].step_s(10**6, 100) is None
    prices.write_text("mine: {usd_per_hour: 1}\n")  # the only one needs no name
    assert read_machine(prices, None) == ("mine", Machine(usd_per_hour=1.0))
    example = launch_files() / "prices.yaml"
    assert example.read_text().startswith("# EXAMPLE FIGURES; put your own here.")
    assert read_machine(example, "h100-spot")[1].flops_per_s == 4e14


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (PRICES, "h10", "--machine=h10 is not in FILE (did you mean h100?); expected one of h100, pc, slow"),
        (PRICES, None, "--prices=FILE has 3 machines; choose --machine, one of h100, pc, slow"),
        ("a: {usd_per_hour: -1}", "a", "--prices=FILE: a: usd_per_hour=-1 is out of range; expected a number >= 0"),
        ("a: {usd_per_hour: .nan}", "a", "--prices=FILE: a: usd_per_hour=NaN"),
        ("a: {usd_per_hour: cheap}", "a", "--prices=FILE: a: usd_per_hour=cheap"),
        ("a: {usd_per_hr: 1}", "a", "--prices=FILE: a: "),
        ("a: {}", "a", "--prices=FILE: a: "),
        ("a: {usd_per_hour: 1, tokens_per_s: 1, flops_per_s: 1}", "a", "both say how fast it is; drop one"),
        ("a: 3", "a", "--prices=FILE: a=3 is no machine; write h100: {usd_per_hour: 2.5"),
        ("{a", "a", "--prices=FILE is not YAML: "),
        ("\x80", "a", "--prices=FILE is not YAML: "),
        ("", "a", "--prices=FILE holds no machines; write h100"),
        ("- a", "a", "--prices=FILE holds no machines; write h100"),
        (None, "a", "--prices=FILE cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_price_file_is_one_line(content: str | None, name: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    assert reason in error_text(ConfigError, read_machine, path, name).replace(str(path), "FILE")


FOUR = Exchange(bytes_up=1000, bytes_down=1000, peers=4, sync_every=10, fragments=4)
SLOW = Link(bits_per_s=12_000)  # an exchange takes a second


def small(*overrides: str) -> Config:
    return compose(["experiment=smoke", "outer.sync_every=10", *overrides])  # 2 sequences of 32 tokens


def test_a_run_takes_the_seconds_and_bytes_of_its_rounds() -> None:
    found = forecast(small("budget.outer_steps=6"), FOUR, SLOW, step_s=0.9)
    assert found == (4, 6 * 10 * 4 * 64, 6 * 10.0, 6 * 1500)
    cost = found.cost(Machine(usd_per_hour=3600.0, egress_usd_per_gb=1e6))
    assert cost == (4 * 60.0, pytest.approx(4 * 9000 / 1e9 * 1e6))


def test_the_first_limit_of_the_budget_ends_a_run() -> None:
    def found(outer_steps: str) -> Forecast:  # of 30 inner steps of four peers
        return forecast(small("budget.tokens=7680", f"budget.outer_steps={outer_steps}"), FOUR, SLOW, 0.9)

    assert found("null").tokens == 7680
    assert [found(outer_steps).wall_s for outer_steps in "61"] == [pytest.approx(30.0), pytest.approx(10.0)]


def test_a_round_of_other_modes_makes_several_versions() -> None:
    """Without a barrier, and when data parallel peers exchange in every inner step."""
    config = small("budget.outer_steps=8", "outer.quorum=1")
    exchange = Exchange.of(config.outer, 10**6, 4)
    one = predict(exchange, SLOW, 0.9)
    assert forecast(config, exchange, SLOW, 0.9).wall_s == pytest.approx(2 * (one.compute_s + one.wait_s))
    config = small("outer=data_parallel", "outer.sync_every=4", "budget.outer_steps=5")
    exchange = Exchange.of(config.outer, 1000, 4)
    found = forecast(config, exchange, SLOW, 0.9)
    assert found.bytes_sent == pytest.approx(20 * predict(exchange, SLOW, 0.9).bytes_sent)
    assert found.tokens == 20 * 4 * 64


def test_plan_says_what_the_run_and_the_better_settings_cost(prices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "experiment=smoke", "local.peers=4", "--bandwidth", "100kbit", "--latency-ms", "0"]
    assert exit_code(*arguments, "--prices", str(prices), "--machine", "h100") == 0
    shown = capsys.readouterr().out
    # 3 outer steps of 4 inner steps of a second, and 8.888 s of waiting for each: 38.67 s.
    assert "inner step                    1 s, as the price file says of h100" in shown
    assert "the run                       3.1k tokens in 0:39 on h100" in shown
    assert "4 x 0.01074 h x $3.6 = $0.15" in shown and "in all                        $0.15" in shown
    assert shown.count("the run  ") == 2, "also for the settings that reach the target"
    assert exit_code(*arguments, "--prices", str(prices), "--machine", "h100", "--json") == 0
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert costs["wall_s"] == pytest.approx(3 * (4 + 8.888), rel=1e-3) and costs["machine"] == "h100"
    assert costs["usd"] == pytest.approx(costs["compute_usd"] + costs["traffic_usd"])


def test_typed_seconds_count_for_more_than_a_price_file(prices: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "experiment=smoke", "--prices", str(prices), "--machine"]
    assert exit_code(*arguments, "h100", "--step-s", "5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == 5
    assert exit_code(*arguments, "slow") == 2
    expected = "--machine=slow has neither tokens_per_s nor flops_per_s; add one, or give --step-s"
    assert capsys.readouterr().err == f"diloco: error: {expected}\n"
    expected = "--machine=h100 needs a price file; add --prices FILE, such as configs/launch/prices.yaml"
    for command in (["plan", "experiment=smoke", "--step-s", "1"], ["compare", "."]):
        assert exit_code(*command, "--machine", "h100") == 2
        assert capsys.readouterr().err == f"diloco: error: {expected}\n"


def test_compare_has_a_column_of_costs(prices: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")  # two peers, 21.5 s, 2000 bytes
    summary = json.loads((two / "summary.json").read_text()) | {"virtual_s": 1000.0}
    (two / "summary.json").write_text(json.dumps(summary))
    broken = make(tmp_path / "broken")
    (broken / "summary.json").unlink()
    arguments = ["compare", str(one), str(two), str(broken), "--prices", str(prices), "--machine", "h100"]
    assert exit_code(*arguments) == 0
    header, *rows = capsys.readouterr().out.splitlines()[:4]
    assert header.split()[-3:] == ["on", "h100", "exit"]
    assert [row.split()[-2] for row in rows] == ["$0.04", "$2.00", "-"], "by virtual seconds where there are any"
    assert exit_code(*arguments, "--json") == 0
    found = [one["usd"] for one in json.loads(capsys.readouterr().out)["runs"]]
    assert found == [pytest.approx(2 * 21.5 / 1000 + 1e-6), pytest.approx(2 + 1e-6), None]
    assert exit_code("compare", str(one), "--json") == 0
    assert "usd" not in json.loads(capsys.readouterr().out)["runs"][0]
