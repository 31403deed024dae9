"""`NAME@COMMIT`: what is typed of something on the Hugging Face hub becomes its name and its
commit.

A branch or a tag can move, and then peers of one run would have different files. So only a commit
is taken. A directory whose name looks like one of these is written as `./NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from diloco.config.explain import show
from diloco.errors import ConfigError

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
HUB_NAME = re.compile(f"{_PART}/{_PART}")
_AT = re.compile(rf"({_PART}(?:/{_PART})?)@(.*)")
# Group, key of the name, key of the commit, kind of repository.
_PLACES = (
    ("model", "path", "revision", "model"),
    ("data", "tokenizer", "tokenizer_revision", "model"),
    ("data", "name", "revision", "dataset"),
)
# What `train/start_files.py` fills in from the names; the first key tells whether it has.
_DERIVED = {
    "model.path": ("weights", "frozen", "generation", "config", "directory"),
    "data.tokenizer": ("tokenizer_files", "tokenizer_directory"),
}


def with_commits(settings: dict[str, Any], typed: Collection[str] = ()) -> dict[str, Any]:
    """The settings, by group and name, with each `NAME@COMMIT` as name and commit.

    Saved settings may hold what was derived from another model or tokenizer than the `typed` keys
    name; it is left out. Raises ConfigError: it is a branch or a tag (then the hub is asked for its
    commit), or another commit is typed too.
    """
    changed = {
        group: dict(values) if isinstance(values, dict) else values
        for group, values in settings.items()
    }
    for group, key, commit_key, kind in _PLACES:
        values = changed.get(group)
        if not isinstance(values, dict):
            continue
        derived = _DERIVED.get(f"{group}.{key}")
        if (
            derived
            and values.get(derived[0])
            and not {f"{group}.{key}", f"{group}.{commit_key}"}.isdisjoint(typed)
        ):
            for one in derived:
                if f"{group}.{one}" not in typed:
                    values.pop(one, None)
        whole, commit = values.get(key), values.get(commit_key)
        found = _AT.fullmatch(whole) if isinstance(whole, str) else None
        name, at = (found[1], found[2]) if found else (whole, commit)
        if isinstance(at, str) and isinstance(name, str) and not re.fullmatch("[0-9a-f]{40}", at):
            said = f"{group}.{key}={show(whole)}" if found else f"{group}.{commit_key}={show(at)}"
            raise ConfigError(
                f"{said} names no commit, and what is not a commit can change;"
                f" {_remedy(kind, name, at)}"
            )
        if found and commit not in (None, at):
            raise ConfigError(
                f"{group}.{key}={show(whole)} and {group}.{commit_key}={show(commit)} differ;"
                " drop one"
            )
        if found:
            values[key], values[commit_key] = name, at
    return changed


def _remedy(kind: str, name: str, at: str) -> str:
    from diloco.hub import commit_of

    commit = commit_of(kind, name, at) if at else None
    if commit is None:
        return "write the 40 hexadecimal digits that the hub shows"
    return f"write {name}@{commit}, which it is now"
