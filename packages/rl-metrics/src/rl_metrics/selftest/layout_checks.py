"""The proof that layouts do not change a number: real gloo processes, every layout.

Each layout reports its largest relative difference from the closed-form answer of a
`rl_metrics.selftest.scenario.Scenario`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist

from rl_metrics.aggregation.aggregation import AGGREGATIONS, Aggregation
from rl_metrics.aggregation.loss_scale import calculates_per_token_loss, megatron_loss_scale
from rl_metrics.arguments import count
from rl_metrics.errors import MetricsError
from rl_metrics.geometry.context_parallel import ContextParallel, Layout
from rl_metrics.geometry.packing import packed_responses
from rl_metrics.metric.rollout_report import rollout_log_metric_contribution
from rl_metrics.metric.step_report import MicroBatchMetrics
from rl_metrics.selftest.processes import run_gloo_ranks
from rl_metrics.selftest.scenario import Scenario, make_scenario
from rl_metrics.torch.gather import gather_responses
from rl_metrics.torch.reducers import loss_reducer, megatron_num_tokens
from rl_metrics.torch.reports import gather_and_reduce_log_dict, reduce_train_step_metrics
from rl_metrics.torch.slicing import slice_response
from rl_metrics.torch.whitening import masked_whiten

__all__ = ["TOLERANCE", "LayoutCheck", "check_layouts"]

TOLERANCE = 1e-6
"""Largest relative difference that passes."""

_NUM_MICRO_BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCheck:
    """What one layout and aggregation gave, beside what it must give."""

    dp_size: int
    """Data-parallel ranks."""

    cp_size: int
    """Context-parallel ranks."""

    layout: Layout
    """How sequences are cut."""

    dtype: str
    """Type of the values, `float32` or `float64`."""

    aggregation: Aggregation
    """How tokens become a loss."""

    value: float
    """The train step's reported loss."""

    expected: float
    """The closed-form loss."""

    value_difference: float
    """Relative difference of the loss, the worse of train report and rollout log."""

    gradient_difference: float
    """`||g - g'|| / ||g||`."""

    whitening_difference: float
    """Largest absolute difference of whitened values."""

    gather_is_exact: bool
    """Whether full responses came back bit for bit."""

    @property
    def worst(self) -> float:
        """The largest difference, NaN where any is; infinite when responses were not restored."""
        differences = self.value_difference, self.gradient_difference, self.whitening_difference
        # Python's max drops a NaN or keeps it by its place.
        return float(np.max(differences)) if self.gather_is_exact else math.inf

    @property
    def passes(self) -> bool:
        """Whether all differences are within `TOLERANCE` (NaN is not)."""
        return bool(self.worst <= TOLERANCE)


def check_layouts(
    *,
    max_processes: int = 4,
    seed: int = 0,
    deadline_seconds: float = 120.0,
    announce: Callable[[str], None] | None = None,
) -> list[LayoutCheck]:
    """Run one random step on every layout and return what each gave.

    Args:
        max_processes: ranks to start at most, 1 to 16.
        seed: which random step, an integer of at least 0.
        deadline_seconds: per (dp, cp), seconds.
        announce: called with one line before each (dp, cp) is run.

    Returns:
        One check per (dp, cp) in {1, 2, 4}^2 of so many ranks, smallest first, and per layout,
        dtype and aggregation.

    Raises:
        MetricsError: when `max_processes`, `seed` or `deadline_seconds` lie outside their range.
        RanksFailedError: when a rank fails or does not end in time.
    """
    most = count(max_processes, "max_processes")
    meshes = [mesh for mesh in product((1, 2, 4), repeat=2) if math.prod(mesh) <= most]
    meshes.sort(key=lambda mesh: (math.prod(mesh), mesh))
    scenario = make_scenario(seed)
    checks: list[LayoutCheck] = []
    for k, (dp_size, cp_size) in enumerate(meshes, start=1):
        if announce is not None:
            announce(
                f"mesh {k} of {len(meshes)}: dp {dp_size} x cp {cp_size}, both layouts, gloo ranks:"
                f" {dp_size * cp_size}"
            )
        ranks = run_gloo_ranks(
            partial(_check_mesh, scenario, dp_size, cp_size),
            dp_size * cp_size,
            deadline_seconds=deadline_seconds,
        )
        checks += [max(per_rank, key=_badness) for per_rank in zip(*ranks, strict=True)]
    return checks


