"""Commands that are typed in this process, and what they print."""

import pytest

from diloco.cli.main import main


def exit_code(*arguments: str) -> int:
    """That of `diloco ARGUMENTS`."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


class Typed:
    """Types commands; `out` and `err` are what the last one printed."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self.out = self.err = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What a command prints that ends with this code."""
        self._capture.readouterr()  # what was printed before
        ended = exit_code(*arguments)
        self.out, self.err = self._capture.readouterr()
        assert ended == code, f"{ended}: {self.err}"
        return self.out

    def refused(self, *arguments: str) -> str:
        """The one line with which a command refuses its arguments."""
        assert self(*arguments, code=2) == ""
        assert self.err.startswith("diloco: error: ") and self.err.count("\n") == 1, self.err
        return self.err


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(capsys)
