"""Log-probs of the sampled tokens from the model's last stage.

`score_responses` is what `GPTModel.forward(output_processor=...)` calls in place of its own output
step. It takes the hidden states of the rows that predict response tokens, and only of those, to
rl-topp's output layer, which scores the sampled ids over their kept sets without logits; rows
without a filter, and full scores where they are wanted, go over the vocabulary block by block in
the same call. Prompt and padding rows never reach the vocabulary. The gradient of the weight, tied
or not, goes straight into Megatron-Core's `main_grad`; that of the hidden states is this rank's
part, and the operation by which they enter the tensor-parallel region (a copy, or a gather under
sequence parallelism) sums the parts.

Invariants: no tensor of rows times vocabulary exists, in forward or backward; scores are in float32
at least, whatever the model's dtype; a micro-batch without local response tokens still takes one
unscored row through the output layer, so that every rank takes part in every collective of forward
and backward.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from rl_topp import NucleusSet
from rl_topp.lm_head import nucleus_lm_head_log_probs

__all__ = ["ResponseScores", "ScoreName", "ScoreRequest", "score_responses"]

ScoreName = Literal["log_probs", "entropy", "full_log_probs", "full_entropy"]
"""A score of one response token.

The first two are over its kept set, or over the vocabulary where there is none; the others always
over the vocabulary.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What to score of one micro-batch, and at which temperature."""

    rows_K: torch.Tensor
    """int64 [K]: local rows whose hidden states predict the tokens, each named once."""
    targets_K: torch.Tensor
    """int64 [K]: the tokens' ids."""
    kept_sets: NucleusSet
    """Kept sets of the K tokens."""
    temperature: float
    """Divisor of the logits: the temperature at which the tokens were sampled."""
    wanted: AbstractSet[ScoreName]
    """Which scores; `log_probs` are always given."""
    tp_group: dist.ProcessGroup
    """Ranks that hold the other parts of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseScores:
    """Scores of the K local response tokens, nats, float32 [K] each; 0 where the token was not sampled; None where not wanted."""

    log_probs: torch.Tensor
    """Over the kept set, or over the vocabulary where there is none."""
    entropy: torch.Tensor | None
    """Entropy of the same distribution."""
    full_log_probs: torch.Tensor | None
    """Over the vocabulary."""
    full_entropy: torch.Tensor | None
    """Entropy over the vocabulary."""
    anchor: torch.Tensor
    """float32 []: 0, and part of the autograd graph even where K is 0."""

    def __getitem__(self, name: ScoreName) -> torch.Tensor:
        """Return a score that was wanted."""
        score: torch.Tensor | None = getattr(self, name)
        assert score is not None, f"{name} was not asked for"
        return score


def score_responses(
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    context: ScoreRequest,
    **_: Any,
) -> ResponseScores:
    """Score the sampled tokens; the `output_processor` of `GPTModel.forward`.

    Args:
        hidden_states: [T, 1, H] (its part of T under sequence parallelism), the decoder's output
            after the final norm.
        output_layer: Megatron-Core's vocabulary-parallel output layer, which gives its weight and
            is not called.
        output_weight: the tied embedding, or None.
        context: what to score.
        **_: what else the hook gives; not used.

    Returns:
        The scores.
    """
    weight_VH: torch.Tensor = output_layer.weight if output_weight is None else output_weight
    count = context.targets_K.numel()
    rows, targets, kept_sets = context.rows_K, context.targets_K, context.kept_sets
    if count == 0:
        rows = targets = torch.zeros(1, dtype=torch.int64, device=hidden_states.device)
        kept_sets = NucleusSet.not_sampled(1, vocab_size=kept_sets.vocab_size)
    scores = nucleus_lm_head_log_probs(
        _hidden_rows(hidden_states, rows, context.tp_group, gather=output_layer.sequence_parallel),
        weight_VH,
        targets,
        kept_sets,
        vocab_start=dist.get_rank(context.tp_group) * weight_VH.shape[0],
        tp_group=context.tp_group,
        temperature=context.temperature,
        full_log_probs="full_log_probs" in context.wanted,
        entropy="entropy" in context.wanted,
        full_entropy="full_entropy" in context.wanted,
        hidden_gradient="partial",
    )
    return ResponseScores(
        log_probs=scores.log_probs[:count],
        entropy=None if scores.entropy is None else scores.entropy[:count],
        full_log_probs=None if scores.full_log_probs is None else scores.full_log_probs[:count],
        full_entropy=None if scores.full_entropy is None else scores.full_entropy[:count],
        anchor=scores.log_probs[count:].sum(),
    )


def _hidden_rows(
    hidden_states: torch.Tensor, rows_K: torch.Tensor, tp_group: dist.ProcessGroup, *, gather: bool
) -> torch.Tensor:
    """Take rows [K, H] into the tensor-parallel region: the same on every rank, their gradient summed over ranks on the way back."""
    if gather:
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=tp_group
        )
    # Not `hidden_states[rows]`, whose gradient sorts the rows in case one comes twice.
    rows_KH = hidden_states.squeeze(1).index_select(0, rows_K)
    if not gather:
        rows_KH = copy_to_tensor_model_parallel_region(rows_KH, group=tp_group)
    return rows_KH