def _badness(check: LayoutCheck) -> float:
    """Order checks of one layout by rank: NaN is worse than any number."""
    return math.inf if math.isnan(check.worst) else check.worst


def _check_mesh(
    scenario: Scenario, dp_size: int, cp_size: int, _rank: int, _size: int
) -> list[LayoutCheck]:
    """Check one mesh on this rank: both layouts, both dtypes, all aggregations."""
    cp_groups = [dist.new_group([d * cp_size + c for c in range(cp_size)]) for d in range(dp_size)]
    dp_rank, cp_rank = divmod(dist.get_rank(), cp_size)
    mine = list(range(dp_rank, scenario.num_samples, dp_size))
    checks = []
    for layout, dtype in product(get_args(Layout), (torch.float32, torch.float64)):
        cp = ContextParallel(cp_size, cp_rank, layout)
        others = _check_tensors(scenario, scenario.part(mine), cp, cp_groups[dp_rank], dtype)
        checks += [_check(scenario, mine, cp, name, dtype, *others) for name in AGGREGATIONS]
    return checks


def _local_losses(
    batch: Scenario, cp: ContextParallel, parameters: torch.Tensor, masks: list[torch.Tensor]
) -> torch.Tensor:
    """Return this rank's per-token losses of a micro-batch, NaN at masked positions."""
    owned = packed_responses(batch.total_lengths, batch.response_lengths, cp).flat_indices
    if not batch.num_samples:
        return (parameters.new_zeros(0, 2) @ parameters).square()
    features = torch.from_numpy(np.concatenate(batch.features)[owned]).to(parameters.dtype)
    is_masked = torch.cat(masks)[torch.from_numpy(owned)] == 0
    holes = torch.where(is_masked, torch.nan, 0.0).to(parameters.dtype)
    return (features @ parameters).square() + holes


def _check(
    scenario: Scenario,
    mine: list[int],
    cp: ContextParallel,
    aggregation: Aggregation,
    dtype: torch.dtype,
    whitening_difference: float,
    gather_is_exact: bool,
) -> LayoutCheck:
    """Run one step the way a Megatron trainer does and compare; `mine` are this rank's samples."""
    dp_size = dist.get_world_size() // cp.size
    parameters = torch.tensor(scenario.parameters, dtype=dtype, requires_grad=True)
    denominators = scenario.denominators(aggregation)
    units = scenario.step_units(aggregation)
    per_token = calculates_per_token_loss(aggregation)
    scale = megatron_loss_scale(
        aggregation,
        num_microbatches=_NUM_MICRO_BATCHES,
        step_units=units,
        dp_size=dp_size,
        cp_size=cp.size,
    )
    reports = []
    counted = torch.zeros((), dtype=torch.int32)
    # Dealt like cards, so that siblings part; a micro-batch may be empty, which makes it a filler.
    for samples in (mine[k::_NUM_MICRO_BATCHES] for k in range(_NUM_MICRO_BATCHES)):
        batch = scenario.part(samples)
        masks = [torch.from_numpy(mask) for mask in batch.loss_masks]
        reduced = loss_reducer(
            aggregation,
            batch.total_lengths,
            batch.response_lengths,
            masks,
            denominators=denominators[samples],
            cp=cp,
        )(_local_losses(batch, cp, parameters, masks))
        loss, num_tokens = reduced * scale, megatron_num_tokens(aggregation, masks)
        if not per_token:
            loss = loss / num_tokens.clamp(min=1) / _NUM_MICRO_BATCHES
        loss.backward()  # type: ignore[no-untyped-call]
        counted += num_tokens
        sums = {"loss": reduced.detach()}
        reports.append(MicroBatchMetrics(sums=sums, num_tokens=batch.num_tokens))
    gradient = _finalized(parameters.grad, counted if per_token else None)
    value = reduce_train_step_metrics(
        reports, aggregation=aggregation, step_units=units, cp_size=cp.size, group=None
    )["loss"]
    logged = _rollout_log(scenario, reports, aggregation, units)
    expected, slope = scenario.expected_value(aggregation), scenario.expected_gradient(aggregation)
    return LayoutCheck(
        dp_size=dp_size,
        cp_size=cp.size,
        layout=cp.layout,
        dtype=str(dtype).removeprefix("torch."),
        aggregation=aggregation,
        value=float("nan") if value is None else value,
        expected=expected,
        value_difference=float(np.max([_relative(value, expected), _relative(logged, expected)])),
        gradient_difference=float(
            np.linalg.norm(gradient.double().numpy() - slope) / np.linalg.norm(slope)
        ),
        whitening_difference=whitening_difference,
        gather_is_exact=gather_is_exact,
    )


