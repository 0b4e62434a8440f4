"""What a float32 engine may answer where float64 is the judge: near ties may fall on either side.

Two ids whose probabilities differ by rounding only change places on another processor, and so does
an id whose probability, or the mass before it, lies within rounding of a filter's boundary.

Axes: V vocabulary, N ids of a set.

Invariant: every nucleus of a distribution within rounding of `probs` is accepted, whatever its
order; a set that differs from `probs`' own in any other id is refused.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "ENGINE_ROUNDING",
    "FLOAT32_ROUNDING",
    "check_nucleus",
    "check_order",
    "check_same_tokens",
]

ENGINE_ROUNDING = 1e-5
"""Relative error of probabilities out of a small model in float32, and absolute error of masses."""
FLOAT32_ROUNDING = 1e-6
"""The same of sums and products of probabilities that float32 holds exactly."""
_NOTHING = 1e-30
"""Below this a float32 softmax may give 0, and an id of probability 0 is kept by nobody."""

Floats = npt.NDArray[np.float64]


def check_nucleus(
    found: Sequence[int] | npt.NDArray[Any],
    probs: Floats,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    rounding: float,
) -> None:
    """Assert that `found` is a nucleus of `probs`, but for ids within rounding of the boundary.

    Args:
        found: ids [N], any order.
        probs: float64 [V].
        top_k: at least 1; None = all.
        top_p: in (0, 1].
        min_p: in [0, 1], relative to the highest probability.
        rounding: relative error of a probability, and absolute error of a mass.
    """
    ids_N = np.asarray(found, np.int64)
    assert ids_N.size > 0, "at least one id is always kept"
    assert np.unique(ids_N).size == ids_N.size, f"an id occurs twice: {ids_N.tolist()}"
    assert ids_N.min() >= 0 and ids_N.max() < probs.size, "an id lies outside the vocabulary"
    above, below = 1.0 + rounding, 1.0 - rounding
    least = min_p * probs.max()
    kept, dropped = probs[ids_N], np.delete(probs, ids_N)
    last, following = kept.min(), dropped.max(initial=0.0)
    assert last * above >= following * below, (
        f"an id of probability {following} is missing, one of {last} is kept"
    )
    if ids_N.size > 1:  # The first id is kept whatever the filters say.
        assert top_k is None or ids_N.size <= top_k, f"{ids_N.size} ids at top_k {top_k}"
        assert top_p == 1.0 or kept.sum() - last <= top_p + rounding, (
            f"mass {kept.sum() - last} before the last id, top_p {top_p}"
        )
        assert last * above >= least * below, f"probability {last} kept, min_p needs {least}"
    barred = (
        following <= _NOTHING
        or ids_N.size == top_k
        or (top_p < 1.0 and kept.sum() > top_p - rounding)
        or following * below < least * above
    )
    assert barred, f"an id of probability {following} is missing after a mass of {kept.sum()}"


def check_order(found: Sequence[int], probs: Floats, *, rounding: float) -> None:
    """Assert that `found` descends in probability, but for near-equal neighbours."""
    ranked = probs[np.asarray(found, np.int64)]
    # Against the lowest so far: a chain of near ties must not climb.
    lowest = np.minimum.accumulate(ranked)
    assert (ranked <= lowest * (1.0 + rounding)).all(), f"not in descending order: {ranked}"


def check_same_tokens(
    left: Sequence[int], right: Sequence[int], probs_TV: Floats, *, rounding: float
) -> None:
    """Assert that two greedy answers agree up to the first near tie, after which all may differ.

    Args:
        left: tokens [T].
        right: tokens [T].
        probs_TV: float64 [T, V], what `left` was chosen from.
        rounding: relative error of a probability.
    """
    assert len(left) == len(right)
    different = np.flatnonzero(np.asarray(left) != np.asarray(right))
    for t in different[:1]:
        one, other = probs_TV[t, left[t]], probs_TV[t, right[t]]
        assert abs(one - other) <= rounding * max(one, other), (
            f"token {t}: {left[t]} of probability {one}, {right[t]} of {other}"
        )
