"""Statistics and gradients of rows over a whole vocabulary shard, one block of logits at a time.

Axes: T rows of a call, D of them over the vocabulary, B ids of a block, K kinds of score, 4
statistics (see `scores`).

Invariant: a block's statistics merge into the running ones without loss of range (the running
maximum moves, sums are rescaled), so the result does not depend on the block size beyond rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_topp.torch.call import Call
from rl_topp.torch.scores import HIGHEST, TARGET, Upstream, new_statistics, rescaled
from rl_topp.torch.upload import upload

__all__ = ["block_statistics", "dense_upstream", "merge_statistics", "store_dense"]


def block_statistics(z_DB: Tensor, targets_D: Tensor, *, first_id: int) -> Tensor:
    """Return the statistics [4, D] of one block of logits.

    Args:
        z_DB: logits / temperature of D rows, ids [first_id, first_id + B).
        targets_D: int64 [D], any id.
        first_id: the block's first id.
    """
    num_rows, width = z_DB.shape
    if width == 0 or num_rows == 0:
        return new_statistics(1, num_rows, mass=0.0, dtype=z_DB.dtype, device=z_DB.device)[0]
    highest = z_DB.amax(dim=1)
    # -inf - -inf would be NaN: a row of nothing but -inf has mass 0 instead.
    finite = highest.masked_fill(highest == -torch.inf, 0.0)
    distance = z_DB - finite[:, None]
    weight = torch.exp(distance)
    mass = weight.sum(dim=1)
    # An id of probability 0 adds 0, not -inf * 0 = NaN.
    spread = distance.mul_(weight).masked_fill_(weight == 0, 0.0).sum(dim=1)
    place = targets_D - first_id
    here = (place >= 0) & (place < width)
    value = z_DB.gather(1, place.clamp(0, width - 1)[:, None])[:, 0]
    return torch.stack([highest, value.masked_fill_(~here, -torch.inf), mass, spread])


def merge_statistics(left: Tensor, right: Tensor) -> Tensor:
    """Return the statistics [4, D] of two disjoint parts of the vocabulary."""
    peaks = torch.maximum(left[: TARGET + 1], right[: TARGET + 1])
    sums = (rescaled(part.unbind(0), peaks[HIGHEST]) for part in (left, right))
    return torch.cat([peaks, torch.add(*sums)])


def store_dense(statistics_K4T: Tensor, call: Call, block_4D: Tensor) -> None:
    """Write statistics over the vocabulary where they belong, in place.

    Args:
        statistics_K4T: the call's; the last kind (the full scores, when there are two) receives all
            of `block_4D`, the main score the rows without a filter.
        call: says which rows are which.
        block_4D: statistics [4, D] of `call.dense`.
    """
    dense, unfiltered, places = upload(
        (call.dense, call.unfiltered, np.searchsorted(call.dense, call.unfiltered)),
        block_4D.device,
    )
    statistics_K4T[0][:, unfiltered] = block_4D[:, places]
    if statistics_K4T.shape[0] > 1:
        statistics_K4T[1][:, dense] = block_4D


def dense_upstream(call: Call, arriving: Sequence[Upstream]) -> Upstream:
    """Return what arrives at the scores over the vocabulary of `call.dense`, [D].

    Args:
        call: says which rows are which.
        arriving: by kind of score, [T] each; where there are two, both count.
    """
    dense, unfiltered = upload((call.dense, call.unfiltered), arriving[0].score.device)
    entropies = [kind.entropy for kind in arriving if kind.entropy is not None]
    return Upstream(
        score=_total([kind.score for kind in arriving], unfiltered)[dense],
        entropy=_total(entropies, unfiltered)[dense] if entropies else None,
        log_normaliser=arriving[-1].log_normaliser[dense],
        entropy_value=arriving[-1].entropy_value[dense],
    )


def _total(gradients: Sequence[Tensor], unfiltered: Tensor) -> Tensor:
    """Return [T]: the full score's gradient, if any, and the main one's at unfiltered rows."""
    main, *full = gradients
    total = full[0].clone() if full else torch.zeros_like(main)
    total[unfiltered] += main[unfiltered]
    return total
