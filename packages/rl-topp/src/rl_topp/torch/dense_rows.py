"""Statistics and gradients of rows over a whole vocabulary shard, one block of logits at a time.

Layer: torch. Invariant: a block's statistics merge into the running ones without loss of range (the running maximum moves, sums are rescaled), so the
result does not depend on the block size beyond rounding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_topp.torch.scores import HIGHEST, MASS, SPREAD, TARGET

__all__ = ["block_statistics", "dense_upstream", "merge_statistics", "store_dense"]


def block_statistics(z_DB: Tensor, targets_D: Tensor, *, first_id: int, want_entropy: bool) -> Tensor:
    """Return the statistics [4, D] of one block of logits.

    Args:
        z_DB: logits / temperature of D rows, ids [first_id, first_id + B).
        targets_D: int64 [D], any id.
        first_id: the block's first id.
        want_entropy: whether the spread is needed; 0 otherwise.
    """
    num_rows, width = z_DB.shape
    statistics = z_DB.new_zeros(4, num_rows)
    statistics[[HIGHEST, TARGET]] = -torch.inf
    if width == 0 or num_rows == 0:
        return statistics
    highest = z_DB.amax(dim=1)
    finite = torch.where(torch.isinf(highest), 0.0, highest)  # a row of nothing but -inf has no mass
    distance = z_DB - finite[:, None]
    weight = torch.exp(distance)
    statistics[HIGHEST] = highest
    statistics[MASS] = weight.sum(dim=1)
    if want_entropy:
        statistics[SPREAD] = torch.where(weight > 0, weight * distance, 0.0).sum(dim=1)
    place = targets_D - first_id
    here = (place >= 0) & (place < width)
    value = z_DB.gather(1, place.clamp(0, width - 1)[:, None])[:, 0]
    statistics[TARGET] = torch.where(here, value, -torch.inf)
    return statistics


def merge_statistics(left: Tensor, right: Tensor) -> Tensor:
    """Return the statistics [4, D] of two disjoint parts of the vocabulary."""
    peak = torch.maximum(left[HIGHEST], right[HIGHEST])
    merged = torch.empty_like(left)
    merged[HIGHEST] = peak
    merged[TARGET] = torch.maximum(left[TARGET], right[TARGET])
    parts = [_rescaled(part, peak) for part in (left, right)]
    merged[MASS] = parts[0][0] + parts[1][0]
    merged[SPREAD] = parts[0][1] + parts[1][1]
    return merged


def _rescaled(part: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    held = part[MASS] > 0
    shift = torch.where(held, part[HIGHEST] - peak, 0.0)
    scale = torch.where(held, torch.exp(shift), 0.0)
    return part[MASS] * scale, (part[SPREAD] + shift * part[MASS]) * scale


def store_dense(statistics_K4T: Tensor, dense_rows_D: Tensor, block_4D: Tensor, unfiltered_T: Tensor) -> None:
    """Write statistics over the vocabulary where they belong, in place.

    They are the last kind's (the full scores, when there are two kinds), and the main score's of rows without a filter.
    """
    main = statistics_K4T[0][:, dense_rows_D]
    statistics_K4T[0][:, dense_rows_D] = torch.where(unfiltered_T[dense_rows_D], block_4D, main)
    if statistics_K4T.shape[0] > 1:
        statistics_K4T[1][:, dense_rows_D] = block_4D


def dense_upstream(gradient_KT: Tensor, unfiltered: npt.NDArray[np.int64]) -> Tensor:
    """Return [T]: what arrives from above at each row's score over the vocabulary, from both kinds together."""
    index = torch.from_numpy(unfiltered).to(gradient_KT.device)
    total = gradient_KT[1].clone() if gradient_KT.shape[0] > 1 else torch.zeros_like(gradient_KT[0])
    total[index] += gradient_KT[0][index]
    return total
