"""Imports point down and never in a circle, every third-party package has a home, and the core
touches neither clock nor socket.

The imports are read from the syntax tree, so one inside a function or under TYPE_CHECKING counts
like any other.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter

import pytest

from tests.support.places import PACKAGE

# From the bottom up; a part may import the parts of lower rows and itself. Parts of one row do not
# know each other.
LAYERS = [
    {*row.split()}
    for row in """
    text atomic ranges protocol
    errors
    process signals
    admission hub
    config
    messages
    core outer
    swarm model data
    extensions
    rundir
    attach
    train integrations
    sim volunteer
    dashboard
    cli
    """.strip().splitlines()
]
# The same inside a part that has folders of its own.
FOLDERS = {"swarm": [{"wire"}, {"rpc"}, {"mailbox"}, {"node", "client"}]}
# Where a package may be imported; anything else that is not in the standard library may not be
# imported at all.
TORCH = "outer extensions model data swarm rundir attach train sim integrations"
HOMES = {
    "hivemind": {"swarm"},
    "peft": {"model"},
    "scipy": {"model"},
    "bitsandbytes": {"model"},
    "transformers": {"model", "data", "integrations"},
    "accelerate": {"integrations"},
    "lightning": {"integrations"},
    "huggingface_hub": {"hub"},
    "datasets": {"data"},
    "pyarrow": {"data"},
    "fsspec": {"rundir", "swarm"},
    "base58": {"swarm"},
    "wandb": {"rundir"},
    "matplotlib": {"rundir"},
    "torch.distributed": {"attach"},
    "torch": {*TORCH.split()},
    "numpy": {"outer", "data", "rundir", "attach", "train"},
    "blake3": {"outer", "data", "messages", "core", "swarm"},
    "safetensors": {"model", "rundir"},
    "msgspec": {"messages", "core", "swarm", "rundir", "attach", "train"},
    "msgpack": {"swarm"},
    "cryptography": {"admission", "swarm"},
    "hydra": {"cli", "config"},
    "omegaconf": {"cli", "config"},
    "yaml": {"config"},
    "pydantic": {"config"},
    "pydantic_core": {"config"},
    "click": {"cli"},
    "rich": {"cli", "dashboard"},
}
# Sans-IO: these parts are told what happened and what time it is. (`outer` keeps scratch memory per
# thread.)
IO_MODULES = {"asyncio", "datetime", "multiprocessing", "select", "socket", "subprocess", "time"}
SANS_IO = {
    "admission": IO_MODULES | {"threading"},
    "core": IO_MODULES | {"threading"},
    "messages": IO_MODULES,
    "outer": IO_MODULES,
}
# Loading either can run somebody else's code.
NEVER = {"pickle", "dill", "marshal", "shelve"}


@cache
def imports(source: str, module: str, is_package: bool) -> list[tuple[int, str]]:
    """(line, dotted name) of everything a module imports; for `from a import b` this is `a.b`."""
    return [*_imports(source, module, is_package)]


def _imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", None))
            if function in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def complaints(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of a module such as `diloco.swarm.node`."""
    return [
        f"{module}:{line} imports {name}: {why}"
        for line, name in imports(source, module, is_package)
        if (why := _forbidden(module, name))
    ]


def _forbidden(module: str, name: str) -> str | None:
    part = module.split(".")[1] if "." in module else ""
    top = name.split(".")[0]
    if top == "diloco":
        return _points_up(part, name) or _points_up_inside(module, name)
    if top in NEVER:
        return "it can run code from a file"
    if top in SANS_IO.get(part, ()):
        return f"{part} reads no clock and opens no socket"
    if top in sys.stdlib_module_names:
        return None
    packages = [home for home in HOMES if f"{name}.".startswith(f"{home}.")]
    package = max(packages, key=len, default=None)
    if package is None:
        return "no part is its home"
    return None if part in HOMES[package] else f"its home is {' or '.join(sorted(HOMES[package]))}"


