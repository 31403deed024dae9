"""A dataset directory as on the hub: 4 files of 30 rows, in a split named train."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.data import written

TEXTS = [[f"file {file} row {row} {'x' * (row % 7)}" for row in range(30)] for file in range(4)]
ROWS = {text.encode() for texts in TEXTS for text in texts}


def hub_directory(place: Path) -> Path:
    """Makes it there; it is named corpus."""
    rows = [[json.dumps({"text": text, "url": "u", "likes": len(text)}) for text in texts] for texts in TEXTS]
    files = {f"data/train-{file}.jsonl": "".join(f"{row}\n" for row in rows[file]) for file in range(4)}
    return written(place / "corpus", dict(files))
