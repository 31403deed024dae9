"""Benchmarks that no page and no other test runs: that they work, and what they count."""

import re
from pathlib import Path

from tests.support.peers import command
from tests.support.places import SCRIPTS


def test_bench_gpu_measures_a_row_on_the_cpu(tmp_path: Path) -> None:
    arguments = "--cpu --quick --modes streaming --devices 1 3"
    with command(str(SCRIPTS / "bench_gpu"), arguments, directory=tmp_path) as started:
        said = started.done().stdout
    assert "- smoke, streaming on 3: this machine has 2" in said
    row = said.partition("| smoke | streaming | 1 | 2 |")[2]
    assert float(row.split("|")[4]) > 0, "steps beside an exchange"


def test_bench_control_counts_versions_and_messages(tmp_path: Path) -> None:
    arguments = "--peers 3 --seconds 6"  # a half of a cycle of 24 fragments
    with command(str(SCRIPTS / "bench_control"), arguments, directory=tmp_path) as started:
        said = started.done().stdout
    versions = re.fullmatch(r"3 peers: .* [1-9]\d* messages a second, (\d+) versions\n", said)
    assert versions and int(versions[1]) > 6
