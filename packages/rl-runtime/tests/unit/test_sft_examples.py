"""Examples of the warm start: answer and end are trained, and each example goes to one rank."""

from typing import cast

import numpy as np
import pytest

from rl_dump import RaggedArray
from rl_runtime.config import Recipe
from rl_runtime.errors import ConfigError
from rl_runtime.records import Prompt
from rl_runtime.rollout.data.source import DataSource, Tokenizer
from rl_runtime.rollout.sft_examples import sft_batch


class Source:
    """The call that is made of a data source."""

    def next_sft_prompts(self, count: int) -> list[Prompt]:
        return [
            Prompt(
                group_id=number,
                sample_index=number,
                text="",
                tokens=np.array([9]),
                label="7" * number,
            )
            for number in range(count)
        ]


class DigitTokenizer:
    """The call that is made of a tokenizer."""

    eos_token_id: int | None = 1

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(character) for character in text]


def batch(tokenizer: DigitTokenizer) -> list[dict[str, list[list[int]]]]:
    recipe = Recipe.model_validate({"warm_start": {"batch_size": 3}, "parallel": {"data": 2}})
    ranks = sft_batch(cast("DataSource", Source()), cast("Tokenizer", tokenizer), recipe)
    return [
        {
            name: [item.tolist() for item in column]
            for name, column in columns.items()
            if isinstance(column, RaggedArray)
        }
        for columns in ranks
    ]


def test_examples_are_dealt_in_turn_and_train_the_answer_with_its_end() -> None:
    assert batch(DigitTokenizer()) == [
        {"tokens": [[9, 1], [9, 7, 7, 1]], "loss_masks": [[1], [1, 1, 1]]},
        {"tokens": [[9, 7, 1]], "loss_masks": [[1, 1]]},
    ]


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = DigitTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(ConfigError, match="no end-of-sequence id"):
        batch(tokenizer)
