"""What a program imports with `Swarm` and with a model, and that it can still import the rest."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diloco.swarm.wire.hivemind_names import _defer
from tests.support.places import PACKAGE

UNUSED = "scipy hivemind.averaging hivemind.moe hivemind.optim pydantic.v1"
SWARM = f"""
import sys
from diloco import Swarm
print(sorted({{*"{UNUSED}".split()}} & {{*sys.modules}}))
import hivemind
from hivemind.p2p import P2P
print(hivemind.__version__ > "1", hivemind.utils.MPFuture.__name__, P2P.__name__)
ours = {{name for name in vars(hivemind) if not name.startswith("_")}}
modules = [name for name in sys.modules if name.split(".")[0] == "hivemind"]
for name in modules:
    del sys.modules[name]
import hivemind
print(sorted({{name for name in vars(hivemind) if not name.startswith("_")}} - ours))
"""
MODEL = """
import sys
from diloco.model.files import transformers
transformers()
from transformers.models.llama import modeling_llama
print([name for name in sys.modules if name.startswith("scipy")])
import torch
from transformers.loss import loss_for_object_detection as losses
print(losses.is_scipy_available(), transformers().utils.is_scipy_available())
print(*losses.linear_sum_assignment(torch.tensor([[1.0, 0.0], [0.0, 1.0]])))
print("scipy.optimize" in sys.modules)
"""
NO_SEMAPHORES = """
import _multiprocessing, multiprocessing.synchronize
class SemLock(_multiprocessing.SemLock):
    def __new__(cls, *arguments):
        raise OSError(30, "Read-only file system")
_multiprocessing.SemLock = SemLock
try:
    import diloco.swarm.wire.libp2p
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def printed(program: str) -> list[str]:
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines()


def test_a_swarm_imports_no_more_of_hivemind_than_it_uses_and_a_program_still_can() -> None:
    assert printed(SWARM) == ["[]", "True MPFuture P2P", "[]"]


def test_a_model_imports_no_scipy_and_the_losses_of_images_still_have_it() -> None:
    pytest.importorskip("scipy")
    assert printed(MODEL) == ["[]", "True True", "[0 1] [1 0]", "True"]


def test_a_machine_without_semaphores_is_one_line() -> None:
    needs = "hivemind needs /dev/shm, which cannot be written (Read-only file system)"
    [line] = printed(NO_SEMAPHORES)
    assert line == f"ConfigError: {needs}; mount -o remount,rw /dev/shm"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `deferred` whose modules and whose `__init__` can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    directory = tmp_path / "deferred"
    directory.mkdir()
    (directory / "__init__.py").write_text("from deferred import late\nname = late.name\n")
    (directory / "early.py").write_text("name = 1\n")
    (directory / "late.py").write_text("import deferred\nname = 2\n")
    for name in ("deferred", "deferred.early", "deferred.late"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    return directory


def test_the_init_of_a_deferred_package_runs_at_the_first_name_that_it_lacks(package: Path) -> None:
    _defer("deferred")
    import deferred.early

    assert "deferred.late" not in sys.modules and deferred.early.name == 1
    with pytest.raises(AttributeError, match="module 'deferred' has no attribute 'nothing'"):
        deferred.nothing  # noqa: B018
    assert deferred.name == 2 and "__getattr__" not in vars(deferred)


def test_an_init_that_fails_is_run_again(package: Path) -> None:
    works = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text("raise OSError('not now')\n")
    _defer("deferred")
    import deferred

    with pytest.raises(OSError, match="not now"):
        deferred.name  # noqa: B018
    (package / "__init__.py").write_text(works + "# of another length\n")
    assert deferred.name == 2


def test_threads_that_ask_a_deferred_package_wait_for_its_init(package: Path) -> None:
    begun, going_on = threading.Event(), threading.Event()
    (package / "__init__.py").write_text(
        "import sys\nbegun.set()\nassert going_on.wait(60)\nname = 2\n"
    )
    _defer("deferred")
    import deferred

    vars(deferred).update(begun=begun, going_on=going_on)
    names: list[int] = []
    threads = [
        threading.Thread(target=lambda: names.append(deferred.name), daemon=True) for _ in range(2)
    ]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    going_on.set()
    for thread in threads:
        thread.join(60)
    assert names == [2, 2]


def test_a_package_that_is_there_or_missing_is_left_alone() -> None:
    import json

    _defer("json")
    _defer("no_such_package")
    assert sys.modules["json"] is json and "no_such_package" not in sys.modules
