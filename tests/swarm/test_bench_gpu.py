"""`scripts/bench_gpu`: what it counts, what it says of what it cannot run, and that it works
without a GPU."""

from pathlib import Path

from tests.support.peers import command
from tests.support.places import SCRIPTS


def test_it_measures_a_row_on_the_cpu(tmp_path: Path) -> None:
    arguments = "--cpu --quick --modes streaming --devices 1 3"
    with command(str(SCRIPTS / "bench_gpu"), arguments, directory=tmp_path) as started:
        said = started.done().stdout
    assert "- smoke, streaming on 3: this machine has 2" in said
    row = said.partition("| smoke | streaming | 1 | 2 |")[2]
    assert float(row.split("|")[4]) > 0, "steps beside an exchange"
