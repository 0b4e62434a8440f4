"""Metrics of the rollout side, each a declared `rl_metrics.Metric`.

Invariants: scores count each rollout once, however many samples it has; per-token metrics count
trained tokens only; a metric without data is left out.

Axes: T response tokens of the whole batch, sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from rl_dump import RaggedArray
from rl_metrics import Metric, report
from rl_runtime.batch.plan import PlannedBatch
from rl_runtime.batch.rank_batch import Column
from rl_runtime.records import PromptGroup
from rl_runtime.rollout.batch_generator import GeneratedBatch

__all__ = ["mean_scores", "rollout_report", "schedule_report"]


def mean_scores(generated: GeneratedBatch) -> dict[str, float]:
    """Average each score over rollouts, such as {"reward": 0.6, "exact_match": 0.2}."""
    scores = _scores_by_rollout(generated.groups)
    return _present(
        Metric.of_mean(name, sum(values), len(values), unit="rollout")
        for name, values in scores.items()
    )


def rollout_report(
    generated: GeneratedBatch, columns: Mapping[str, Column], *, weight_version: int
) -> dict[str, float]:
    """Report one generated batch under the stable `rollout/*` names.

    Args:
        generated: the batch, with its wall time.
        columns: its columns.
        weight_version: version the engines hold; a sample's staleness is the difference to the
            version that sampled it.
    """
    scores = _scores_by_rollout(generated.groups)
    # The last sibling stands for its rollout: in the shipped fan-out it holds the whole answer.
    finals = [rollout.samples[-1] for group in generated.groups for rollout in group.rollouts]
    sampled_tokens = float(sum(final.response_tokens.size for final in finals))
    # Tool tokens have version -1: nothing sampled them, so they cannot be stale.
    staleness_T = np.concatenate(
        [weight_version - final.weight_versions[final.weight_versions >= 0] for final in finals]
    )
    metrics = [
        *(
            Metric.of_moments(f"rollout/{name}", values, unit="rollout")
            for name, values in scores.items()
        ),
        Metric.of_mean("rollout/response_tokens_mean", sampled_tokens, len(finals), unit="rollout"),
        Metric.of_mean(
            "rollout/truncated_fraction",
            sum(final.truncated for final in finals),
            len(finals),
            unit="rollout",
        ),
        Metric.of_mean(
            "rollout/staleness_batches", float(staleness_T.sum()), staleness_T.size, unit="token"
        ),
        Metric.of_mean(
            "rollout/tokens_per_second", sampled_tokens, generated.seconds, unit="second"
        ),
        Metric.of_sum("rollout/samples", len(columns["total_lengths"]), unit="sample"),
        Metric.of_sum("rollout/rollouts", len(finals), unit="rollout"),
        Metric.of_sum("rollout/dropped_rollouts", generated.dropped_rollouts, unit="rollout"),
        *_nucleus_sizes(columns),
    ]
    return _present(metrics)


def _nucleus_sizes(columns: Mapping[str, Column]) -> list[Metric]:
    offsets, masks = columns.get("nucleus_offsets"), columns["loss_masks"]
    if not isinstance(offsets, RaggedArray) or not isinstance(masks, RaggedArray):
        return []
    sizes_T = np.concatenate([np.diff(item) for item in offsets])
    # A token that was sampled without a filter has no ids recorded: it would pull the mean to 0.
    counted = sizes_T[(masks.values != 0) & (sizes_T > 0)]
    return [
        Metric.of_mean("rollout/kept_set_mean", float(counted.sum()), counted.size, unit="token")
    ]


def schedule_report(planned: PlannedBatch) -> dict[str, float]:
    """Report how well the plan fills micro-batches and balances ranks and slots."""
    stats = planned.plan.stats
    values = {
        "schedule/fill": stats.fill,
        "schedule/rank_imbalance": stats.rank_imbalance,
        "schedule/slot_imbalance": stats.slot_imbalance,
    }
    return {name: value for name, value in values.items() if value is not None}


def _scores_by_rollout(groups: Sequence[PromptGroup]) -> dict[str, list[float]]:
    """Collect reward and further scores by name, each rollout once."""
    scores: dict[str, list[float]] = {}
    for rollout in chain.from_iterable(group.rollouts for group in groups):
        last = rollout.samples[-1]
        for name, value in {"reward": last.reward, **last.scores}.items():
            if value is not None:
                scores.setdefault(name, []).append(value)
    return scores


def _present(metrics: Iterable[Metric]) -> dict[str, float]:
    return {name: value for name, value in report(metrics).items() if value is not None}
