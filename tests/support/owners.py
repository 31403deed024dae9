"""Writers of the core's state, read from the syntax trees of its modules."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from itertools import chain
from pathlib import Path

from diloco.core.facts import Facts
from diloco.core.fragment import NEXT
from tests.support.places import PACKAGE

CORE = PACKAGE / "core"
STATE = ("fragment", "facts")  # modules of the classes; their methods change them, too
# parts of a fragment and of the facts, with their classes
PARTS = {
    "inbox": "Inbox",
    "outbox": "Outbox",
    "round": "Closing",
    "learned": "Learned",
    "loop": "Loop",
    "life": "Life",
    "data": "DataQueue",
}
WHOLE = ("FragmentState", "Facts")  # and what is in no part
HOLDERS = ("f", "core", "facts", "fragment", "control")  # names of these two
MUTATE = {"add", "append", "clear", "discard", "extend", "pop", "remove", "setdefault", "update"}


def fields() -> dict[str, set[str]]:
    """Names of fields, by class."""
    named: dict[str, set[str]] = {}
    for name in STATE:
        for node in ast.parse((CORE / f"{name}.py").read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in (*PARTS.values(), *WHOLE):
                named[node.name] = {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return named


def _changed(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that a module assigns, deletes, or calls a method on that changes them."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                yield node
            case ast.Subscript(value=ast.expr() as value, ctx=ast.Store() | ast.Del()):
                yield value
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in MUTATE:
                yield value
            case ast.Call(func=ast.Name(id="forget_oldest"), args=[value, *_]):
                yield value


def _last_name(value: ast.expr) -> str:
    """`inbox` of `f.inbox`, and of `inbox`."""
    return getattr(value, "attr", getattr(value, "id", ""))


def writers() -> dict[str, set[str]]:
    """Modules of the core that change a field, by `Class.field`; for all fields."""
    named = fields()
    by_field: dict[str, set[str]] = {
        f"{owner}.{name}": set() for owner, names in named.items() for name in names
    }
    for file in sorted(CORE.rglob("*.py")):
        for target in _changed(ast.parse(file.read_text())):
            if not isinstance(target, ast.Attribute):
                continue
            holder = _last_name(target.value)
            owners = [PARTS[holder]] if holder in PARTS else []
            if holder in HOLDERS:
                owners = list(WHOLE)
            elif holder == "self" and file.stem in STATE:
                owners = list(named)
            for owner in owners:
                if target.attr in named[owner]:
                    by_field[f"{owner}.{target.attr}"].add(file.stem)
    return by_field


def written_outside() -> list[str]:
    """Places outside of the core that change its state."""
    names = {name for group in fields().values() for name in group} | PARTS.keys()
    places = defaultdict[Path, set[str]](set)
    for file in sorted(PACKAGE.rglob("*.py")):
        if CORE in file.parents:
            continue
        for target in _changed(ast.parse(file.read_text())):
            chain = ast.unparse(target)
            if "facts." in chain and isinstance(target, ast.Attribute) and target.attr in names:
                places[file].add(chain)
    return [
        f"{file.relative_to(PACKAGE)}: {chain}"
        for file, chains in places.items()
        for chain in chains
    ]


class States:
    """The states of the fragments of all peers, and that they change as `NEXT` says."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Facts, list[tuple[Enum, ...]]]] = {}

    def follow(self, facts: Facts) -> None:
        """A turn of a peer is over; `AssertionError` if a state does not follow another one."""
        states = [
            (f.inbox.state, f.round.state(f.tip.head.id), f.learned.state) for f in facts.fragments
        ]
        _, before = self._before.get(id(facts), (facts, states))
        self._before[id(facts)] = facts, states
        for old, new in zip(chain(*before), chain(*states), strict=True):
            assert new is old or new in NEXT[old], f"{old} became {new}"
