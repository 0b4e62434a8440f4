"""Run micro-batches through Megatron-Core's forward-backward function.

Two kinds of pass: a scoring pass (no gradients) and a training pass. Both use the same
micro-batches in the same order, so their log-probs agree exactly as long as the weights are the
same.

Axes: T local tokens of a micro-batch, K local response tokens.

Invariants: the loss function always returns Megatron-Core's 3-tuple; every rank, with whatever
tokens, enters backward; what a pass computes for a token is kept in its micro-batch's `fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from rl_metrics import Aggregation, MicroBatchMetrics
from rl_metrics.torch import megatron_num_tokens
from rl_runtime.megatron.calls import ForwardBackward, GptForward
from rl_runtime.training.micro_batch import MicroBatch
from rl_runtime.training.scores import ResponseScores, ScoreName, score_responses

__all__ = ["LossFunction", "run_scoring_pass", "run_training_pass"]

LossFunction = Callable[[MicroBatch, ResponseScores], tuple[torch.Tensor, MicroBatchMetrics]]
"""Loss of one micro-batch.

Takes the micro-batch and its scores; returns the scaled loss (a scalar with a graph) and what the
micro-batch reports.
"""


def run_scoring_pass(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    *,
    temperature: float,
    tp_group: dist.ProcessGroup,
    fields: Mapping[str, ScoreName],
) -> None:
    """Compute scores without gradients and keep them in the micro-batches, on the last stage.

    Args:
        model: the model, wrapped or not.
        micro_batches: at least one; the same number on every rank.
        temperature: divisor of the logits.
        tp_group: tensor-parallel ranks.
        fields: by name of a field, the score that is kept under it.
    """

    def keep(micro_batch: MicroBatch, scores: ResponseScores, *, non_loss_data: bool) -> None:
        assert non_loss_data
        micro_batch.fields.update({field: scores[name].detach() for field, name in fields.items()})

    with torch.no_grad():
        _run(
            model,
            micro_batches,
            keep,
            {"temperature": temperature, "wanted": set(fields.values()), "tp_group": tp_group},
            forward_only=True,
        )


def run_training_pass(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    *,
    aggregation: Aggregation,
    temperature: float,
    wanted: AbstractSet[ScoreName],
    tp_group: dist.ProcessGroup,
) -> list[MicroBatchMetrics]:
    """Compute losses and gradients, reduced over all ranks.

    Args:
        model: the model in its data-parallel wrapper, with cleared gradients.
        micro_batches: at least one; the same number on every rank.
        loss_function: the scaled loss of one micro-batch.
        aggregation: how tokens become one number; the model was configured for it.
        temperature: divisor of the logits.
        wanted: the scores that the loss function reads, besides log-probs.
        tp_group: tensor-parallel ranks.

    Returns:
        What each micro-batch reports, on the last pipeline stage; empty elsewhere.
    """

    def finish(
        micro_batch: MicroBatch, scores: ResponseScores
    ) -> tuple[torch.Tensor, torch.Tensor, MicroBatchMetrics]:
        loss, metrics = loss_function(micro_batch, scores)
        return (
            # Without local response tokens the loss has no graph; the anchor always has one.
            loss + scores.anchor,
            # Megatron-Core sums it over all ranks, and divides by it where it normalises the loss
            # itself.
            megatron_num_tokens(aggregation, micro_batch.loss_masks).to(loss.device),
            metrics,
        )

    return _run(
        model,
        micro_batches,
        finish,
        {"temperature": temperature, "wanted": wanted, "tp_group": tp_group},
        forward_only=False,
    )


def _run(
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    finish: Callable[..., object],
    scoring: Mapping[str, Any],
    *,
    forward_only: bool,
) -> list[Any]:
    def step(
        queue: Iterator[MicroBatch], stage: GptForward
    ) -> tuple[object, Callable[..., object]]:
        micro_batch = next(queue)
        output = stage(
            micro_batch.tokens_1T,
            micro_batch.positions_1T,
            None,
            packed_seq_params=micro_batch.stream,
            output_processor=partial(score_responses, micro_batch=micro_batch, **scoring),
        )
        return output, partial(finish, micro_batch)

    run: ForwardBackward = get_forward_backward_func()
    return run(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        # Shapes travel with the tensors (variable_seq_lengths); Megatron-Core still wants a length
        # here.
        seq_length=micro_batches[0].tokens_1T.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
        # Scores are not losses: `keep` then returns no 3-tuple, and nothing is divided.
        collect_non_loss_data=forward_only,
    )
