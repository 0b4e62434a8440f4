"""The kinds of metrics: what the fields of a record mean under each.

| kind | numerator | weight | value |
| --- | --- | --- | --- |
| sum | the sum | contributions | numerator |
| mean | weighted sum | sum of weights | numerator / weight |
| min, max | the extreme | values seen | numerator |
| moments | sum | values seen | numerator / weight; the report adds the standard deviation |
| last | sum of the values of the newest stamp | how many there are | numerator / weight |
| histogram | sum | values seen | median; the report adds p90 and p99 |
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from rl_metrics.errors import MetricsError

__all__ = ["KINDS", "RULES", "Kind", "KindRule", "check_identity", "numbers_problem"]

Kind = Literal["sum", "mean", "min", "max", "moments", "last", "histogram"]
"""How records of one metric merge. Declared by the value, never read from the name."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRule:
    """How the numerator of one kind is read."""

    is_divided: bool = False
    """Whether the value is the numerator divided by the weight."""

    is_extreme: bool = False
    """Whether the numerator is one of the values, so that shares of it are not quotients."""

    combine: Callable[[float, float], float] = operator.add
    """The numerator of two records together."""

    empty: float = 0.0
    """The numerator of a record without data: the neutral element of merging."""


def _unless_nan(extreme: Callable[..., float]) -> Callable[[float, float], float]:
    """Return an extreme of two numbers that is NaN if either is; Python's goes by their order."""
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else extreme(a, b)


RULES: dict[Kind, KindRule] = {
    "sum": KindRule(),
    "mean": KindRule(is_divided=True),
    "min": KindRule(is_extreme=True, combine=_unless_nan(min), empty=math.inf),
    "max": KindRule(is_extreme=True, combine=_unless_nan(max), empty=-math.inf),
    "moments": KindRule(is_divided=True),
    "last": KindRule(is_divided=True),
    "histogram": KindRule(),
}


def check_identity(name: object, kind: object, unit: object) -> None:
    """Check what must agree for records to merge.

    Args:
        name: a string that is not empty.
        kind: one of `KINDS`.
        unit: a string.

    Raises:
        MetricsError: for anything else, and for text that UTF-8 cannot hold (a lone surrogate): no
            log and no other rank could read it.
    """
    if not isinstance(name, str) or not name:
        raise MetricsError(f"a metric needs a name, got {name!r}; give a string that is not empty")
    if not isinstance(kind, str) or kind not in KINDS:
        raise MetricsError(f"metric {name!r}: kind is {kind!r}; use one of {', '.join(KINDS)}")
    if not isinstance(unit, str):
        raise MetricsError(f"metric {name!r}: unit is {unit!r}; give a string, '' for none")
    for field, text in (("name", name), ("unit", unit)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise MetricsError(
                f"metric {name!r}: {field} is {text!a}, which UTF-8 cannot hold ({error.reason});"
                " give text without lone surrogates"
            ) from None


def numbers_problem(
    kind: Kind,
    *,
    numerator: float,
    weight: float,
    m2: float,
    stamp: float,
    sketch_weight: float | None,
) -> str:
    """Return what contradicts in the numbers of one record, in one sentence, or the empty string.

    Args:
        kind: one of `KINDS`.
        numerator: see `rl_metrics.Metric`, like the rest.
        weight: finite and not negative; 0 says that there is no data.
        m2: a sum of squares, of `moments` only.
        stamp: a finite number, of `last` only.
        sketch_weight: what the sketch holds, of `histogram` only; else None.
    """
    if not 0 <= weight < math.inf:
        return f"weight is {weight}; give a finite number that is not negative, 0 for no data"
    if not weight and numerator != RULES[kind].empty:
        return (
            f"numerator is {numerator} under weight 0, which says that there is no data; give its"
            " weight, or Metric.empty where there is none"
        )
    if m2 < 0 or (m2 != 0 and (kind != "moments" or not weight)):
        return (
            f"m2 is {m2}; a sum of squares is not negative, and 0 without data and for all kinds"
            " but 'moments'"
        )
    if not math.isfinite(stamp) or (stamp != 0 and kind != "last"):
        return (
            f"stamp is {stamp}; give the finite number of the step the value belongs to, and 0 for"
            " all kinds but 'last'"
        )
    # Shares of a value that several ranks hold may differ from the sketch's weight by rounding.
    if sketch_weight is not None and not math.isclose(sketch_weight, weight, rel_tol=1e-9):
        return (
            f"weight is {weight} but the sketch holds {sketch_weight}; give the sketch of the"
            " values that were weighed"
        )
    return ""
