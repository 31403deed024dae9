"""The one import of `transformers`: late, because it takes seconds, and silenced, because it tears the live table."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["one_line", "transformers"]


@functools.cache
def transformers() -> Any:
    """The `transformers` module without progress bars, advice and warnings; errors still arrive as exceptions."""
    import transformers

    module: Any = transformers  # its functions have no annotations
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def one_line(error: BaseException) -> str:
    """The text of a foreign exception, on one line and cut to a length that still reads as one."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
