"""What a peer said of contributions that were checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.inner_states import said


def checked(run_dir: Path) -> list[dict[str, Any]]:
    return said(run_dir, "spot_check")
