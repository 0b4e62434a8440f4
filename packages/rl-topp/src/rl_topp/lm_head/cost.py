"""Which kept sets are scored by single dot products and which by blocks of logits: the cheaper way.

The model: dot products cost a time per entry, proportional to the inner dimension H; blocks cost a
time per row (matrix products against the shard), a small one per entry and one per call (the shard
is read whole). Rows that gain from blocks move there together, if their gain exceeds the cost per
call.

Axes: R rows with kept sets.

Invariant: depends on set sizes and shapes only, so all ranks of a tensor-parallel group that hold
equally many ids choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["COSTS", "DeviceCost", "choose_blocked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCost:
    """Measured seconds of forward and backward together; all but the last per element of H."""

    entry_seconds: float
    """Per entry and element: one dot product and its two gradient updates."""
    product_seconds: float
    """Per row, id and element: the four matrix products of a block."""
    pass_seconds: float
    """Per id and element of the shard: reading the weight, writing its gradient, once per call."""
    block_entry_seconds: float
    """Per entry of a row in blocks, whatever H: reading it there and writing its gradient."""


COSTS: Final = {
    "cpu": DeviceCost(
        entry_seconds=1.7e-8, product_seconds=7.4e-11, pass_seconds=3.5e-9, block_entry_seconds=0.0
    ),
    "cuda": DeviceCost(
        entry_seconds=2.33e-12,
        product_seconds=1.05e-14,
        pass_seconds=1.04e-11,
        block_entry_seconds=1.14e-9,
    ),
}
"""By device type.

Where they come from: benchmarks/gpu_lm_head.py on one H200 (bfloat16), benchmarks/cpu_lm_head.py on
one core (float32; there the cost of an entry in a block is lost beside that of a dot product).
"""


def choose_blocked(
    set_sizes: npt.NDArray[np.int64],
    *,
    num_local_ids: int,
    width: int,
    device_type: str,
    blocks_run_anyway: bool,
) -> npt.NDArray[np.bool_]:
    """Return bool [R]: which rows with kept sets are cheaper in blocks.

    Args:
        set_sizes: int64 [R], ids per row.
        num_local_ids: ids of this shard.
        width: H, the inner dimension.
        device_type: `cpu` or `cuda`; another one is costed as `cuda`.
        blocks_run_anyway: rows without a filter are in the same call, so the cost per call is paid
            already.
    """
    cost = COSTS.get(device_type, COSTS["cuda"])
    saved = (
        set_sizes * (cost.entry_seconds * width - cost.block_entry_seconds)
        - num_local_ids * cost.product_seconds * width
    )
    cheaper = saved > 0
    # Blocks read the whole shard once per call, whatever the number of rows.
    price = 0.0 if blocks_run_anyway else num_local_ids * width * cost.pass_seconds
    return np.asarray(cheaper & (saved[cheaper].sum() > price))
