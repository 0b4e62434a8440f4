"""How fields cut along the context-parallel axis come back together on the CPU of one rank.

The geometry is the caller's: it passes a function that gathers the samples it is asked for.

Invariants, each matched by a test in `tests/distributed/test_train_dump.py`:

- every rank of the context group makes the same collective calls in the same order, whatever it
  keeps;
- only a rank with `keep_restored` holds CPU copies;
- on the device, at most one chunk of `chunk_bytes` is restored at a time.

Axes: N local samples, R response tokens of a sample, R_local those of this context rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rl_dump.columns.fields import ColumnInput
from rl_dump.contract import RESPONSE_FIELDS
from rl_dump.errors import DumpError
from rl_dump.parquet.writer import row_group_bounds
from rl_dump.torch.columns import CHUNK_BYTES, CpuColumns, copy_into, new_cpu_tensor, to_ragged

__all__ = ["GatherTensor", "restore_context_parallel_fields_to_cpu"]


class GatherTensor(Protocol):
    """A function that joins context-parallel pieces to whole responses, in one collective."""

    def __call__(
        self,
        pieces: Sequence[torch.Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        /,
        *,
        samples: range,
    ) -> Sequence[torch.Tensor]:
        """Return one tensor [R] per sample.

        Args:
            pieces: this rank's part of each response, possibly empty.
            total_lengths: tokens of prompt and response of each sample.
            response_lengths: tokens of each response, R.
            samples: which of the rank's samples these are. A layout that cuts every sequence by
                itself (zigzag) does not need it; one that cuts the packed stream (contiguous) looks
                up by it where in which stream each sequence lies.
        """


def restore_context_parallel_fields_to_cpu(
    rollout_data: Mapping[str, Any],
    gather_tensor: GatherTensor | None,
    *,
    keep_restored: bool,
    response_fields: Iterable[str] = RESPONSE_FIELDS,
    chunk_bytes: int = CHUNK_BYTES,
) -> CpuColumns:
    """Restore every response-aligned field to full length, on the CPU of the ranks that keep it.

    Args:
        rollout_data: the trainer's batch: `total_lengths` and `response_lengths` (N integers each),
            and per field a list of N tensors with this rank's pieces. All ranks of the context
            group hold the same fields and lengths.
        gather_tensor: joins the pieces of several samples in one collective; None if the fields are
            whole already (context size 1).
        keep_restored: whether this rank keeps the result. The others take part and discard.
        response_fields: the fields to restore; those absent from `rollout_data` are skipped, in the
            same way on every rank.
        chunk_bytes: most bytes restored per collective, unless one sample alone has more.

    Returns:
        The restored columns, N items each; empty where `keep_restored` is False.

    Raises:
        DumpError: a field has another number of samples, an entry that is not a tensor, or a
            restored length other than the response's.
    """
    present = [name for name in response_fields if rollout_data.get(name) is not None]
    totals, responses = (
        [int(length) for length in rollout_data[key]]
        for key in ("total_lengths", "response_lengths")
    )
    for name in present:
        lengths = _piece_lengths(name, rollout_data[name], len(responses))
        if gather_tensor is None:
            _check_restored(name, lengths, responses, 0)
    found: dict[str, tuple[ColumnInput, str | None]] = {}
    for name in present:
        with torch.no_grad():
            flat = _restore_field(
                name,
                rollout_data[name],
                gather_tensor,
                totals,
                responses,
                keep=keep_restored,
                chunk_bytes=chunk_bytes,
            )
        if flat is not None:
            found[name] = to_ragged(flat, responses)
    return CpuColumns.of(found)


def _restore_field(
    name: str,
    pieces: Sequence[torch.Tensor],
    gather_tensor: GatherTensor | None,
    totals: list[int],
    responses: list[int],
    *,
    keep: bool,
    chunk_bytes: int,
) -> torch.Tensor | None:
    if not pieces:
        return torch.zeros(0) if keep else None
    # Made once, at its final size: on the CPU there is one copy of the field, not two.
    flat = new_cpu_tensor((sum(responses), *pieces[0].shape[1:]), pieces[0].dtype) if keep else None
    width = pieces[0].element_size() * int(np.prod(pieces[0].shape[1:], dtype=np.int64))
    start = 0
    for first, last in row_group_bounds(np.asarray(responses, np.int64) * width, chunk_bytes):
        chunk = list(pieces[first:last])
        restored = chunk
        if gather_tensor is not None:
            restored = list(
                gather_tensor(
                    chunk, totals[first:last], responses[first:last], samples=range(first, last)
                )
            )
            _check_restored(
                name, [piece.shape[0] for piece in restored], responses[first:last], first
            )
        if flat is not None:
            stop = start + sum(responses[first:last])
            copy_into(flat[start:stop], restored)
            start = stop
        del chunk, restored
    return flat


def _check_restored(name: str, lengths: list[int], responses: list[int], first: int) -> None:
    if lengths == responses:
        return
    if len(lengths) != len(responses):
        raise DumpError(
            f"{name}: gather_tensor gave {len(lengths)} tensors for {len(responses)} samples"
        )
    row = next(index for index, length in enumerate(lengths) if length != responses[index])
    raise DumpError(
        f"{name}: sample {first + row} has {lengths[row]} values after restoring, its response has"
        f" {responses[row]} tokens"
    )


def _piece_lengths(name: str, pieces: Any, count: int) -> list[int]:
    """Return how many values this rank has of each sample, of pieces that make a field."""
    if not isinstance(pieces, (list, tuple)) or len(pieces) != count:
        found = len(pieces) if isinstance(pieces, (list, tuple)) else type(pieces).__name__
        raise DumpError(f"{name}: needs a list of {count} tensors, one per sample, got {found}")
    if not all(issubclass(kind, torch.Tensor) for kind in set(map(type, pieces))):
        row = next(row for row, piece in enumerate(pieces) if not isinstance(piece, torch.Tensor))
        raise DumpError(
            f"{name}: sample {row} is {type(pieces[row]).__name__}, not a tensor [tokens, ...]"
        )
    shapes = [piece.shape for piece in pieces]
    dims, dtypes = set(map(len, shapes)), {piece.dtype for piece in pieces}
    trailing = {()} if dims <= {1} else {tuple(shape[1:]) for shape in shapes}
    if 0 in dims or len(dims) > 1 or len(dtypes) > 1 or len(trailing) > 1:
        described = (
            f"{sorted(map(str, dtypes))} of {sorted(dims)} dimensions, then {sorted(trailing)}"
        )
        raise DumpError(
            f"{name}: a field has one dtype, at least one dimension and one shape after it; its"
            f" tensors are {described}"
        )
    return [shape[0] for shape in shapes]
