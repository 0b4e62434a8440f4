"""Cutting a packed micro-batch over context-parallel ranks changes no score: zigzag and contiguous.

The index arrays are what a geometry package hands over; they are worked out here from the layouts'
definitions.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_topp import NucleusSet, align_rows, reference

torch = pytest.importorskip("torch")

from rl_topp.torch import nucleus_log_probs  # noqa: E402

VOCAB_SIZE = 7


def zigzag_positions(total: int, size: int, rank: int) -> np.ndarray:
    """Return the token positions on `rank`, in local order; positions from `total` on are padding.

    Chunk c = ceil(L / 2C).
    """
    chunk = -(-total // (2 * size))
    second = 2 * size - 1 - rank
    return np.concatenate(
        [
            np.arange(rank * chunk, (rank + 1) * chunk),
            np.arange(second * chunk, (second + 1) * chunk),
        ]
    )


def contiguous_positions(
    start: int, total: int, stream: int, size: int, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return one sequence's positions and local rows on `rank`, of a stream in equal parts."""
    part = -(-stream // size)
    position = np.arange(total)
    here = (start + position) // part == rank
    return position[here], start + position[here] - rank * part


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    lengths = draw(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4)
    )
    return lengths, draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 2**32 - 1))


def _rank_indices(
    layout: str, lengths: list[tuple[int, int]], size: int, rank: int
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], int]:
    """Return per sample (response indices, logit rows, their positions), and the number of rows."""
    indices, rows, places, first_row, start = [], [], [], 0, 0
    stream = sum(prompt + response for prompt, response in lengths)
    for prompt, response in lengths:
        total = prompt + response
        if layout == "zigzag":
            position = zigzag_positions(total, size, rank)
            row = first_row + np.arange(position.size)
            first_row += position.size
        else:
            position, row = contiguous_positions(start, total, stream, size, rank)
        predicts = (position >= prompt - 1) & (position < total - 1)
        indices.append(position[predicts] - (prompt - 1))
        rows.append(row[predicts])
        places.append(start + position[predicts])
        start += total
    return indices, rows, places, first_row if layout == "zigzag" else -(-stream // size)


@settings(max_examples=60)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@given(batch=batches())
def test_scores_do_not_depend_on_the_context_parallel_cut(
    layout: str, batch: tuple[list[tuple[int, int]], int, int]
) -> None:
    lengths, size, seed = batch
    rng = np.random.default_rng(seed)
    stream = sum(prompt + response for prompt, response in lengths)
    logits = rng.normal(size=(stream, VOCAB_SIZE))
    sets, targets = [], []
    for _, response in lengths:
        nuclei = [
            rng.choice(VOCAB_SIZE, rng.integers(1, VOCAB_SIZE), replace=False)
            for _ in range(response)
        ]
        sets.append(NucleusSet.from_lists(nuclei, vocab_size=VOCAB_SIZE))
        targets.append(np.array([rng.choice(ids) for ids in nuclei], np.int64))
    found = [np.full(response, np.nan) for _, response in lengths]
    for rank in range(size):
        indices, rows, places, num_rows = _rank_indices(layout, lengths, size, rank)
        local = rng.normal(size=(num_rows, VOCAB_SIZE))  # rows of padding hold anything
        wanted = np.zeros(num_rows, np.int64)
        for sample, row in enumerate(rows):
            local[row] = logits[places[sample]]
            wanted[row] = targets[sample][indices[sample]]
        scores = nucleus_log_probs(
            torch.tensor(local),
            torch.tensor(wanted),
            align_rows(sets, indices, rows, num_rows=num_rows),
        ).log_probs.numpy()
        assert (np.delete(scores, np.concatenate(rows).astype(np.int64)) == 0.0).all()
        for sample, row in enumerate(rows):
            assert np.isnan(found[sample][indices[sample]]).all()
            found[sample][indices[sample]] = scores[row]
    start = 0
    for sample, (prompt, response) in enumerate(lengths):
        whole = reference.nucleus_scores(
            logits[start + prompt - 1 : start + prompt - 1 + response],
            targets[sample],
            sets[sample],
        )
        np.testing.assert_allclose(found[sample], whole.log_probs, atol=1e-12)
        start += prompt + response
