"""The arithmetic of the head that differs by device, and the choice of it.

Axes: T rows of a call, R of them listed, E entries, D rows of a block of B ids, F of them over the
whole vocabulary.

Invariant: all implementations agree to rounding.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_topp.lm_head import plain
from rl_topp.lm_head.operands import Operands
from rl_topp.lm_head.weight_gradient import Destinations
from rl_topp.torch.entries import Entries
from rl_topp.torch.scores import Upstream

__all__ = ["Kernels", "kernels_on"]


class Kernels(Protocol):
    """Functions over one kind of device; the modules `plain` and `cuda` are implementations."""

    def score_rows(
        self, operands: Operands, listed_rows: npt.NDArray[np.int64], statistics_4T: Tensor
    ) -> tuple[Entries, Tensor]:
        """Score the kept ids of the listed rows, one dot product each; write their statistics.

        Args:
            operands: of the call.
            listed_rows: int64 [R], ascending; each has status 0.
            statistics_4T: [4, T], the computing dtype; written at the listed rows.

        Returns:
            The entries, and logit / temperature of each, [E], -inf where the id counts nowhere.
        """

    def add_gradients(
        self,
        entries: Entries,
        z_E: Tensor,
        operands: Operands,
        upstream: Upstream,
        destinations: Destinations,
    ) -> None:
        """Add the gradients of the listed rows' scores.

        Args:
            entries: what `score_rows` returned.
            z_E: what `score_rows` returned.
            operands: those that it was given.
            upstream: of the T rows' main scores.
            destinations: where they go.
        """

    def merge_block_statistics(
        self,
        z_DB: Tensor,
        places_F: Tensor,
        targets_F: Tensor,
        statistics_4F: Tensor,
        *,
        first_id: int,
    ) -> None:
        """Merge one block into running statistics (see `torch.scores`), in place.

        Args:
            z_DB: logits / temperature, contiguous.
            places_F: int64 [F]: rows of `z_DB` that need the whole vocabulary.
            targets_F: int64 [F], ids.
            statistics_4F: [4, F], the dtype of `z_DB`, contiguous.
            first_id: the block's first id.
        """

    def block_gradient(
        self,
        z_DB: Tensor,
        places_F: Tensor,
        targets_F: Tensor,
        full: Upstream,
        *,
        first_id: int,
        temperature: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return dL/d(logit) of one block, [D, B]; 0 in rows not over the whole vocabulary.

        Args:
            z_DB: logits / temperature, contiguous.
            places_F: int64 [F]: rows of `z_DB` that need the whole vocabulary.
            targets_F: int64 [F], ids.
            full: what arrives at the F rows, contiguous.
            first_id: the block's first id.
            temperature: divisor of the logits.
            dtype: of the result.
        """


def kernels_on(device: torch.device) -> Kernels:
    """Return the implementation for `device`."""
    if device.type == "cuda":
        from rl_topp.lm_head import cuda  # Needs Triton, which only CUDA builds of torch bring.

        return cuda
    return plain