def _points_up(part: str, name: str) -> str | None:
    target = [*name.split("."), ""][1]
    # the facade, and what it defines itself
    if part in ("", "__main__") or target in ("", "__version__", part):
        return None
    rank = _ranks(LAYERS)
    if target not in rank or part not in rank:
        return f"{target if target not in rank else part} is in no layer"
    return None if rank[target] < rank[part] else f"{part} is not above {target}"


def _points_up_inside(module: str, name: str) -> str | None:
    """The same for two folders of one part."""
    folders = ([*dotted.split("."), "", ""][1:3] for dotted in (module, name))
    (part, mine), (target_part, target) = folders
    rank = _ranks(FOLDERS.get(part, []))
    if part != target_part or mine == target or not {mine, target} <= rank.keys():
        return None
    return None if rank[target] < rank[mine] else f"{part}.{mine} is not above {part}.{target}"


def _ranks(rows: list[set[str]]) -> dict[str, int]:
    return {name: number for number, row in enumerate(rows) for name in row}


def modules() -> Iterator[tuple[str, str, bool]]:
    """Source and name of each module, and whether it is a package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        yield file.read_text(), name.removesuffix(".__init__"), file.stem == "__init__"


def test_imports_point_down_and_third_party_packages_stay_at_home() -> None:
    found = [complaint for module in modules() for complaint in complaints(*module)]
    assert found == []


def test_every_part_of_the_package_is_in_a_layer() -> None:
    parts = {name.split(".")[1] for _, name, _ in modules() if "." in name} - {"__main__"}
    assert parts <= set().union(*LAYERS)
    for part, rows in FOLDERS.items():
        folders = {place.parent.name for place in (PACKAGE / part).glob("*/__init__.py")}
        assert folders == set().union(*rows)


def test_no_modules_import_each_other() -> None:
    """The sorter raises an error that names the circle."""
    names = {name for _, name, _ in modules()}

    def module_of(name: str) -> str:
        return name if name in names or not name else module_of(name.rpartition(".")[0])

    below = {
        module[1]: {module_of(name) for _, name in imports(*module)} - {"", module[1]}
        for module in modules()
    }
    TopologicalSorter(below).prepare()


def test_no_module_takes_a_private_name_of_another() -> None:
    taken = [
        f"{module[1]}:{line} imports {name}"
        for module in modules()
        for line, name in imports(*module)
        if name.startswith("diloco.") and re.match(r"_[a-z]", name.rpartition(".")[2])
    ]
    assert taken == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("outer.codecs", "import diloco.config\nimport diloco.train", "outer is not above train"),
        ("swarm.node", "importlib.import_module('diloco.cli')", "swarm is not above cli"),
        ("train.loop", "if TYPE_CHECKING:\n    import hivemind", "its home is swarm"),
        ("core.tips", "import time", "core reads no clock and opens no socket"),
        ("rundir.checkpoint", "import pickle", "it can run code from a file"),
        ("swarm.client.ask", "from ..node import node", "swarm.client is not above swarm.node"),
    ],
)
def test_the_checker_finds_what_is_wrong(module: str, source: str, complaint: str) -> None:
    [found] = complaints(source, f"diloco.{module}")
    assert found.endswith(f": {complaint}")


@pytest.mark.parametrize(
    "statement", ["import diloco", "import diloco.cli.main", "import diloco.config, diloco.errors"]
)
def test_nothing_heavy_is_imported_before_a_command_runs(statement: str) -> None:
    heavy = {*"torch transformers hivemind datasets numpy wandb matplotlib lightning".split()}
    code = f"import sys; {statement}; print(sorted({heavy} & {{*sys.modules}}))"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, cwd=PACKAGE.parent) == "[]\n"


def test_the_core_stands_alone() -> None:
    """Settings, admission and everything with a network stay out of what it loads."""
    code = "import sys, diloco.core.peer; print(*{name.split('.')[1] for name in sys.modules if"
    code += " name.startswith('diloco.')})"
    command = [sys.executable, "-c", code]
    rooms = subprocess.check_output(command, text=True, cwd=PACKAGE.parent).split()
    assert {*rooms} == {"core", "messages", "errors", "protocol", "ranges", "text"}
