"""Supervised batches for the warm start: prompts with their right answers. Layer: rollout."""

from __future__ import annotations

import numpy as np

from rl_dump import RaggedArray
from rl_runtime.batch import Column, RankBatch
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import ConfigError
from rl_runtime.rollout.assignment import assign_batch
from rl_runtime.rollout.data_source import DataSource, Tokenizer

__all__ = ["warm_start_batch"]


def warm_start_batch(source: DataSource, tokenizer: Tokenizer, recipe: Recipe) -> tuple[RankBatch, ...]:
    """Take the next `warm_start.batch_size` examples and cut them for the data-parallel ranks.

    An example is the prompt, the label and the end-of-sequence id; label and end are trained. The step is one token mean.

    Returns:
        One part per data-parallel rank.

    Raises:
        ConfigError: the tokenizer has no end-of-sequence id.
    """
    if tokenizer.eos_token_id is None:
        msg = "the tokenizer has no end-of-sequence id: a warm start needs one to teach where answers end"
        raise ConfigError(msg)
    prompts = source.next_warm_start_prompts(recipe.warm_start.batch_size)
    answers = [np.array([*tokenizer.encode(prompt.label, add_special_tokens=False), tokenizer.eos_token_id], np.int64) for prompt in prompts]
    count = np.arange(len(prompts), dtype=np.int64)
    response_lengths = np.array([answer.size for answer in answers], np.int64)
    columns: dict[str, Column] = {
        "rollout_position": count,
        "rollout_ids": count,
        "group_ids": count,
        "tokens": RaggedArray.from_list(
            [np.concatenate([prompt.tokens, answer]) for prompt, answer in zip(prompts, answers, strict=True)], np.int64
        ),
        "total_lengths": response_lengths + np.array([prompt.tokens.size for prompt in prompts], np.int64),
        "response_lengths": response_lengths,
        "loss_masks": RaggedArray.from_list([np.ones(answer.size, np.int32) for answer in answers], np.int32),
    }
    one_step = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update={"global_batch_size": len(prompts)}),
            "algorithm": recipe.algorithm.model_copy(update={"loss_aggregation": "token_mean"}),
        }
    )
    return assign_batch(columns, one_step, batch_id=0).rank_batches
