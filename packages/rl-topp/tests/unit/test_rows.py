"""Aligning the sets of samples to logit rows."""

from typing import Any

import numpy as np
import pytest

from rl_topp import NucleusError, NucleusSet, align_rows

FIRST = NucleusSet.from_lists([[1, 2], None, [3]], vocab_size=10)
SECOND = NucleusSet.from_lists([[4]], vocab_size=10)


def test_rows_nobody_claims_are_not_sampled() -> None:
    rows = align_rows([FIRST, SECOND], [[0, 1, 2], [0]], [[2, 3, 4], [7]], num_rows=9)
    assert rows.status.tolist() == [2, 2, 0, 1, 0, 2, 2, 0, 2]
    assert [ids.tolist() for ids in rows] == [[], [], [1, 2], [], [3], [], [], [4], []]


def test_a_rank_that_owns_no_response_token_gets_rows_without_sets() -> None:
    rows = align_rows([FIRST], [[]], [[]], num_rows=3)
    assert rows.status.tolist() == [2, 2, 2]
    assert len(align_rows([], [], [], num_rows=0, vocab_size=10)) == 0


def test_zigzag_halves_come_back_in_any_order() -> None:
    """8 tokens (prompt 2) in 4 chunks of 2: rank 0 has positions 0, 1, 6, 7, rank 1 has 2 to 5."""
    sets = NucleusSet.from_lists([[token] for token in range(6)], vocab_size=10)
    rank0 = align_rows([sets], [[0, 5]], [[1, 2]], num_rows=4)
    rank1 = align_rows([sets], [[1, 2, 3, 4]], [[0, 1, 2, 3]], num_rows=4)
    assert [ids.tolist() for ids in rank0] == [[], [0], [5], []]
    assert [ids.tolist() for ids in rank1] == [[1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("indices", "rows", "words"),
    [
        ([[0], [0]], [[1], [1]], "sample 1: logit row 1 already belongs to sample 0"),
        ([[0, 1], []], [[1, 1], []], "sample 0: logit row 1 is named twice"),
        (
            [[3], []],
            [[1], []],
            r"sample 0: response_indices\[0\] is 3, which lies outside \[0, 3\)",
        ),
        ([[0], [0]], [[1], [5]], r"sample 1: logit_rows\[0\] is 5, which lies outside \[0, 5\)"),
        ([[0, 1], []], [[1], []], "sample 0: 2 response indices but 1 logit rows"),
        ([[0]], [[1]], "2 sets, 1 response_indices"),
    ],
)
def test_indices_that_do_not_fit_name_the_sample(
    indices: list[list[int]], rows: list[list[int]], words: str
) -> None:
    with pytest.raises(NucleusError, match=words):
        align_rows([FIRST, SECOND], indices, rows, num_rows=5)


def test_large_inputs_keep_every_set() -> None:
    rng = np.random.default_rng(1)
    sets = [
        NucleusSet.from_lists(
            [rng.choice(50, rng.integers(1, 9), replace=False) for _ in range(40)], vocab_size=50
        )
        for _ in range(5)
    ]
    places = rng.permutation(300)[:200].reshape(5, 40)
    rows = align_rows(sets, [np.arange(40)] * 5, list(places), num_rows=300)
    for sample, nucleus in enumerate(sets):
        assert rows.take(places[sample]) == nucleus


@pytest.mark.parametrize("num_rows", [-1, 2.0, None])
def test_a_number_of_rows_that_is_not_a_count_is_refused(num_rows: Any) -> None:
    with pytest.raises(NucleusError, match=f"num_rows.*{num_rows}"):
        align_rows([FIRST], [[]], [[]], num_rows=num_rows)
