"""Entries scored one dot product each, on CUDA: the same two functions as `sparse`, put together from `triton_kernels`.

Layer: torch and Triton. Invariants: nothing waits for the device (sizes are known on the host); one copy to the device per call; memory beyond the
gradients is a few numbers per entry and one row of partial sums per `KernelShapes.chunk` entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rl_topp import triton_kernels as kernels
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
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    rows: NucleusSet,
    listed_rows: npt.NDArray[np.int64],
    statistics_4T: Tensor,
    *,
    vocab_start: int,
    num_local_ids: int,
    temperature: float,
) -> SparseScores:
    """Score the kept ids of the listed rows, and write their statistics (arguments: see `sparse.score_rows`)."""
    lists = upload_rows(rows, listed_rows, hidden_TH.device)
    ids_E, rows_E = kernels.list_entries(lists, targets_T.contiguous(), vocab_start=vocab_start, num_local_ids=num_local_ids)
    z_E = kernels.entry_scores(
        _rows_contiguous(hidden_TH), _rows_contiguous(weight_VH), ids_E, rows_E, dtype=statistics_4T.dtype, shapes=_SHAPES
    )
    if temperature != 1.0:
        z_E.div_(temperature)
    kernels.row_statistics(z_E, lists.rows_R, lists.offsets_R1, statistics_4T)
    return SparseScores(rows_R=lists.rows_R, offsets_R1=lists.offsets_R1, ids_E=ids_E, rows_E=rows_E, z_E=z_E)


def add_gradients(
    scored: SparseScores, hidden_TH: Tensor, weight_VH: Tensor, upstream: Upstream, destinations: Destinations, *, temperature: float
) -> None:
    """Add the gradients of the listed rows' scores (arguments: see `sparse.add_gradients`)."""
    coefficients_E = kernels.entry_coefficients(
        scored.z_E,
        scored.rows_R,
        scored.offsets_R1,
        _divided(upstream.score, temperature),
        None if upstream.entropy is None else _divided(upstream.entropy, temperature),
        upstream.log_normaliser.contiguous(),
        upstream.entropy_value.contiguous(),
    )
    if destinations.hidden is not None:
        kernels.hidden_gradient(
            _rows_contiguous(weight_VH), scored.ids_E, coefficients_E, scored.rows_R, scored.offsets_R1, destinations.hidden, shapes=_SHAPES
        )
    if destinations.weight is not None:
        out = destinations.weight.buffer
        kernels.weight_gradient(_rows_contiguous(hidden_TH), scored.ids_E, scored.rows_E, coefficients_E, out, shapes=_SHAPES)


def _divided(gradient_T: Tensor, temperature: float) -> Tensor:
    return (gradient_T if temperature == 1.0 else gradient_T / temperature).contiguous()


def _rows_contiguous(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
