"""What happens to a block of logits between two matrix products, in plain torch.

Invariant: the two agree with `torch.dense_rows` and
`torch.scores.entry_gradient` to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_topp.torch.dense_rows import block_statistics, merge_statistics
from rl_topp.torch.scores import Upstream, entry_gradient

__all__ = ["block_gradient", "merge_block_statistics"]


def merge_block_statistics(
    z_DB: Tensor, places_F: Tensor, targets_F: Tensor, statistics_4F: Tensor, *, first_id: int
) -> None:
    """Merge one block into running statistics (see `torch.scores`), in place.

    Args:
        z_DB: logits / temperature.
        places_F: int64 [F]: rows of `z_DB` that need the whole vocabulary.
        targets_F: int64 [F], ids.
        statistics_4F: [4, F], the dtype of `z_DB`.
        first_id: the block's first id.
    """
    part = block_statistics(z_DB[places_F], targets_F, first_id=first_id)
    statistics_4F.copy_(merge_statistics(statistics_4F, part))


def block_gradient(
    z_DB: Tensor,
    places_F: Tensor,
    targets_F: Tensor,
    full: Upstream,
    *,
    first_id: int,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return dL/d(logit) of one block, [D, B] in `dtype`; 0 in rows that do not need the whole
    vocabulary.

    Args:
        z_DB: logits / temperature.
        places_F: int64 [F]: rows of `z_DB` that need it.
        targets_F: int64 [F], ids.
        full: what arrives at the F rows.
        first_id: the block's first id.
        temperature: divisor of the logits.
        dtype: of the result.
    """
    gradient_DB = torch.zeros_like(z_DB, dtype=dtype)
    is_target = torch.arange(z_DB.shape[1], device=z_DB.device) == (targets_F - first_id)[:, None]
    gradient_DB[places_F] = (
        entry_gradient(z_DB[places_F], is_target, full.as_columns()).div_(temperature).to(dtype)
    )
    return gradient_DB
