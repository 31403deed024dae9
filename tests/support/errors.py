"""What an error says."""

from collections.abc import Callable

import pytest


def error_text(
    kind: type[Exception], call: Callable[..., object], *arguments: object, **options: object
) -> str:
    """The text of the error that a call raises: one line, which can be shown on a terminal."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert text.isprintable() and text == text.strip(), repr(text)
    return text
