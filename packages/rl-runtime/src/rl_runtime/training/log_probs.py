"""Log-probs of the sampled tokens from the model's last stage. Layer: engine glue (Megatron-Core's output hook, rl-topp).

`score_responses` is what `GPTModel.forward(output_processor=...)` calls in place of its own output step: it takes the hidden states of the rows that
predict response tokens, and only of those, through the output layer, and scores the sampled ids over their kept sets. Prompt and padding rows never
reach the vocabulary.

Invariants: scores are in float32 whatever the model's dtype; a micro-batch without local response tokens still runs one row through the output layer,
so that every rank takes part in every collective of forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from rl_runtime.training.batch import MicroBatch
from rl_topp import NucleusSet
from rl_topp.torch import nucleus_log_probs

__all__ = ["ResponseScores", "ScoreRequest", "score_responses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What to score, and at which temperature."""

    micro_batch: MicroBatch
    """Rows, targets and kept sets."""
    temperature: float
    """Divisor of the logits: the temperature at which the tokens were sampled."""
    entropy: bool
    """Whether entropies are wanted."""
    tp_group: dist.ProcessGroup
    """Ranks that hold the other parts of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseScores:
    """Scores of the K local response tokens, nats."""

    log_probs_K: torch.Tensor
    """float32 [K]: over the kept set, or over the vocabulary where there is none; 0 where the token was not sampled."""
    entropy_K: torch.Tensor | None
    """float32 [K]: entropy of the same distribution; None where not wanted."""
    anchor: torch.Tensor
    """float32 []: 0, and part of the autograd graph even where K is 0."""


def score_responses(
    *, hidden_states: torch.Tensor, output_layer: Any, output_weight: torch.Tensor | None, context: ScoreRequest, **_: Any
) -> ResponseScores:
    """Score the sampled tokens; the `output_processor` of `GPTModel.forward`.

    Args:
        hidden_states: [T, 1, H] (its part of T under sequence parallelism), the decoder's output after the final norm.
        output_layer: Megatron-Core's vocabulary-parallel output layer.
        output_weight: the tied embedding, or None.
        context: what to score.
        **_: what else the hook gives; not used.

    Returns:
        The scores.
    """
    batch = context.micro_batch
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False, group=context.tp_group)
    rows, targets, kept_sets = batch.rows_K, batch.targets_K, batch.kept_sets
    if batch.num_local_tokens == 0:
        rows = targets = torch.zeros(1, dtype=torch.int64, device=hidden_states.device)
        kept_sets = NucleusSet.not_sampled(1, vocab_size=kept_sets.vocab_size)
    with _whole_rows(output_layer):
        logits_K1V, _bias = output_layer(hidden_states[rows], weight=output_weight)
    logits_KV = logits_K1V.squeeze(1)
    scores = nucleus_log_probs(
        logits_KV,
        targets,
        kept_sets,
        vocab_start=dist.get_rank(context.tp_group) * logits_KV.shape[1],
        tp_group=context.tp_group,
        temperature=context.temperature,
        entropy=context.entropy,
    )
    count = batch.num_local_tokens
    return ResponseScores(
        log_probs_K=scores.log_probs[:count],
        entropy_K=None if scores.entropy is None else scores.entropy[:count],
        anchor=scores.log_probs[count:].sum(),
    )


@contextlib.contextmanager
def _whole_rows(output_layer: Any) -> Iterator[None]:
    """Tell the output layer that its input is whole: under sequence parallelism it would gather it again."""
    before = output_layer.sequence_parallel
    output_layer.sequence_parallel = False
    try:
        yield
    finally:
        output_layer.sequence_parallel = before
