"""Families of other people's things, one module each, which `scripts/works_with` plays.

A module of this folder has

    SOURCES = ("torch", ...)          distributions whose versions the page names
    def members() -> Iterable[Member]
    def play(name: str) -> str        one member: WORKS, works_with(SETTING) or refused(WHY)

and a docstring whose first paragraph is the oracle. `play` runs in a process of its own, in an
empty working directory; it raises where the product does anything else, which is a bug. `refused`
is for what the product itself refused, in one line and before anything was lost.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from typing import NamedTuple

WORKS = "works"


class Member(NamedTuple):
    """One of a family.

    Attributes:
        name: what `play` gets, and what the page shows.
        kind: members of one kind are shown and counted together.
        quick: it broke something once, so `--quick` plays it.
        needs: a distribution without which it is skipped.
    """

    name: str
    kind: str = ""
    quick: bool = False
    needs: str = ""


def works_with(setting: str) -> str:
    """It works, once this is set."""
    return f"works with {setting}"


def refused(why: object) -> str:
    """The product refuses it; `why` is the line that its user reads."""
    lines = str(why).strip().splitlines()
    assert len(lines) == 1, f"{len(lines)} lines instead of one: {why}"
    return f"refused: {lines[0]}"


def play_in_child(family: str, name: str, log: str, results: Connection) -> None:
    """What a process of the pool does: play a member, and send what came of it."""
    os.setsid()  # who kills it kills what it started
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.enable()
    with tempfile.TemporaryDirectory(prefix="works-with-") as folder:
        os.chdir(folder)
        try:
            result = import_module(f"{__name__}.{family}").play(name)
        except BaseException as error:
            traceback.print_exc()
            text = " ".join(str(error).split())
            result = f"bug: {type(error).__name__}: {text}"
        os.chdir("/")
    results.send(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries, which nobody waits for
