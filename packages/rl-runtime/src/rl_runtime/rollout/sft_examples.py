"""Supervised batches for the warm start: prompts with their right answers."""

from __future__ import annotations

import numpy as np

from rl_dump import RaggedArray
from rl_runtime.batch.rank_batch import Column, take_columns
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import ConfigError
from rl_runtime.rollout.data.source import DataSource, Tokenizer

__all__ = ["warm_start_batch"]


def warm_start_batch(
    source: DataSource, tokenizer: Tokenizer, recipe: Recipe
) -> list[dict[str, Column]]:
    """Take the next `warm_start.batch_size` examples and deal them to the data-parallel ranks in
    turn.

    An example is the prompt, the label and the end-of-sequence id; label and end are trained. The
    step is one token mean over all ranks.

    Returns:
        Per data-parallel rank, the columns `tokens` int64 [L] and `loss_masks` int32 [R].

    Raises:
        ConfigError: the tokenizer has no end-of-sequence id.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence id: a warm start needs one to teach where"
            " answers end"
        )
    prompts = source.next_warm_start_prompts(recipe.warm_start.batch_size)
    answers = [
        np.array(
            [*tokenizer.encode(prompt.label, add_special_tokens=False), tokenizer.eos_token_id],
            np.int64,
        )
        for prompt in prompts
    ]
    columns: dict[str, Column] = {
        "tokens": RaggedArray.from_list(
            [
                np.concatenate([prompt.tokens, answer])
                for prompt, answer in zip(prompts, answers, strict=True)
            ],
            np.int64,
        ),
        "loss_masks": RaggedArray.from_list(
            [np.ones(answer.size, np.int32) for answer in answers], np.int32
        ),
    }
    ranks = recipe.parallel.data
    return [take_columns(columns, np.arange(rank, len(prompts), ranks)) for rank in range(ranks)]
