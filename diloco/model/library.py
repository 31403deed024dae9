"""The only import of `transformers`: late, because it takes seconds; silent, because output tears the live table."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["one_line", "transformers"]


@functools.cache
def transformers() -> Any:
    """The `transformers` module without progress bars, advice and warnings; errors are still raised."""
    import transformers

    module: Any = transformers  # its functions have no annotations
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def one_line(error: BaseException) -> str:
    """The text of another library's exception, on one line and at most 300 characters long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
