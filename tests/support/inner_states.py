"""What a joiner said of its inner state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.peers import json_lines


def said(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json_lines(run_dir / "events.jsonl") if event["kind"] == kind]


def anchors(run_dir: Path, peer: str) -> dict[int, dict[str, str]]:
    lines = json_lines(run_dir / "metrics.jsonl")
    return {line["version"]: line["anchors"] for line in lines if line["peer"] == peer and line.get("anchors")}
