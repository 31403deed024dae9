"""Sweeps as they are typed, and what came of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.exit_codes import exit_code

SMOKE = "experiment=smoke"


def sweep(*arguments: str) -> int:
    return exit_code("sweep", "local", SMOKE, *arguments, "--dir", "s")


def outcome(place: str = "s") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(place) / "sweep.json").read_text())
    return content


def states(place: str = "s") -> dict[str, str]:
    return {member["name"]: member["state"] for member in outcome(place)["members"]}
