"""The arithmetic of the head on CUDA, put together from Triton kernels (see `kernels.Kernels`).

Axes: T rows of the call, R listed rows, E entries, V_local ids, H inner dimension.

Invariants: nothing waits for the device (sizes are known on the host); one copy to the device per
call; memory beyond the gradients is a few numbers per entry and one row of partial sums per
`KernelShapes.chunk` entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rl_topp.lm_head.operands import Operands
from rl_topp.lm_head.triton_blocks import block_gradient, merge_block_statistics
from rl_topp.lm_head.triton_entries import (
    KernelShapes,
    entry_coefficients,
    entry_scores,
    list_entries,
    row_statistics,
)
from rl_topp.lm_head.triton_gradients import hidden_gradient, weight_gradient
from rl_topp.lm_head.weight_gradient import Destinations
from rl_topp.torch.entries import Entries
from rl_topp.torch.scores import Upstream
from rl_topp.torch.upload import upload_rows

__all__ = ["add_gradients", "block_gradient", "merge_block_statistics", "score_rows"]

_SHAPES = KernelShapes()


def score_rows(
    operands: Operands, listed_rows: npt.NDArray[np.int64], statistics_4T: Tensor
) -> tuple[Entries, Tensor]:
    """Score the kept ids of the listed rows, one dot product each; write their statistics."""
    call = operands.call
    lists = upload_rows(call.rows, listed_rows, operands.device)
    ids_E, rows_E = list_entries(
        lists,
        operands.targets_T.contiguous(),
        vocab_start=call.vocab_start,
        num_local_ids=call.num_local_ids,
    )
    z_E = entry_scores(
        _rows_contiguous(operands.hidden_TH),
        _rows_contiguous(operands.weight_VH),
        ids_E,
        rows_E,
        dtype=operands.dtype,
        shapes=_SHAPES,
    )
    if call.temperature != 1.0:
        z_E.div_(call.temperature)
    row_statistics(z_E, lists.rows_R, lists.offsets_R1, statistics_4T)
    return Entries(
        rows_R=lists.rows_R, offsets_R1=lists.offsets_R1, call_rows_E=rows_E, ids_E=ids_E
    ), z_E


def add_gradients(
    entries: Entries,
    z_E: Tensor,
    operands: Operands,
    upstream: Upstream,
    destinations: Destinations,
) -> None:
    """Add the gradients of the listed rows' scores."""
    ids_E, listed = entries.ids_E, (entries.rows_R, entries.offsets_R1)
    temperature = operands.call.temperature
    coefficients_E = entry_coefficients(
        z_E,
        ids_E,
        *listed,
        _divided(upstream.score, temperature),
        None if upstream.entropy is None else _divided(upstream.entropy, temperature),
        upstream.log_normaliser.contiguous(),
        upstream.entropy_value.contiguous(),
    )
    if destinations.hidden is not None:
        hidden_gradient(
            _rows_contiguous(operands.weight_VH),
            ids_E,
            coefficients_E,
            *listed,
            destinations.hidden,
            shapes=_SHAPES,
        )
    if destinations.weight is not None:
        weight_gradient(
            _rows_contiguous(operands.hidden_TH),
            ids_E,
            entries.call_rows_E,
            coefficients_E,
            destinations.weight.buffer,
            shapes=_SHAPES,
        )


def _divided(gradient_T: Tensor, temperature: float) -> Tensor:
    return (gradient_T if temperature == 1.0 else gradient_T / temperature).contiguous()


def _rows_contiguous(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
