"""Several processes make the tokens of one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diloco.data.tokenizers import HubTokenizer
from diloco.data.tokens import tokenised
from diloco.errors import DataError
from tests.support.data import config


def documents_of(number: int) -> Iterator[bytes]:
    return (f"w{index} w{index % 7} ".encode() * (1 + index % 3) for index in range(number))


@pytest.mark.slow
def test_processes_make_the_same_tokens_in_the_same_order(word_tokenizer: str) -> None:
    settings = config("text", Path("x"), tokenizer=word_tokenizer)
    tokenizer = HubTokenizer(word_tokenizer)
    one, two = (
        list(tokenised(documents_of(3000), settings, tokenizer, processes)) for processes in (1, 2)
    )
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a.training, b.training) and np.array_equal(a.held_out, b.held_out)
    # so that the processes end as they begin
    broken = settings.model_copy(update={"tokenizer": "nowhere"})
    with pytest.raises(
        DataError, match=r"^data\.path: a process that tokenises was killed, perhaps for want of"
    ):
        list(tokenised(documents_of(3000), broken, tokenizer, 2))
