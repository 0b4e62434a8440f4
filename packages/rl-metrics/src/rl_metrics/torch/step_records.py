"""The records of one rank's micro-batches, whether their numbers are on the host or on a device.

Numbers on the host are checked before anything travels. Those on a device cannot be looked at
without waiting for it: whether they contradict one another is worked out there and travels as one
more count, so that all ranks learn of it together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl_metrics.arguments import number
from rl_metrics.errors import MetricsError
from rl_metrics.metric.metric import Metric
from rl_metrics.metric.reporting import merge_metrics
from rl_metrics.metric.step_report import (
    CONTRADICTIONS,
    DIAGNOSTIC,
    REDUCER_OUTPUT,
    TRAINED_TOKENS,
    MicroBatchMetrics,
    check_step_names,
    check_step_numbers,
    step_contributions,
)
from rl_metrics.torch.tensor_metrics import TensorMetric, is_scalar

__all__ = ["found_contradiction", "step_records"]


def step_records(batches: Sequence[MicroBatchMetrics]) -> list[Metric | TensorMetric]:
    """Return what one rank's micro-batches contribute to the report of the step.

    Args:
        batches: the rank's micro-batches.

    Returns:
        The records of `rl_metrics.metric.step_report.step_contributions`; where numbers lie on a
        device, one `TensorMetric` for each number instead.

    Raises:
        KeyAgreementError: when a micro-batch reports other names than the first.
        MetricsError: for what is no single number, and for numbers on the host that contradict.
    """
    values = [
        {what: value if is_scalar(value) else number(value, what) for what, value in named}
        for named in (_named(batch, k) for k, batch in enumerate(batches))
    ]
    sums, diagnostics = [batch.sums for batch in batches], [batch.diagnostics for batch in batches]
    extra = [batch.metrics for batch in batches]
    if not any(is_scalar(value) for batch in values for value in batch.values()):
        tokens = [batch.num_tokens for batch in batches]
        return [*step_contributions(sums, tokens, extra, diagnostics)]  # type: ignore[arg-type]
    check_step_names(sums, diagnostics, extra)
    further = merge_metrics([metric for metrics in extra for metric in metrics])
    return [
        *(record for k, batch in enumerate(batches) for record in _records_on_device(batch, k)),
        *further.values(),
    ]


def found_contradiction(batches: Sequence[MicroBatchMetrics]) -> MetricsError | None:
    """Return what is wrong with this rank's numbers, read from the device; None for nothing."""
    sums, diagnostics = [batch.sums for batch in batches], [batch.diagnostics for batch in batches]
    try:
        check_step_numbers(sums, [batch.num_tokens for batch in batches], diagnostics)
    except MetricsError as error:
        return error
    return None


def _named(batch: MicroBatchMetrics, k: int) -> Iterator[tuple[str, Any]]:
    """Name every number of micro-batch `k`, for errors."""
    for name, value in batch.sums.items():
        yield f"micro-batch {k}: {name!r}", value
    for name, (numerator, weight) in batch.diagnostics.items():
        yield f"micro-batch {k}: diagnostic {name!r}: the numerator", numerator
        yield f"micro-batch {k}: diagnostic {name!r}: the weight", weight
    yield f"micro-batch {k}: num_tokens", batch.num_tokens


def _records_on_device(batch: MicroBatchMetrics, k: int) -> Iterator[TensorMetric]:
    """Return one record per number of a micro-batch, and how often its numbers contradict."""
    tokens: Any = batch.num_tokens
    numbers: list[tuple[str, Any]] = list(batch.sums.items())
    pairs: list[tuple[str, Any]] = list(batch.diagnostics.items())
    # What can be looked at now is; tokens on a device say nothing yet about sums on the host.
    on_host = not is_scalar(tokens)
    check_step_numbers(
        [{name: value for name, value in numbers if on_host and not is_scalar(value)}],
        [tokens if on_host else 1],
        [{name: (0.0 if is_scalar(a) else a, b) for name, (a, b) in pairs if not is_scalar(b)}],
        first=k,
    )
    wrong = [
        *_wrong(tokens, [value for _, value in numbers], whole=True),
        *(flag for _, (numerator, weight) in pairs for flag in _wrong(weight, [numerator])),
    ]
    for name, value in numbers:
        yield TensorMetric(name=name, kind="sum", numerator=value, unit=REDUCER_OUTPUT)
    for name, (numerator, weight) in pairs:
        yield TensorMetric(
            name=name, kind="mean", numerator=numerator, weight=weight, unit=DIAGNOSTIC
        )
    yield TensorMetric(name=TRAINED_TOKENS, kind="sum", numerator=tokens, unit="token")
    yield TensorMetric(name=CONTRADICTIONS, kind="sum", numerator=0.0)
    for flag in wrong:
        yield TensorMetric(name=CONTRADICTIONS, kind="sum", numerator=flag)


def _wrong(
    weight: Any, numerators: Sequence[Any], *, whole: bool = False
) -> Iterator[torch.Tensor]:
    """Return flags on the device: the weight is none, or is 0 and a numerator is not.

    Nothing for what `check_step_numbers` has seen on the host.
    """
    if is_scalar(weight):
        held = weight.detach().to(torch.float64)
        fits = torch.isfinite(held) & (held >= 0)
        yield ~(fits & (held == held.floor())) if whole else ~fits
        for numerator in numerators:
            value = numerator.detach() if is_scalar(numerator) else float(numerator)
            # A copy to the host that is not waited for would be read before it arrives.
            nonzero = torch.as_tensor(value != 0)
            yield (held == 0) & nonzero.to(held.device, non_blocking=held.device.type != "cpu")
    elif not float(weight):
        yield from (numerator.detach() != 0 for numerator in numerators if is_scalar(numerator))
