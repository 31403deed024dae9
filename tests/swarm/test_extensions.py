"""An outer optimizer from a user's package, in the processes of a run."""

from pathlib import Path

import pytest

from tests.support.extensions import installed
from tests.support.peers import SMOKE, command

MISSING = (
    "outer.optimizer=lion is not installed here; expected one of nesterov, delayed_nesterov, or ask"
    " whoever started the run which package has it"
)


@pytest.mark.slow
@pytest.mark.usefixtures("own_home")
def test_who_joins_a_run_whose_optimizer_is_not_installed_here_is_told(tmp_path: Path) -> None:
    for name in ("installed", "starter", "joiner"):
        (tmp_path / name).mkdir()
    folder = Path(installed(tmp_path / "installed", lion="lion_code"))
    mine = "outer.optimizer=lion swarm.min_peers=2 wandb.mode=disabled swarm.identity_path=key"
    train, place = ("-m diloco train", *SMOKE, mine), tmp_path / "joiner"
    with command(*train, directory=tmp_path / "starter", modules=folder) as starter:
        join = f"-m diloco join {starter.address()} --yes"
        with command(join, directory=place) as joiner:
            joiner.done(2)
        assert MISSING in joiner.stderr
        with command(join, directory=place, modules=folder) as other:
            other.done()
        starter.done()
