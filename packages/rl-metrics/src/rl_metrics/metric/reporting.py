"""Many metrics at once: merged by name in one process, and turned into the lines of a log.

Invariants, tested: the order of records does not matter for their values; two metrics never write
one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rl_metrics.arguments import listed
from rl_metrics.errors import MetricsError
from rl_metrics.metric.metric import Metric, check_metric

__all__ = ["listed_metrics", "merge_metrics", "report"]


def merge_metrics(metrics: Iterable[Metric] | Mapping[str, Metric]) -> dict[str, Metric]:
    """Merge records by name, in one process.

    Args:
        metrics: any number of records, those of one name of one kind and unit; or a mapping, in
            which the key is the name.

    Returns:
        name -> merged record, in order of first appearance.

    Raises:
        MetricsError: when one is no metric, or as in `Metric.merge`.
    """
    merged: dict[str, Metric] = {}
    for metric in listed_metrics(metrics, "metrics"):
        known = merged.get(metric.name)
        merged[metric.name] = metric if known is None else known.merge(metric)
    return merged


def report(metrics: Iterable[Metric] | Mapping[str, Metric]) -> dict[str, float | None]:
    """Return what goes to a log for many metrics: see `Metric.report`.

    Args:
        metrics: records of different names, merged before: a list, or the mapping that
            `merge_metrics` gives.

    Returns:
        name -> value, None for no data.

    Raises:
        MetricsError: when one is no metric, or two report under one name.
    """
    lines: dict[str, float | None] = {}
    for metric in listed_metrics(metrics, "metrics"):
        for name, value in metric.report().items():
            if name in lines:
                raise MetricsError(
                    f"two metrics report under the name {name!r}; rename one of them"
                )
            lines[name] = value
    return lines


def listed_metrics(metrics: Iterable[Metric] | Mapping[str, Metric], what: str) -> list[Metric]:
    """Return checked records as a list; those of a mapping are renamed to their keys.

    Args:
        metrics: records, or a mapping from names to records. Gone through once.
        what: subject of the error where it is neither.

    Raises:
        MetricsError: for anything but a list or a mapping of records, naming the key where there is
            one.
    """
    if isinstance(metrics, Mapping):
        return [
            replace(check_metric(metric, str(name)), name=name) for name, metric in metrics.items()
        ]
    return [check_metric(metric, "a metric") for metric in listed(metrics, what)]
