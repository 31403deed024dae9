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
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.places import PACKAGE

# From the bottom up; a part may import the parts of lower rows and itself. Parts of one row do not
# know each other.
LAYERS = [
    {"text", "atomic", "ranges"},
    {"errors"},
    {"admission", "hub"},
    {"config"},
    {"messages"},
    {"core", "outer"},
    {"swarm", "model", "data"},
    {"extensions"},
    {"rundir"},
    {"attach"},
    {"train", "integrations"},
    {"sim"},
    {"dashboard"},
    {"cli"},
    {"testing"},  # for tests, and for those who extend diloco; nothing of the product needs it
]
# The same inside a part that has folders of its own.
STOREYS = {
    "swarm": [
        {"wire"},
        {"rpc"},
        {"node", "client"},
    ],
}
# Where a package may be imported; anything else that is not in the standard library may not be
# imported at all.
HOMES = {
    "hivemind": {"swarm"},
    "transformers": {"model", "data", "integrations"},
    "accelerate": {"integrations"},
    "lightning": {"integrations"},
    "huggingface_hub": {"hub"},
    "datasets": {"data"},
    "pyarrow": {"data"},
    "fsspec": {"rundir"},
    "wandb": {"rundir"},
    "matplotlib": {"rundir"},
    "torch.distributed": {"attach"},
    "torch": {
        "outer",
        "extensions",
        "model",
        "data",
        "swarm",
        "rundir",
        "attach",
        "train",
        "sim",
        "integrations",
        "testing",
    },
    "numpy": {"outer", "data", "rundir", "attach", "train"},
    "blake3": {"outer", "data", "messages", "core", "swarm"},
    "safetensors": {"model", "rundir"},
    "msgspec": {"messages", "core", "swarm", "rundir", "attach", "train", "testing"},
    "msgpack": {"swarm", "testing"},
    "uvloop": {"swarm"},
    "cryptography": {"admission", "swarm"},
    "hydra": {"cli", "config"},
    "omegaconf": {"cli", "config"},
    "yaml": {"config"},
    "annotated_types": {"config"},
    "pydantic": {"config", "testing"},
    "pydantic_core": {"config"},
    "click": {"cli"},
    "rich": {"cli", "dashboard", "testing"},
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


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of everything a module imports; for `from a import b` this is
    `a.b`."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", None)
            )
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


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
    package = max(
        (home for home in HOMES if f"{name}.".startswith(f"{home}.")), key=len, default=None
    )
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
    (_, part, storey), (_, target_part, target) = (
        [*dotted.split("."), "", ""][:3] for dotted in (module, name)
    )
    rank = _ranks(STOREYS.get(part, []))
    if part != target_part or storey == target or not {storey, target} <= rank.keys():
        return None
    return None if rank[target] < rank[storey] else f"{part}.{storey} is not above {part}.{target}"


def _ranks(rows: list[set[str]]) -> dict[str, int]:
    return {name: number for number, row in enumerate(rows) for name in row}


def modules() -> list[tuple[str, Path]]:
    files = sorted(PACKAGE.rglob("*.py"))
    names = [
        file.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
        for file in files
    ]
    return [(name.removesuffix(".__init__"), file) for name, file in zip(names, files, strict=True)]


def test_imports_point_down_and_third_party_packages_stay_at_home() -> None:
    found = [
        complaints(file.read_text(encoding="utf-8"), name, file.name == "__init__.py")
        for name, file in modules()
    ]
    assert [complaint for some in found for complaint in some] == []


def test_every_part_of_the_package_is_in_a_layer() -> None:
    parts = {name.split(".")[1] for name, _ in modules() if "." in name} - {"__main__"}
    assert parts <= set().union(*LAYERS)
    for part, rows in STOREYS.items():
        folders = {
            place.name for place in (PACKAGE / part).iterdir() if (place / "__init__.py").is_file()
        }
        assert folders == set().union(*rows)


def test_no_modules_import_each_other() -> None:
    """The sorter raises an error that names the circle."""
    names = {name for name, _ in modules()}

    def module_of(name: str) -> str:
        return name if name in names or not name else module_of(name.rpartition(".")[0])

    below = {}
    for module, file in modules():
        found = imports(file.read_text(encoding="utf-8"), module, file.name == "__init__.py")
        below[module] = {module_of(name) for _, name in found} - {"", module}
    TopologicalSorter(below).prepare()


def test_no_module_takes_a_private_name_of_another() -> None:
    taken = [
        f"{module}:{line} imports {name}"
        for module, file in modules()
        for line, name in imports(
            file.read_text(encoding="utf-8"), module, file.name == "__init__.py"
        )
        if name.startswith("diloco.") and re.match(r"_[a-z]", name.rpartition(".")[2])
    ]
    assert taken == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        (
            "diloco.outer.codecs",
            "import diloco.config.schema\nimport diloco.train",
            "outer is not above train",
        ),
        (
            "diloco.swarm.node",
            "import importlib\nimportlib.import_module('diloco.cli')",
            "swarm is not above cli",
        ),
        ("diloco.train.loop", "if TYPE_CHECKING:\n    import hivemind", "its home is swarm"),
        ("diloco.core.tips", "import time", "core reads no clock and opens no socket"),
        ("diloco.rundir.checkpoint", "import pickle", "it can run code from a file"),
        (
            "diloco.swarm.client.ask",
            "from ..node import node",
            "swarm.client is not above swarm.node",
        ),
    ],
)
def test_the_checker_finds_what_is_wrong(module: str, source: str, complaint: str) -> None:
    found = complaints(source, module)
    assert len(found) == 1
    assert found[0].endswith(f": {complaint}")


@pytest.mark.parametrize(
    "statement", ["import diloco", "import diloco.cli.main", "import diloco.config, diloco.errors"]
)
def test_nothing_heavy_is_imported_before_a_command_runs(statement: str) -> None:
    heavy = (
        "{'torch', 'transformers', 'hivemind', 'datasets', 'numpy', 'wandb', 'matplotlib',"
        " 'lightning'}"
    )
    code = f"import sys; {statement}; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert shown.stdout == "[]\n"
