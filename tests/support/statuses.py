"""What `diloco status` prints."""

from __future__ import annotations

from typing import Any

from diloco.protocol.messages.control import Figures, Status
from diloco.protocol.states import State


def status(state: State = "training", version: int = 0, **fields: Any) -> Status:
    figures = Figures(**{key: value for key, value in fields.items() if key in Figures.model_fields})
    others = {key: value for key, value in fields.items() if key not in Figures.model_fields}
    return Status(state=state, versions=[version, version], figures=figures, **others)
