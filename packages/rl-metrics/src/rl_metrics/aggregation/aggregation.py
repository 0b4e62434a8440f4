"""The five ways to make one loss out of many tokens, and the checks they share.

| aggregation | loss of a step | denominator `D_i` | step units `U` |
| --- | --- | --- | --- |
| token_mean | mean over trained tokens | 1 | trained tokens |
| sample_mean | mean over samples of their token mean | own mask sum | samples |
| rollout_mean | mean over rollouts of their token mean | mask sum over all siblings | rollouts |
| prompt_mean | mean over groups of their token mean | mask sum over the group | prompt groups |
| constant | sum over trained tokens / U | 1 | the constant |

Each is `(1 / U) sum_i (sum_t m_it x_it) / D_i` over tokens `t` of samples `i`, with masks `m`: a
plain sum once `D` and `U` of the whole step are known, so no split and no layout can change it.
"""

from __future__ import annotations

import math
from typing import Literal, SupportsFloat, get_args

from rl_metrics.arguments import number
from rl_metrics.errors import MetricsError

__all__ = ["AGGREGATIONS", "Aggregation", "check_aggregation", "check_step_units"]

Aggregation = Literal["token_mean", "sample_mean", "rollout_mean", "prompt_mean", "constant"]
"""How the tokens of a step become one loss.

`prompt_mean` is the formula of the DAPO paper (arXiv:2503.14476, eq. 8, taken per prompt),
`constant` that of Dr. GRPO (arXiv:2503.20783).
"""

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
"""All aggregations, in the order of the table above."""


def check_aggregation(aggregation: str) -> None:
    """Check the name of an aggregation.

    Raises:
        MetricsError: unless it is one of `AGGREGATIONS`.
    """
    given: object = aggregation
    if not isinstance(given, str) or given not in AGGREGATIONS:
        raise MetricsError(
            f"unknown loss aggregation {aggregation!r}; use one of {', '.join(AGGREGATIONS)}"
        )


def check_step_units(aggregation: Aggregation, step_units: SupportsFloat | None) -> float:
    """Return the step's units as a float.

    Args:
        aggregation: one of the five.
        step_units: samples, rollouts, prompt groups or trained tokens of the whole step, or the
            constant divisor.

    Raises:
        MetricsError: unless it is a finite number above 0.
    """
    units = math.nan if step_units is None else number(step_units, "step_units")
    if not 0 < units < math.inf:
        wanted = {
            "token_mean": "trained tokens",
            "sample_mean": "samples",
            "rollout_mean": "rollouts",
            "prompt_mean": "prompt groups",
            "constant": "the constant divisor",
        }
        raise MetricsError(
            f"step_units is {step_units!r}; {aggregation} needs a positive number:"
            f" {wanted[aggregation]} of the whole step"
        )
    return units
