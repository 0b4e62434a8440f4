"""Laws of the judge of float32 engines: rounding passes, everything else does not."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from stubs.near_ties import (
    ENGINE_ROUNDING,
    check_nucleus,
    check_order,
    check_same_tokens,
)

from rl_topp.reference import nucleus, softmax

Floats = npt.NDArray[np.float64]
Filters = dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Floats, Filters]:
    """Draw logits with pairs that differ by rounding only, and a top-p that may be a boundary."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(size=draw(st.integers(2, 60))) * draw(st.sampled_from([0.1, 1.0, 3.0, 8.0]))
    if draw(st.booleans()):
        logits = np.concatenate([logits, logits + rng.normal(size=logits.size) * 1e-7])
    probs = softmax(rng.permutation(logits))
    top_p = draw(st.sampled_from([0.3, 0.8, 0.95, 1.0]))
    if draw(st.booleans()):  # Exactly the mass before some id.
        mass = np.cumsum(np.sort(probs)[::-1])
        top_p = float(min(1.0, mass[draw(st.integers(0, mass.size - 1))]))
    filters = {
        "top_k": draw(st.sampled_from([None, 1, 3, 20])),
        "top_p": top_p,
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.05])),
    }
    return probs, filters


def check(found: Any, probs: Floats, filters: Filters) -> None:
    check_nucleus(found, probs, **filters, rounding=ENGINE_ROUNDING)


@given(cases(), st.integers(0, 2**32 - 1))
def test_the_nucleus_of_every_distribution_within_rounding_passes(
    case: tuple[Floats, Filters], seed: int
) -> None:
    probs, filters = case
    noise = 1 + 1e-6 * np.random.default_rng(seed).uniform(-1, 1, probs.size)
    for near in (probs, probs * noise, probs.astype(np.float32).astype(np.float64)):
        check(nucleus(near, **filters), probs, filters)


@given(cases())
def test_a_set_without_one_of_its_ids_is_refused(case: tuple[Floats, Filters]) -> None:
    probs, filters = case
    ids = nucleus(probs, **filters)
    assume(ids.size > 1)
    first_but_clear = probs[ids[0]] > 1.001 * probs[ids[-1]]
    assume(first_but_clear)
    with pytest.raises(AssertionError):
        check(ids[1:], probs, filters)


@given(cases(), st.data())
def test_a_set_with_one_id_more_is_refused(
    case: tuple[Floats, Filters], data: st.DataObject
) -> None:
    probs, filters = case
    ids = nucleus(probs, **filters)
    # Well behind the boundary: neither like the last kept id, nor the next one.
    outside = np.setdiff1d(np.flatnonzero(probs < 0.99 * probs[ids].min()), ids)
    assume(outside.size > 1)
    outside = outside[np.argsort(probs[outside])]
    assume(probs[outside[0]] < 0.99 * probs[outside[-1]])
    with pytest.raises(AssertionError):
        check([*ids, outside[0]], probs, filters)
    with pytest.raises(AssertionError):
        check([*ids[:-1], outside[data.draw(st.integers(0, outside.size - 1))]], probs, filters)


def test_a_really_wrong_set_is_refused_by_name() -> None:
    probs = np.array([0.5, 0.3, 0.1, 0.06, 0.04])
    check([2, 0, 1], probs, {"top_p": 0.85})
    for wrong, words in (
        ([0, 1], "0.1 is missing after a mass of 0.8"),
        ([0, 1, 2, 3], "before the last id"),
        ([0, 1, 3], "0.1 is missing, one of 0.06"),
        ([0, 1, 1], "twice"),
        ([], "at least one"),
        ([0, 1, 5], "outside"),
    ):
        with pytest.raises(AssertionError, match=words):
            check(wrong, probs, {"top_p": 0.85})
    with pytest.raises(AssertionError, match="3 ids at top_k 2"):
        check([0, 1, 2], probs, {"top_k": 2})
    with pytest.raises(AssertionError, match="min_p needs"):
        check([0, 1, 2], probs, {"min_p": 0.3})


def test_ids_on_the_boundary_may_fall_on_either_side() -> None:
    """The mass before id 1 is top_p to rounding; ids 2 and 3 are equal, and one of them fits."""
    check([0], np.array([0.5, 0.3, 0.2]), {"top_p": 0.5 - 1e-7})
    check([0, 1], np.array([0.5, 0.3, 0.2]), {"top_p": 0.5 - 1e-7})
    tied = np.array([0.4, 0.3, 0.15, 0.15])
    check([0, 1, 3], tied, {"top_k": 3})
    check([0, 1, 2], tied, {"top_k": 3})
    with pytest.raises(AssertionError):
        check([0, 1, 2, 3], tied, {"top_k": 3})


def test_orders_may_differ_among_near_equal_probabilities_only() -> None:
    probs = np.array([0.5, 0.2, 0.2 + 1e-8, 0.1])
    for order in ([0, 1, 2, 3], [0, 2, 1, 3]):
        check_order(order, probs, rounding=ENGINE_ROUNDING)
    for order in ([1, 0, 2, 3], [0, 1, 3, 2]):
        with pytest.raises(AssertionError, match="descending"):
            check_order(order, probs, rounding=ENGINE_ROUNDING)


def test_greedy_answers_may_part_at_a_near_tie_only() -> None:
    probs = np.array([[0.6, 0.3, 0.1], [0.45, 0.45 + 1e-8, 0.1], [0.6, 0.3, 0.1]])
    check_same_tokens([0, 0, 0], [0, 1, 1], probs, rounding=ENGINE_ROUNDING)
    for other in ([1, 0, 0], [0, 2, 0]):
        with pytest.raises(AssertionError, match="of probability"):
            check_same_tokens([0, 0, 0], other, probs, rounding=ENGINE_ROUNDING)