def _finalized(grad: torch.Tensor | None, num_tokens: torch.Tensor | None) -> torch.Tensor:
    """Reduce a gradient as Megatron does: mean over ranks, or sum divided by counted tokens."""
    if grad is None:
        raise MetricsError("no gradient arrived: a reducer cut the graph")
    dist.all_reduce(grad)
    if num_tokens is None:
        return grad / dist.get_world_size()
    dist.all_reduce(num_tokens)
    return grad / num_tokens.clamp(min=1)


def _rollout_log(
    scenario: Scenario, reports: list[MicroBatchMetrics], aggregation: Aggregation, units: float
) -> float | None:
    """Return the same value through the rollout log; on ranks that do not log, the expected one."""
    record = rollout_log_metric_contribution(
        "rollout/loss",
        sum(float(report.sums["loss"]) for report in reports),
        aggregation=aggregation,
        step_tokens=scenario.num_tokens,
        step_units=units,
        group_size=dist.get_world_size(),
    )
    lines = gather_and_reduce_log_dict([record], group=None, dst=0)
    return scenario.expected_value(aggregation) if lines is None else lines["rollout/loss"]


def _check_tensors(
    scenario: Scenario,
    batch: Scenario,
    cp: ContextParallel,
    cp_group: dist.ProcessGroup,
    dtype: torch.dtype,
) -> tuple[float, bool]:
    """Whiten values over all ranks; cut and gather the responses of `batch`, this rank's part.

    Returns:
        The largest difference from whitening in one process, and whether every bit came back.
    """
    totals, responses = batch.total_lengths, batch.response_lengths
    length = -(-sum(totals) // cp.size) * cp.size
    offsets = (np.cumsum(totals) - totals).tolist()

    def pieces(full: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            slice_response(x, total, response, cp, stream_offset=offset, stream_length=length)
            for x, total, response, offset in zip(full, totals, responses, offsets, strict=True)
        ]

    full = [torch.from_numpy(value).to(dtype) for value in batch.values]
    values, masks = pieces(full), pieces([torch.from_numpy(mask) for mask in batch.loss_masks])
    restored = gather_responses(values, totals, responses, cp, group=cp_group)
    is_exact = all(torch.equal(a, b) for a, b in zip(restored, full, strict=True))
    trained = np.concatenate(scenario.values)[np.concatenate(scenario.loss_masks) != 0]
    whitened = torch.cat(masked_whiten(values, masks)).double()
    expected = (torch.cat(values).double() - trained.mean()) / np.sqrt(trained.var(ddof=1) + 1e-8)
    differences = whitened - torch.where(torch.cat(masks).ne(0), expected, 0.0)
    return float(differences.abs().max()) if differences.numel() else 0.0, is_exact


def _relative(value: float | None, expected: float) -> float:
    """Return the relative difference; infinite for no data."""
    return math.inf if value is None else abs(value - expected) / abs(expected)
