"""Errors of the schema as one line for the user: the key as typed, the value got, what is expected instead."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from pydantic import BaseModel, ValidationError

from diloco.config.describe import expected, leaves

__all__ = ["explain", "nearest", "show", "unknown_key"]


def show(value: Any, limit: int = 80) -> str:
    """A value as one printable line of at most `limit` characters; it may come from an untrusted peer."""
    plain = isinstance(value, str) and value != "" and value.isprintable()
    text = str(value) if plain else json.dumps(value, default=ascii)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known keys that were probably meant: the most similar ones, or none if nothing is similar.

    Group and last part are compared apart, and an abbreviation matches what it stands for (`learning_rate` finds `lr`).
    """
    group, _, leaf = word.rpartition(".")

    def score(candidate: str) -> float:
        its_group, _, its_leaf = candidate.rpartition(".")
        similarity = SequenceMatcher(None, leaf, its_leaf).ratio()
        if not group and not its_group:  # `modle=tiny` means the group rather than wandb.mode
            similarity += 0.15
        if _abbreviates(its_leaf, leaf) or _abbreviates(leaf, its_leaf):
            similarity = max(similarity, 0.7)
        return similarity + (SequenceMatcher(None, group, its_group).ratio() if group else 0.0)

    scores = {candidate: score(candidate) for candidate in known}
    best = max(scores.values(), default=0.0)
    return [key for key, value in scores.items() if value == best] if best >= (1.2 if group else 0.6) else []


def unknown_key(key: str, known: Iterable[str]) -> str:
    """`outer.learning_rate is not a setting; did you mean outer.lr?`"""
    known = list(known)
    head, rest = key, ""
    while not (guesses := nearest(head, known)) and head.count(".") > 1:  # model.confg.hidden_size
        head, _, last = head.rpartition(".")
        rest = f".{last}{rest}"
    guess = " or ".join(f"{one}{rest}" for one in guesses[:3])
    return f"{show(key)} is not a setting; {f'did you mean {guess}?' if guess else '--cfg help lists them all'}"


def explain(error: ValidationError, model: type[BaseModel], typed: Mapping[str, str] | None = None) -> str:
    """One line for a validation error: its first mistake, and how many more there are.

    `typed` maps keys to values as the user wrote them, where that is known.
    """
    first, *others = error.errors(include_url=False)
    keys = dict(leaves(model))
    key = ".".join(part for part in first["loc"] if isinstance(part, str))  # without the index into a list
    if first["type"] == "extra_forbidden":
        text = unknown_key(key, keys)
    elif first["type"] == "missing":
        text = f"{key} is missing; expected {_wanted(key, keys)}"
    elif first["type"] == "value_error":  # a check of ours, which wrote its own line
        text = show(str(first["ctx"]["error"]), limit=400)
    else:
        value = (typed or {}).get(key) or show(first["input"])
        text = f"{show(key)}={value} is {_complaint(first['type'])}; expected {_wanted(key, keys)}"
    return f"{text} (and {len(others)} more)" if others else text


def _wanted(key: str, keys: Mapping[str, Any]) -> str:
    return next(
        (expected(field) for known, field in keys.items() if f"{key}.".startswith(f"{known}.")), "a group of settings"
    )


def _complaint(kind: str) -> str:
    if kind.startswith(("greater_than", "less_than")):
        return "out of range"
    return "not a choice" if kind == "literal_error" else "not valid"


def _abbreviates(short: str, word: str) -> bool:
    """Whether `short` is the initial and some later letters of `word`, in order."""
    letters = iter(word)
    return len(short) >= 2 and short[:1] == word[:1] and all(letter in letters for letter in short)
