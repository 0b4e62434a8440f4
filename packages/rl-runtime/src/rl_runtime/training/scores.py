"""Log-probs of the sampled tokens from the model's last stage, without logits.

`score_responses` stands in for the output step of `GPTModel.forward`: only the hidden states of
rows that predict response tokens go to rl-topp's output layer. The gradient of the weight, tied or
not, goes straight into Megatron-Core's `main_grad`.

Axes: T local tokens, H hidden, V this rank's share of the vocabulary, K local response tokens.

Invariants: no tensor of rows times vocabulary exists, in forward or backward; scores are in float32
at least; a micro-batch without local response tokens still takes one unscored row through the
output layer, so that every rank takes part in every collective.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from rl_runtime.megatron.calls import OutputLayer
from rl_topp import NucleusSet
from rl_topp.lm_head import nucleus_lm_head_log_probs

if TYPE_CHECKING:
    from rl_runtime.training.micro_batch import MicroBatch

__all__ = ["ResponseScores", "ScoreName", "score_responses"]

ScoreName = Literal["log_probs", "entropy", "full_log_probs", "full_entropy"]
"""A score of one response token.

The first two are over its nucleus, or over the vocabulary where there is none; the others always
over the vocabulary.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseScores:
    """Scores of the K local response tokens, nats, float32 [K] each.

    0 where a token was not sampled; None where a score is not wanted.
    """

    log_probs: torch.Tensor
    """Over the nucleus, or over the vocabulary where there is none."""
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
    micro_batch: MicroBatch,
    temperature: float,
    wanted: AbstractSet[ScoreName],
    tp_group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    output_layer: OutputLayer,
    output_weight: torch.Tensor | None,
    **_: object,
) -> ResponseScores:
    """Score the sampled tokens; the `output_processor` of `GPTModel.forward`.

    Args:
        micro_batch: what to score.
        temperature: divisor of the logits, at which the tokens were sampled.
        wanted: which scores; `log_probs` are always given.
        tp_group: ranks that hold the other shares of the vocabulary.
        hidden_states: [T, 1, H] (its share of T under sequence parallelism), the decoder's output
            after the final norm; this and what follows come from Megatron-Core.
        output_layer: its vocabulary-parallel output layer, which gives its weight and is not
            called.
        output_weight: the tied embedding, or None.
        **_: what else the hook gives; not used.

    Returns:
        The scores.
    """
    weight_VH = output_layer.weight if output_weight is None else output_weight
    count = micro_batch.targets_K.numel()
    rows_K, targets_K, nucleus = micro_batch.rows_K, micro_batch.targets_K, micro_batch.nucleus
    if count == 0:
        # One row that is not scored: other ranks wait in the collectives of forward and backward.
        rows_K = targets_K = torch.zeros(1, dtype=torch.int64, device=hidden_states.device)
        nucleus = NucleusSet.not_sampled(1, vocab_size=nucleus.vocab_size)
    scores = nucleus_lm_head_log_probs(
        _hidden_rows(hidden_states, rows_K, tp_group, gather=output_layer.sequence_parallel),
        weight_VH,
        targets_K,
        nucleus,
        vocab_start=dist.get_rank(tp_group) * weight_VH.shape[0],
        tp_group=tp_group,
        temperature=temperature,
        full_log_probs="full_log_probs" in wanted,
        entropy="entropy" in wanted,
        full_entropy="full_entropy" in wanted,
        # This rank's share alone: the operation in `_hidden_rows` sums the shares.
        hidden_gradient="partial",
    )
    return ResponseScores(
        log_probs=scores.log_probs[:count],
        entropy=None if scores.entropy is None else scores.entropy[:count],
        full_log_probs=None if scores.full_log_probs is None else scores.full_log_probs[:count],
        full_entropy=None if scores.full_entropy is None else scores.full_entropy[:count],
        # The unscored row, or an empty sum: 0 either way, but with a graph.
        anchor=scores.log_probs[count:].sum(),
    )


def _hidden_rows(
    hidden_states: torch.Tensor, rows_K: torch.Tensor, tp_group: dist.ProcessGroup, *, gather: bool
) -> torch.Tensor:
    """Take rows [K, H] into the tensor-parallel region.

    They are the same on every rank; their gradient is summed over ranks on the way back.
    """
    if gather:
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=tp_group
        )
    # Not `hidden_states[rows_K]`, whose gradient sorts the rows in case one comes twice.
    rows_KH = hidden_states.squeeze(1).index_select(0, rows_K)
    if not gather:
        rows_KH = copy_to_tensor_model_parallel_region(rows_KH, group=tp_group)
    return rows_KH
