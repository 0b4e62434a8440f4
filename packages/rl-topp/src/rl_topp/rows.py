"""`align_rows`: from the kept sets of samples to the kept sets of logit rows.

The caller says which response token sits on which local row (rl-metrics' context-parallel geometry
gives both index arrays, for one rank, zigzag or contiguous); no context-parallel arithmetic happens
here.

Axes: T logit rows of one rank, R response tokens and K of them on this rank, per sample.

Invariant: rows that no response token claims get status 2, so they score 0 and pass no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rl_topp.errors import NucleusError
from rl_topp.nucleus import NucleusSet
from rl_topp.validation import as_indices, check_count, refuse_first

__all__ = ["align_rows"]


def align_rows(
    sets: Sequence[NucleusSet],
    response_indices: Sequence[npt.ArrayLike],
    logit_rows: Sequence[npt.ArrayLike],
    *,
    num_rows: int,
    vocab_size: int | None = None,
) -> NucleusSet:
    """Return the kept sets of one rank's `num_rows` logit rows.

    Example: one sample with sets of 2 response tokens, its second token alone on this rank, at row
    3 of 5: `align_rows([s], [[1]], [[3]], num_rows=5)` has status [2, 2, 2, s.status[1], 2].

    Args:
        sets: per sample, the kept sets of its R response tokens.
        response_indices: per sample, integers [K] in [0, R): the response tokens this rank owns (K
            may be 0).
        logit_rows: per sample, integers [K] in [0, num_rows): the local logit row that predicts
            each of them.
        num_rows: local packed length, tokens; prompt rows and padding included.
        vocab_size: needed only when `sets` may be empty.

    Returns:
        A set of `num_rows` tokens, to pass as `rows`.

    Raises:
        NucleusError: the sequences differ in length, `num_rows` is not a count, an index lies
            outside, or two response tokens claim one row; names the sample.
    """
    if not len(sets) == len(response_indices) == len(logit_rows):
        raise NucleusError(
            f"got {len(sets)} sets, {len(response_indices)} response_indices and {len(logit_rows)}"
            " logit_rows; expected one each per sample"
        )
    check_count(num_rows, "num_rows")
    everything = NucleusSet.concat(sets, vocab_size=vocab_size)
    # The one-past-the-end token stands for rows that nobody claims; it is appended below.
    token_of_row_T = np.full(num_rows, len(everything), np.int64)
    sample_of_row_T = np.full(num_rows, -1, np.int64)
    first_token = 0
    for sample, nucleus in enumerate(sets):
        tokens_K = as_indices(
            response_indices[sample], len(nucleus), f"sample {sample}: response_indices"
        )
        rows_K = as_indices(logit_rows[sample], num_rows, f"sample {sample}: logit_rows")
        if tokens_K.size != rows_K.size:
            raise NucleusError(
                f"sample {sample}: {tokens_K.size} response indices but {rows_K.size} logit rows"
            )
        _refuse_claimed(rows_K, sample, sample_of_row_T)
        token_of_row_T[rows_K] = tokens_K + first_token
        sample_of_row_T[rows_K] = sample
        first_token += len(nucleus)
    return everything.append(NucleusSet.not_sampled(1, vocab_size=everything.vocab_size)).take(
        token_of_row_T
    )


def _refuse_claimed(
    rows_K: npt.NDArray[np.int64], sample: int, sample_of_row_T: npt.NDArray[np.int64]
) -> None:
    refuse_first(
        sample_of_row_T[rows_K] >= 0,
        lambda k: (
            f"sample {sample}: logit row {rows_K[k]} already belongs to sample"
            f" {sample_of_row_T[rows_K[k]]}"
        ),
    )
    values, counts = np.unique(rows_K, return_counts=True)
    refuse_first(counts > 1, lambda k: f"sample {sample}: logit row {values[k]} is named twice")
