"""How tensors become a dump's columns: detached, on the CPU, laid end to end.

Every function copies: training may change its tensors as soon as a column is made.

Axes: N local samples, T values of all of them end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_dump.columns.fields import ColumnInput
from rl_dump.columns.ragged import RaggedArray
from rl_dump.errors import DumpError
from rl_dump.parquet.writer import row_group_bounds

__all__ = [
    "CHUNK_BYTES",
    "CpuColumns",
    "copy_into",
    "end_to_end",
    "is_sample_list",
    "new_cpu_tensor",
    "to_cpu_columns",
    "to_ragged",
]

CHUNK_BYTES = 64 << 20
"""Bytes joined on the device at a time.

Large enough that a copy's start-up cost does not show, small beside a model.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuColumns:
    """Columns as numpy, and the logical dtype of those that numpy has no name for."""

    values: Mapping[str, ColumnInput]
    """Per field what `write_dump` takes."""
    dtypes: Mapping[str, str]
    """`bfloat16` for fields held as float32."""

    @classmethod
    def of(cls, columns: Mapping[str, tuple[ColumnInput, str | None]]) -> CpuColumns:
        """Return columns of values and logical dtypes, None where numpy names the dtype."""
        return cls(
            values={name: values for name, (values, _) in columns.items()},
            dtypes={name: dtype for name, (_, dtype) in columns.items() if dtype is not None},
        )


def new_cpu_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor without values.

    Its memory is numpy's, which asks for huge pages: filling it costs a third.

    Raises:
        DumpError: a dtype that neither numpy nor a dump has.
    """
    bits = torch.int16 if dtype == torch.bfloat16 else dtype
    try:
        array = np.empty(tuple(shape), torch.empty(0, dtype=bits).numpy().dtype)
    except TypeError as error:
        raise DumpError(
            f"tensors of {dtype} cannot be dumped; give float32, bfloat16 or another dtype that"
            " numpy has"
        ) from error
    return torch.from_numpy(array).view(dtype)


def copy_into(target: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Copy tensors end to end into CPU memory.

    On a device nothing is allocated if they lie end to end already, as after a gather.
    """
    if parts[0].device.type == "cpu":
        torch.cat(parts, out=target)
        return
    whole = end_to_end(parts)
    target.copy_(torch.cat(parts) if whole is None else whole)


def end_to_end(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one view of parts that lie end to end in one storage, None if they do not."""
    filled = [part for part in parts if part.numel()]
    if not filled:
        return None
    first = filled[0]
    # One view is possible only if each part starts where the one before it ends, in one storage.
    storage, following = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in filled:
        if (
            part.untyped_storage().data_ptr() != storage
            or part.storage_offset() != following
            or not part.is_contiguous()
        ):
            return None
        following += part.numel()
    rows = sum(part.shape[0] for part in filled)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def is_sample_list(value: object) -> bool:
    """Say whether a value has an item per sample: a ragged array, a list of tensors or arrays."""
    return isinstance(value, RaggedArray) or (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(item, (torch.Tensor, np.ndarray)) for item in value)
    )


def to_cpu_columns(columns: Mapping[str, Any]) -> CpuColumns:
    """Copy per-sample values to the CPU.

    Args:
        columns: per field a tensor [N, ...], a list of N tensors (of any device and dtype), or
            whatever `write_dump` takes.

    Raises:
        DumpError: the tensors of one field have different dtypes or trailing dimensions.
    """
    with torch.no_grad():
        return CpuColumns.of({name: _to_cpu(name, value) for name, value in columns.items()})


def to_ragged(values: torch.Tensor, lengths: Sequence[int]) -> tuple[RaggedArray, str | None]:
    """Wrap a flat CPU tensor [total, ...] as items of the given lengths.

    Second: its logical dtype if numpy has no name for it.
    """
    array, dtype = _to_numpy(values)
    return (
        RaggedArray(
            array, np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)
        ),
        dtype,
    )


def _to_cpu(name: str, value: Any) -> tuple[ColumnInput, str | None]:
    if isinstance(value, torch.Tensor):
        return _to_numpy(value.detach().to("cpu", copy=True))
    if (
        isinstance(value, (list, tuple))
        and value
        and all(issubclass(kind, torch.Tensor) for kind in set(map(type, value)))
    ):
        return _list_to_numpy(name, value)
    return _copied(value), None


def _list_to_numpy(name: str, items: Sequence[torch.Tensor]) -> tuple[ColumnInput, str | None]:
    dtypes, shapes = {item.dtype for item in items}, [item.shape for item in items]
    if len(dtypes) > 1:
        raise DumpError(
            f"{name}: tensors of different dtypes {sorted(map(str, dtypes))}; a field has one dtype"
        )
    dims = set(map(len, shapes))
    if dims == {0}:
        return _to_numpy(torch.stack(list(items)).to("cpu", copy=True))
    if len(dims) > 1 or (dims != {1} and len({shape[1:] for shape in shapes}) > 1):
        raise DumpError(
            f"{name}: tensors of shapes that differ after the first dimension; a field is ragged in"
            " its first dimension only"
        )
    return to_ragged(_joined(list(items), shapes), [shape[0] for shape in shapes])


def _joined(items: list[torch.Tensor], shapes: list[torch.Size]) -> torch.Tensor:
    flat = new_cpu_tensor((sum(shape[0] for shape in shapes), *shapes[0][1:]), items[0].dtype)
    start = 0
    for first, last in row_group_bounds(
        np.array([item.nbytes for item in items], np.int64), CHUNK_BYTES
    ):
        stop = start + sum(shape[0] for shape in shapes[first:last])
        copy_into(flat[start:stop], items[first:last])
        start = stop
    return flat


def _to_numpy(tensor: torch.Tensor) -> tuple[np.ndarray[Any, Any], str | None]:
    half = tensor.dtype == torch.bfloat16
    return (tensor.float().numpy(), "bfloat16") if half else (tensor.numpy(), None)


def _copied(value: Any) -> Any:
    if isinstance(value, RaggedArray):
        return RaggedArray(value.values.copy(), value.offsets)
    return value.copy() if isinstance(value, np.ndarray) else list(value)
