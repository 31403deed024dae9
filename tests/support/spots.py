"""What a peer said of contributions that were checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def checked(run_dir: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "spot_check"]
