"""Laws of the comparison with a float32 engine: rounding passes, a wrong choice never does."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import is_argmax, is_top_p_nucleus

from rl_topp.reference import nucleus, softmax

VOCAB_SIZE = 85
TOP_P = 0.9


def _probs(rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A random distribution in which every fourth id ties with its neighbour up to 1e-7."""
    logits = rng.normal(0.0, rng.uniform(0.2, 3.0), VOCAB_SIZE)
    logits[1::4] = logits[0:-1:4] + rng.normal(0.0, 1e-7, logits[1::4].size)
    return softmax(logits, temperature=1.0)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_what_twenty_random_models_choose_in_float32_is_let_through(seed: int) -> None:
    rng = np.random.default_rng(seed)
    probs_V = _probs(rng)
    noisy_V = (probs_V * (1 + rng.normal(0.0, 1e-6, VOCAB_SIZE))).astype(np.float32)
    order = np.argsort(-noisy_V, kind="stable")
    ranked = noisy_V[order]
    in_float32 = order[np.cumsum(ranked, dtype=np.float32) - ranked <= np.float32(TOP_P)]
    assert is_top_p_nucleus(in_float32, probs_V, TOP_P)
    assert is_top_p_nucleus(nucleus(probs_V, top_p=TOP_P), probs_V, TOP_P)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_a_really_wrong_nucleus_is_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    probs_V = _probs(rng)
    right = nucleus(probs_V, top_p=TOP_P)
    left_out = np.setdiff1d(np.arange(VOCAB_SIZE), right)
    clearly_in = right[probs_V[right] > 1.01 * probs_V[right[-1]]]
    clearly_out = left_out[probs_V[left_out] < 0.99 * probs_V[left_out].max(initial=0.0)]
    for missing in clearly_in[:3]:
        assert not is_top_p_nucleus(np.setdiff1d(right, [missing]), probs_V, TOP_P)
        for extra in clearly_out[:3]:
            swapped = np.append(np.setdiff1d(right, [missing]), extra)
            assert not is_top_p_nucleus(swapped, probs_V, TOP_P)
    for extra in clearly_out[:3]:
        assert not is_top_p_nucleus(np.append(right, extra), probs_V, TOP_P)


@pytest.mark.parametrize(
    ("ids", "accepted"),
    [
        ([0, 1, 2], True),
        ([0, 1, 3], True),
        ([0, 1], False),
        ([0, 1, 2, 3], False),
        ([0, 2, 3], False),
        ([0, 1, 4], False),
    ],
)
def test_two_ids_that_tie_at_the_boundary_may_change_places_but_one_of_them_is_in(
    ids: list[int], accepted: bool
) -> None:
    """Masses before them: 0, 0.5, 0.7 and, for whichever of ids 2 and 3 is second, 0.82."""
    probs_V = np.array([0.5, 0.2, 0.12, 0.12 + 1e-9, 0.06 - 1e-9])
    assert is_top_p_nucleus(ids, probs_V, 0.75) == accepted


def test_an_id_whose_mass_before_it_is_the_boundary_itself_may_be_in_or_out() -> None:
    probs_V = np.array([0.5, 0.4, 0.1])
    assert is_top_p_nucleus([0, 1, 2], probs_V, 0.9)
    assert is_top_p_nucleus([0, 1], probs_V, 0.9)
    assert not is_top_p_nucleus([0], probs_V, 0.9)
    assert not is_top_p_nucleus([0, 2], probs_V, 0.9)


def test_an_argmax_may_be_any_of_those_that_tie_and_nothing_else() -> None:
    logits_TV = np.array([[1.0, 1.0 + 1e-5, 0.5], [0.0, 3.0, 2.9]])
    assert is_argmax(np.array([0, 1]), logits_TV)
    assert is_argmax(np.array([1, 1]), logits_TV)
    assert not is_argmax(np.array([2, 1]), logits_TV)
    assert not is_argmax(np.array([1, 2]), logits_TV)
