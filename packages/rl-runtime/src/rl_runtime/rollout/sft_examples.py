"""Batches of the warm start: prompts with their right answers.

Invariants: label and end of sequence are trained, the prompt is not; every example is dealt to
exactly one rank.
"""

from __future__ import annotations

import numpy as np

from rl_dump import RaggedArray
from rl_runtime.batch.rank_batch import Column, take_columns
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import ConfigError
from rl_runtime.rollout.data.source import DataSource, Tokenizer

__all__ = ["sft_batch"]


def sft_batch(source: DataSource, tokenizer: Tokenizer, recipe: Recipe) -> list[dict[str, Column]]:
    """Take the next `warm_start.batch_size` examples and deal them to the ranks in turn.

    An example is the prompt, the label and the end-of-sequence id. The step is one token mean over
    all ranks.

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
    prompts = source.next_sft_prompts(recipe.warm_start.batch_size)
    answers = [
        [*tokenizer.encode(prompt.label, add_special_tokens=False), tokenizer.eos_token_id]
        for prompt in prompts
    ]
    tokens = [[*prompt.tokens, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [[1] * len(answer) for answer in answers]
    columns: dict[str, Column] = {
        "tokens": RaggedArray.from_list(tokens, np.int64),
        "loss_masks": RaggedArray.from_list(masks, np.int32),
    }
    ranks = recipe.parallel.data
    return [take_columns(columns, np.arange(rank, len(prompts), ranks)) for rank in range(ranks)]
