"""Compares what a float32 engine chose with float64 probabilities, up to rounding.

Which of two ids with almost the same probability comes first depends on the processor: on the order
of its sums, on fused instructions. A comparison that lets no such pair change places is red on the
next machine; one that lets more through is worth nothing.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["is_argmax", "is_top_p_nucleus"]


def is_top_p_nucleus(
    ids: npt.ArrayLike,
    probs_V: npt.NDArray[np.float64],
    top_p: float,
    *,
    rounding: float = 1e-4,
) -> bool:
    """Whether `ids` is the nucleus of some probabilities within `rounding` of these.

    An id whose mass before it is certainly above or below `top_p` has no choice; one whose
    probability ties with the boundary has. How many ids there are follows from the mass alone.

    Args:
        ids: the ids in question, in any order.
        probs_V: float64 [V].
        top_p: nucleus mass.
        rounding: relative error of a probability, and absolute error of a sum of them.
    """
    chosen_V = np.zeros(probs_V.size, np.bool_)
    chosen_V[np.asarray(ids)] = True
    # [V, V], rows: the id in question; columns: the ids that are before it, or may be.
    before_VV = probs_V[None, :] > probs_V[:, None] * (1 + rounding)
    maybe_VV = probs_V[None, :] >= probs_V[:, None] * (1 - rounding)
    np.fill_diagonal(maybe_VV, val=False)
    must_V = maybe_VV @ probs_V <= top_p - rounding
    may_V = before_VV @ probs_V <= top_p + rounding
    ranked = np.sort(probs_V)[::-1]
    mass_before = np.cumsum(ranked) - ranked
    fewest = max(1, int((mass_before <= top_p - rounding).sum()))
    most = int((mass_before <= top_p + rounding).sum())
    return bool(
        (chosen_V | ~must_V).all()
        and (may_V | ~chosen_V).all()
        and fewest <= chosen_V.sum() <= most
    )


def is_argmax(
    ids_T: npt.NDArray[np.int64], logits_TV: npt.NDArray[np.float64], *, rounding: float = 1e-3
) -> bool:
    """Whether each id has the largest logit of its row, or one within `rounding` of it."""
    taken_T = logits_TV[np.arange(ids_T.size), ids_T]
    return bool((logits_TV.max(axis=1) - taken_T <= rounding).all())
