"""Numbers that belong to a rollout, such as a reward, when its samples lie on several ranks.

Every sample of a rollout carries a share of it, one over the number of its siblings in the whole
step, and contributes that share of its number. So each rollout counts once wherever its samples
are, without a collective of its own; where siblings carry different numbers, their mean counts.

Invariant, tested: the report does not depend on how samples are spread over ranks and
micro-batches, and equals that of one number per rollout.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt

from rl_metrics.aggregation.ids import Ids, id_column
from rl_metrics.arguments import FloatArray, number_array
from rl_metrics.errors import MetricsError
from rl_metrics.metric.kinds import Kind
from rl_metrics.metric.metric import Metric
from rl_metrics.metric.moments import Moments
from rl_metrics.metric.sketch import DEFAULT_RELATIVE_ERROR, QuantileSketch

__all__ = ["rollout_metric", "rollout_shares"]

_KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "last")


def rollout_shares(rollout_ids: Ids) -> FloatArray:
    """Return which share of its rollout each sample is: one over the number of its siblings.

    Args:
        rollout_ids: [N], integers or strings, equal for siblings: the WHOLE step (or any larger set
            that contains every sibling). `rl_metrics.torch.step_divisors` gives the shares where
            each rank knows its own samples only.

    Returns:
        float64 [N], above 0; those of a rollout add up to 1.

    Raises:
        MetricsError: for ids that are neither integers nor strings, or a mixture of both.

    Example:
        `["a", "a", "b"]` gives `[0.5, 0.5, 1.0]`.
    """
    rollouts = id_column(rollout_ids, None, "rollout_ids")
    return 1.0 / np.bincount(rollouts)[rollouts] if rollouts.size else np.empty(0)


def rollout_metric(
    name: str,
    values: npt.ArrayLike,
    shares: npt.ArrayLike,
    *,
    kind: Kind = "mean",
    unit: str = "rollout",
    relative_error: float = DEFAULT_RELATIVE_ERROR,
) -> Metric:
    """Return this rank's contribution to a metric in which each rollout counts once.

    Args:
        name: name in the log.
        values: [n], a number of each of this rank's samples; siblings carry that of their rollout.
        shares: [n], those of these samples, from `rollout_shares`.
        kind: any but `last`.
        unit: as in `rl_metrics.Metric`.
        relative_error: of a histogram.

    Returns:
        A record whose weight is the rank's part of the step's rollouts; "no data" without samples.
        Ranks of a context-parallel group hold the same samples: `Metric.replicated`.

    Raises:
        MetricsError: naming the metric, for values and shares of different or several dimensions,
            shares outside (0, 1], values that are no numbers, or another kind.

    Example:
        Rewards 1, 1 and 4 with shares 0.5, 0.5 and 1: the mean is 2.5, over 2 rollouts.
    """
    x, share = (
        number_array(array, f"metric {name!r}: the {what}")
        for array, what in ((values, "values"), (shares, "shares"))
    )
    if x.ndim != 1 or x.shape != share.shape:
        raise MetricsError(
            f"metric {name!r}: values of shape {x.shape} and shares of shape {share.shape}; give"
            " one of each per sample"
        )
    if not ((share > 0) & (share <= 1)).all():
        raise MetricsError(
            f"metric {name!r}: shares lie in (0, 1], one over the number of siblings; give those of"
            " rollout_shares"
        )
    if kind not in _KINDS:
        raise MetricsError(f"metric {name!r}: kind is {kind!r}; use one of {', '.join(_KINDS)}")
    if not x.size:
        return Metric.empty(name, kind, unit=unit, relative_error=relative_error)
    weight = float(share.sum())
    with np.errstate(invalid="ignore", over="ignore"):
        total = float(np.sum(x * share))
        if kind == "moments":
            mean = total / weight
            m2 = float(np.sum(share * np.square(x - mean)))
            return Metric.from_moments(name, Moments(count=weight, mean=mean, m2=m2), unit=unit)
    if kind == "histogram":
        sketch = QuantileSketch.of(x, weights=share, relative_error=relative_error)
        return Metric(
            name=name, kind=kind, numerator=total, weight=sketch.count, unit=unit, sketch=sketch
        )
    numerator = {"min": np.min, "max": np.max}.get(kind, lambda _: total)(x)
    return Metric(name=name, kind=kind, numerator=float(numerator), weight=weight, unit=unit)
