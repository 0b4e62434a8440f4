"""Many metrics at once: merged by name in one process, and turned into the lines of a log.

Layer: numpy-free, above ``metric``. Invariants, tested: the order of records does not matter for their values; two metrics never write one line.
"""

from __future__ import annotations

from collections.abc import Iterable

from rl_metrics.arguments import listed
from rl_metrics.errors import MetricsError
from rl_metrics.metric import Metric, check_metric

__all__ = ["merge_metrics", "report"]


def merge_metrics(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Merge records by name, in one process.

    Args:
        metrics: any number of records, those of one name of one kind and unit.

    Returns:
        name -> merged record, in order of first appearance.

    Raises:
        MetricsError: when one is no metric, or as in :meth:`Metric.merge`.
    """
    merged: dict[str, Metric] = {}
    for metric in _listed(metrics):
        known = merged.get(metric.name)
        merged[metric.name] = metric if known is None else known.merge(metric)
    return merged


def report(metrics: Iterable[Metric]) -> dict[str, float | None]:
    """Return what goes to a log for many metrics: see :meth:`Metric.report`.

    Args:
        metrics: records of different names, merged before.

    Returns:
        name -> value, None for no data.

    Raises:
        MetricsError: when one is no metric, or two report under one name.
    """
    lines: dict[str, float | None] = {}
    for metric in _listed(metrics):
        for name, value in metric.report().items():
            if name in lines:
                raise MetricsError(f"two metrics report under the name {name!r}; rename one of them")
            lines[name] = value
    return lines


def _listed(metrics: Iterable[Metric]) -> list[Metric]:
    """Return the records of an iterable, after checking that they are some."""
    return [check_metric(metric, "a metric") for metric in listed(metrics, "metrics")]
