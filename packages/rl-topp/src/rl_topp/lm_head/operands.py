"""What every way of scoring a call works on.

Axes: T rows of the call, V_local ids of the shard, H inner dimension, E entries.

Invariant: the same in forward and backward of one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_topp.torch.call import Call
from rl_topp.torch.entries import Entries, build_entries
from rl_topp.torch.scores import compute_dtype

__all__ = ["Operands"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Hidden states, one shard of the output weight, the targets, and the call's settings."""

    hidden_TH: Tensor
    """[T, H]."""
    weight_VH: Tensor
    """[V_local, H]; rows from `call.num_local_ids` on are padding."""
    targets_T: Tensor
    """Integers [T], ids of the whole vocabulary."""
    call: Call
    """The kept sets of the T rows, and the settings."""

    @property
    def dtype(self) -> torch.dtype:
        """The computing dtype."""
        return compute_dtype(self.hidden_TH.dtype)

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.hidden_TH.device

    def entries_of(self, listed_rows: npt.NDArray[np.int64]) -> Entries:
        """Return the entries of `listed_rows`, int64 [R], ascending; each has status 0."""
        return build_entries(
            self.call.rows,
            listed_rows,
            self.targets_T,
            vocab_start=self.call.vocab_start,
            num_local_ids=self.call.num_local_ids,
        )
