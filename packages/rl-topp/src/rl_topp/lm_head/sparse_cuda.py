"""Entries scored one dot product each, on CUDA: the same two functions as `sparse`, put together
from `triton_kernels`.

Invariants: nothing waits for the device (sizes are known on the host); one copy to the device per
call; memory beyond the gradients is a few numbers per entry and one row of partial sums per
`KernelShapes.chunk` entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rl_topp import triton_kernels as kernels
from rl_topp.lm_head.operands import Operands
from rl_topp.lm_head.weight_gradient import Destinations
from rl_topp.nucleus import NucleusSet
from rl_topp.torch.scores import Upstream
from rl_topp.torch.upload import upload_rows

__all__ = ["SparseScores", "add_gradients", "score_rows"]

_SHAPES = kernels.KernelShapes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseScores:
    """What forward keeps for backward; all int32 but the scores."""

    rows_R: Tensor
    """[R]: listed rows."""
    offsets_R1: Tensor
    """[R+1]: listed row r owns entries `offsets_R1[r]:offsets_R1[r + 1]`, its target first."""
    ids_E: Tensor
    """[E]: ids relative to the shard, or -1."""
    rows_E: Tensor
    """[E]: row of the call of each entry."""
    z_E: Tensor
    """[E]: logit / temperature; -inf where the id is -1."""


def score_rows(
    operands: Operands, rows: NucleusSet, listed_rows: npt.NDArray[np.int64], statistics_4T: Tensor
) -> SparseScores:
    """Score the kept ids of the listed rows, and write their statistics (arguments: see `sparse.score_rows`)."""
    lists = upload_rows(rows, listed_rows, operands.device)
    ids_E, rows_E = kernels.list_entries(
        lists,
        operands.targets_T.contiguous(),
        vocab_start=operands.vocab_start,
        num_local_ids=operands.num_local_ids,
    )
    hidden_TH, weight_VH = (
        _rows_contiguous(operands.hidden_TH),
        _rows_contiguous(operands.weight_VH),
    )
    z_E = kernels.entry_scores(
        hidden_TH, weight_VH, ids_E, rows_E, dtype=operands.dtype, shapes=_SHAPES
    )
    if operands.temperature != 1.0:
        z_E.div_(operands.temperature)
    kernels.row_statistics(z_E, lists.rows_R, lists.offsets_R1, statistics_4T)
    return SparseScores(
        rows_R=lists.rows_R, offsets_R1=lists.offsets_R1, ids_E=ids_E, rows_E=rows_E, z_E=z_E
    )


def add_gradients(
    scored: SparseScores, operands: Operands, upstream: Upstream, destinations: Destinations
) -> None:
    """Add the gradients of the listed rows' scores (arguments: see `sparse.add_gradients`)."""
    coefficients_E = kernels.entry_coefficients(
        scored.z_E,
        scored.ids_E,
        scored.rows_R,
        scored.offsets_R1,
        _divided(upstream.score, operands.temperature),
        None if upstream.entropy is None else _divided(upstream.entropy, operands.temperature),
        upstream.log_normaliser.contiguous(),
        upstream.entropy_value.contiguous(),
    )
    ids_E = scored.ids_E
    if destinations.hidden is not None:
        weight_VH = _rows_contiguous(operands.weight_VH)
        kernels.hidden_gradient(
            weight_VH,
            ids_E,
            coefficients_E,
            scored.rows_R,
            scored.offsets_R1,
            destinations.hidden,
            shapes=_SHAPES,
        )
    if destinations.weight is not None:
        hidden_TH = _rows_contiguous(operands.hidden_TH)
        kernels.weight_gradient(
            hidden_TH,
            ids_E,
            scored.rows_E,
            coefficients_E,
            destinations.weight.buffer,
            shapes=_SHAPES,
        )


def _divided(gradient_T: Tensor, temperature: float) -> Tensor:
    return (gradient_T if temperature == 1.0 else gradient_T / temperature).contiguous()


def _rows_contiguous(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
