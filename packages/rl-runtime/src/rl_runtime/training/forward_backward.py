"""Run micro-batches through Megatron-Core's forward-backward function.

Two kinds of pass: a scoring pass (no gradients) and a training pass. Both use the same
micro-batches in the same order, so their log-probs agree exactly as long as the weights are the
same.

Invariants: the loss function always returns Megatron-Core's 3-tuple; every rank, with whatever
tokens, enters backward; what a pass computes for a token is kept in its micro-batch's `fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from rl_metrics import MicroBatchMetrics
from rl_runtime.training.micro_batch import MicroBatch
from rl_runtime.training.scores import ResponseScores, ScoreName, ScoreRequest, score_responses

__all__ = ["LossFunction", "run_scoring_pass", "run_training_pass"]

LossFunction = Callable[[MicroBatch, ResponseScores], tuple[torch.Tensor, MicroBatchMetrics]]
"""Takes a micro-batch and its scores; returns the scaled loss (a scalar with a graph) and what the micro-batch reports."""

_OutputFunction = Callable[..., Any]


def run_scoring_pass(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    *,
    temperature: float,
    tp_group: dist.ProcessGroup,
    fields: Mapping[str, ScoreName],
) -> None:
    """Compute scores without gradients and keep them in the micro-batches, on the last pipeline
    stage.

    Args:
        model: the model, wrapped or not.
        micro_batches: at least one; the same number on every rank.
        temperature: divisor of the logits.
        tp_group: tensor-parallel ranks.
        fields: by name of a field, the score that is kept under it.
    """

    def keep(batch: MicroBatch) -> _OutputFunction:
        def collect(scores: ResponseScores, non_loss_data: bool = True) -> None:
            assert non_loss_data
            batch.fields.update({field: scores[name].detach() for field, name in fields.items()})

        return collect

    with torch.no_grad():
        _run(
            model,
            micro_batches,
            keep,
            temperature=temperature,
            wanted=set(fields.values()),
            tp_group=tp_group,
            forward_only=True,
        )


def run_training_pass(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    *,
    temperature: float,
    wanted: AbstractSet[ScoreName],
    tp_group: dist.ProcessGroup,
) -> list[MicroBatchMetrics]:
    """Compute losses and gradients, reduced over all ranks.

    Args:
        model: the model in its data-parallel wrapper, with cleared gradients.
        micro_batches: at least one; the same number on every rank.
        loss_function: the scaled loss of one micro-batch.
        temperature: divisor of the logits.
        wanted: the scores that the loss function reads, besides log-probs.
        tp_group: tensor-parallel ranks.

    Returns:
        What each micro-batch reports, on the last pipeline stage; empty elsewhere.
    """
    per_token: bool = model.config.calculate_per_token_loss  # type: ignore[union-attr,assignment]

    def close(batch: MicroBatch) -> _OutputFunction:
        def finish(scores: ResponseScores) -> tuple[torch.Tensor, torch.Tensor, MicroBatchMetrics]:
            loss, metrics = loss_function(batch, scores)
            num_tokens = batch.num_trained_tokens if per_token else 1
            return (
                loss + scores.anchor,
                torch.tensor(num_tokens, dtype=torch.int, device=loss.device),
                metrics,
            )

        return finish

    return _run(
        model,
        micro_batches,
        close,
        temperature=temperature,
        wanted=wanted,
        tp_group=tp_group,
        forward_only=False,
    )


def _run(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    close: Callable[[MicroBatch], _OutputFunction],
    *,
    temperature: float,
    wanted: AbstractSet[ScoreName],
    tp_group: dist.ProcessGroup,
    forward_only: bool,
) -> list[Any]:
    def step(iterator: Iterator[MicroBatch], part: torch.nn.Module) -> tuple[Any, _OutputFunction]:
        batch = next(iterator)
        output = part(
            batch.tokens_1T,
            batch.positions_1T,
            None,
            packed_seq_params=batch.stream,
            output_processor=score_responses,
            output_processor_context=ScoreRequest(
                rows_K=batch.rows_K,
                targets_K=batch.targets_K,
                kept_sets=batch.kept_sets,
                temperature=temperature,
                wanted=wanted,
                tp_group=tp_group,
            ),
        )
        return output, close(batch)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        # Shapes travel with the tensors (variable_seq_lengths); Megatron-Core still wants a length
        # here.
        seq_length=micro_batches[0].tokens_1T.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results
