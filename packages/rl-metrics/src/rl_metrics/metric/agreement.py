"""What the ranks of a group must agree on before their numbers may be added.

Invariant, tested: every rank of the group builds the same message of a disagreement from the same
reports.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["RankReport", "difference", "disagreement"]


_MOST_NAMES = 10
"""Names in one error; the count says how many there are besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank was about to reduce.

    `RankReport(failure=None, settings={"dst": "None"}, metrics=("loss (mean, token)",))`.
    """

    failure: str | None
    """Why the rank could not prepare its metrics; None when it could."""

    settings: dict[str, str]
    """What it wants to do with them, by name: for a train step aggregation, units and cp size."""

    metrics: tuple[str, ...]
    """Name, kind and unit of each metric, as `rl_metrics.Metric.describe` gives them."""


def difference(reference: Iterable[str], given: Iterable[str]) -> str:
    """Say what `given` lacks of `reference` and what it adds; empty when they are equal.

    Told are the first ten names of each. Names that read alike (one with an accented letter, one
    with a letter and an accent) are written in ASCII.

    Example:
        `difference(["a", "b"], ["b", "c"])` is `"lacks 'a' and adds 'c'"`, `difference(["a"], ["a",
        "c"])` is `"adds 'c'"`.
    """
    expected, found = set(reference), set(given)
    lacking, adding = sorted(expected - found), sorted(found - expected)
    alike = {_normal(name) for name in lacking} & {_normal(name) for name in adding}
    return " and ".join(
        f"{verb} {_told(names, alike)}"
        for verb, names in (("lacks", lacking), ("adds", adding))
        if names
    )


def _normal(name: str) -> str:
    """Return the form in which names that read alike are equal."""
    return unicodedata.normalize("NFKC", name)


def _told(names: list[str], alike: set[str]) -> str:
    """Return the first names and how many more there are, those of `alike` in ASCII."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (
        ", ".join(
            ascii(name) if _normal(name) in alike else repr(name) for name in names[:_MOST_NAMES]
        )
        + more
    )


def disagreement(reports: Sequence[RankReport]) -> str:
    """Return one message for all ranks: who failed, else which settings differ, else which metrics.

    Args:
        reports: one per rank, in rank order.
    """
    failed = [
        f"rank {rank} could not prepare its metrics: {report.failure}"
        for rank, report in enumerate(reports)
        if report.failure is not None
    ]
    if failed:
        return "; ".join(failed)
    settings = {
        name: [report.settings.get(name, "nothing") for report in reports]
        for name in sorted({name for report in reports for name in report.settings})
    }
    lines = [
        f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
        for name, values in settings.items()
        if len(set(values)) > 1
    ]
    if lines:
        return (
            f"ranks of the group disagree: {'; '.join(lines)}. Pass the same values on every rank"
        )
    differences = (difference(reports[0].metrics, report.metrics) for report in reports)
    told = "; ".join(
        f"rank {rank} {text} compared with rank 0" for rank, text in enumerate(differences) if text
    )
    told = told or "their descriptions read alike, but names and units are parted differently"
    return (
        f"ranks of the group report different metrics: {told}. Report the same metrics everywhere;"
        " a rank without data passes Metric.empty"
    )
