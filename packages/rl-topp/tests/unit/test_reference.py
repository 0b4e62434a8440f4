"""The float64 definitions, on numbers that can be checked by hand."""

import math
from typing import Any, cast

import numpy as np
import pytest

from rl_topp import NucleusError, NucleusSet, reference


def _nucleus(*, ids: Any, offsets: Any, status: Any, vocab_size: int) -> NucleusSet:
    """Lists stand for arrays here: the record converts what it is given."""
    return NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("parameters", "nucleus"),
    [
        ({}, [1, 0, 2, 3]),
        ({"top_p": 1.0}, [1, 0, 2, 3]),
        ({"top_k": 2}, [1, 0]),
        ({"top_p": 0.5}, [1, 0]),  # the mass before id 0 is exactly 0.5
        ({"top_p": 0.49}, [1]),
        ({"min_p": 0.5}, [1, 0]),
        ({"min_p": 1.0}, [1]),
        ({"top_p": 0.9, "min_p": 0.4, "top_k": 3}, [1, 0]),
        ({"top_p": 1e-9}, [1]),
    ],
)
def test_top_k_top_p_and_min_p_cut_together(
    parameters: dict[str, float], nucleus: list[int]
) -> None:
    assert reference.nucleus([0.25, 0.5, 0.125, 0.125], **parameters).tolist() == nucleus  # type: ignore[arg-type]


def test_ties_go_to_the_lowest_id() -> None:
    assert reference.nucleus([0.25, 0.25, 0.25, 0.25], top_k=2).tolist() == [0, 1]
    assert reference.nucleus([0.1, 0.3, 0.3, 0.3], top_p=0.5).tolist() == [1, 2]


@pytest.mark.parametrize(
    "parameters", [{"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}]
)
def test_parameters_outside_their_range_are_refused(parameters: dict[str, float]) -> None:
    with pytest.raises(NucleusError, match=next(iter(parameters))):
        reference.nucleus([1.0], **parameters)  # type: ignore[arg-type]


def test_a_top_p_of_one_keeps_every_id_of_a_large_vocabulary() -> None:
    """Rounding lifts the running mass above 1 before the last of 50,000 ids."""
    probs = reference.softmax(np.random.default_rng(0).normal(size=50_000) * 4)
    ranked = np.sort(probs)[::-1]
    assert (np.cumsum(ranked) - ranked).max() > 1.0
    assert reference.nucleus(probs).size == 50_000


@pytest.mark.parametrize(
    ("probs", "words"),
    [
        ([float("nan"), 0.5, 0.5], r"probs\[0\] is nan"),
        ([1.5, -0.5], r"probs\[1\]"),
        ([float("inf"), 0.0], "inf"),
        ([], "V >= 1"),
        ([[1.0]], "shape"),
    ],
)
def test_what_is_not_a_probability_is_refused(probs: Any, words: str) -> None:
    with pytest.raises(NucleusError, match=words):
        reference.nucleus(probs, top_p=0.5)


def test_an_unknown_rule_for_truncated_sets_is_refused() -> None:
    with pytest.raises(NucleusError, match="'Full'"):
        reference.keep_mask(
            NucleusSet.unfiltered(1, vocab_size=2), [0], on_truncated=cast(Any, "Full")
        )


def test_the_status_decides_what_a_token_is_scored_over() -> None:
    """Probabilities 0.5, 0.3, 0.2; kept {0, 1} where recorded; the target is 1."""
    logits = np.log([[0.5, 0.3, 0.2]] * 4)
    rows = _nucleus(ids=[0, 1, 0], offsets=[0, 2, 2, 2, 3], status=[0, 1, 2, 3], vocab_size=3)
    masked = reference.nucleus_scores(logits, [1, 1, 1, 1], rows)
    assert masked.log_probs == pytest.approx([math.log(0.375), math.log(0.3), 0.0, 0.0])
    assert masked.full_log_probs == pytest.approx(
        [math.log(0.3), math.log(0.3), 0.0, math.log(0.3)]
    )
    assert masked.entropy[0] == pytest.approx(-(0.625 * math.log(0.625) + 0.375 * math.log(0.375)))
    full = reference.nucleus_scores(logits, [1, 1, 1, 1], rows, on_truncated="full")
    assert full.log_probs[3] == pytest.approx(math.log(0.3))


def test_the_target_is_kept_by_force() -> None:
    rows = NucleusSet.from_lists([[0]], vocab_size=3)
    scores = reference.nucleus_scores(np.log([[0.5, 0.3, 0.2]]), [1], rows)
    assert scores.log_probs[0] == pytest.approx(math.log(0.375))


def test_temperature_divides_the_logits() -> None:
    rows = NucleusSet.unfiltered(1, vocab_size=2)
    scores = reference.nucleus_scores([[2.0, 0.0]], [0], rows, temperature=2.0)
    assert scores.log_probs[0] == pytest.approx(-math.log(1 + math.exp(-1)))


@pytest.mark.parametrize("of_entropy", [False, True])
def test_the_gradient_is_the_slope(of_entropy: bool) -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(3, 6)), [1, 0, 5]
    rows = _nucleus(ids=[1, 4, 2], offsets=[0, 3, 3, 3], status=[0, 1, 2], vocab_size=6)
    support = reference.keep_mask(rows, targets)
    gradient = reference.score_gradient(
        logits, targets, support, temperature=0.7, of_entropy=of_entropy
    )

    def value(moved: np.ndarray) -> float:
        scores = reference.nucleus_scores(moved, targets, rows, temperature=0.7)
        return float((scores.entropy if of_entropy else scores.log_probs).sum())

    for place in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-6
        assert gradient[place] == pytest.approx(
            (value(logits + step) - value(logits - step)) / 2e-6, abs=1e-8
        )
