"""The command line in this process."""

from __future__ import annotations

import pytest

from diloco.cli.main import main


def exit_code(*arguments: str) -> int:
    """That of `diloco ARGUMENTS`."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code
