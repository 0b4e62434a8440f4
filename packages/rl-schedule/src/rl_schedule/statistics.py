"""How good a plan is: what "fill", "rank imbalance" and "slot imbalance" mean, per step and in all.

Invariants: both imbalances are >= 1 and 1 is perfect; slot imbalance >= rank imbalance; the bounds
are never above the values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from rl_schedule.arrays import IntArray

__all__ = ["ScheduleStats", "StepStats", "rank_imbalance", "slot_imbalance", "summarize"]

_HUGE = 2.0**900
"""Above it, sums of costs could leave float64; a power of two, so that division is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of one optimizer step. Costs are those of the request's cost model."""

    num_rollouts: int
    """Rollouts of the step."""
    num_samples: int
    """Samples of the step."""
    num_tokens: int
    """Tokens of the step, padding included."""
    micro_batches: int
    """Micro-batches per rank."""
    micro_batch_bound: int
    """No plan has fewer micro-batches per rank: the packing bound, rounded up to the alignment."""
    fillers: int
    """Micro-batches without samples, over all ranks."""
    fill: float | None
    """Tokens over (micro-batches * cap); None under static packing."""
    rank_imbalance: float
    """Cost of the costliest rank over the mean: what one synchronisation per step waits for."""
    rank_bound: float
    """No plan with this many micro-batches has a lower rank imbalance."""
    slot_imbalance: float
    """Sum over slots of the costliest micro-batch, over the mean rank cost.

    What one synchronisation per micro-batch waits for.
    """
    slot_bound: float
    """No plan with this many micro-batches and this rank imbalance has a lower slot imbalance."""
    rank_slack: float
    """Slack in use, a fraction; 0 unless asked for."""
    path: str
    """Which algorithms made the step, for example `lpt` or `first_fit`."""
    mean_rank_cost: float
    """Cost of all samples over the ranks, in the model's unit: the step's weight in the summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStats:
    """Figures of the whole plan.

    Imbalances are weighted by the steps' cost, so 1.02 means 2 % of the compute time lost.
    """

    fill: float | None
    """As in `StepStats`, over all steps."""
    rank_imbalance: float
    """As in `StepStats`, over all steps."""
    rank_bound: float
    """As in `StepStats`, over all steps."""
    slot_imbalance: float
    """As in `StepStats`, over all steps."""
    slot_bound: float
    """As in `StepStats`, over all steps."""
    micro_batches: int
    """Micro-batches per rank, over all steps."""
    micro_batch_bound: int
    """As in `StepStats`, over all steps."""
    wall_seconds: float
    """Time to build the plan; the only figure that differs between equal plans."""
    steps: tuple[StepStats, ...]
    """One entry per step."""

    def to_document(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {**asdict(self), "steps": [asdict(step) for step in self.steps]}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "ScheduleStats":
        """Rebuild the figures from a checked document; keys of a newer minor are left out."""
        figures = {item.name: document[item.name] for item in fields(cls)}
        figures["steps"] = tuple(
            StepStats(**{item.name: step[item.name] for item in fields(StepStats)})
            for step in document["steps"]
        )
        return cls(**figures)


def rank_imbalance(bin_costs: IntArray) -> float:
    """Return max over ranks of the cost, over the mean; 1.0 for no work.

    Example: costs [[3, 1], [1, 1]], int64 [ranks, slots], give 4 / 3.
    """
    total = int(bin_costs.sum())
    return 1.0 if total == 0 else int(bin_costs.sum(axis=1).max()) * bin_costs.shape[0] / total


def slot_imbalance(bin_costs: IntArray) -> float:
    """Return the sum over slots of the costliest micro-batch, over the mean; 1.0 for no work.

    Example: costs [[3, 1], [1, 3]], int64 [ranks, slots], give (3 + 3) / 4 = 1.5, although both
    ranks have 4.
    """
    total = int(bin_costs.sum())
    return 1.0 if total == 0 else int(bin_costs.max(axis=0).sum()) * bin_costs.shape[0] / total


def summarize(
    steps: Sequence[StepStats], *, token_cap: int | None, dp_size: int, wall_seconds: float
) -> ScheduleStats:
    """Combine steps into the figures of the plan."""
    weights = np.array([step.mean_rank_cost for step in steps])
    if weights.max(initial=0.0) > _HUGE:
        # Only ratios matter; sums of these could overflow.
        weights = weights / _HUGE
    total = float(weights.sum())

    def mean(values: list[float]) -> float:
        return float(np.dot(weights, values)) / total if total else 1.0

    micro_batches = sum(step.micro_batches for step in steps)
    capacity = micro_batches * dp_size * (token_cap or 0)
    return ScheduleStats(
        fill=sum(step.num_tokens for step in steps) / capacity if capacity else None,
        rank_imbalance=mean([step.rank_imbalance for step in steps]),
        rank_bound=mean([step.rank_bound for step in steps]),
        slot_imbalance=mean([step.slot_imbalance for step in steps]),
        slot_bound=mean([step.slot_bound for step in steps]),
        micro_batches=micro_batches,
        micro_batch_bound=sum(step.micro_batch_bound for step in steps),
        wall_seconds=wall_seconds,
        steps=tuple(steps),
    )
