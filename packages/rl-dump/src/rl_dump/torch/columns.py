"""Decide how tensors become a dump's columns: detached, on the CPU, laid end to end.

Layer: torch. Every function copies: training may change its tensors as soon as a column is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_dump.errors import DumpError
from rl_dump.ragged import RaggedArray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_dump.fields import ColumnInput

__all__ = ["CpuColumns", "is_sample_list", "to_cpu_columns", "to_ragged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuColumns:
    """Hold columns as numpy, and the logical dtype of those that numpy has no name for."""

    values: Mapping[str, ColumnInput]
    """Per field what `write_dump` takes."""
    dtypes: Mapping[str, str]
    """`bfloat16` for fields held as float32."""


def is_sample_list(value: object) -> bool:
    """Say whether a value is certainly one item per sample: a `RaggedArray`, or a list of tensors or arrays."""
    if isinstance(value, RaggedArray):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, (torch.Tensor, np.ndarray)) for item in value)


def to_cpu_columns(columns: Mapping[str, Any]) -> CpuColumns:
    """Copy per-sample values to the CPU.

    Args:
        columns: per field a tensor [N, ...], a list of N tensors (of any device and dtype), or whatever `write_dump` takes.

    Raises:
        DumpError: the tensors of one field have different dtypes or trailing dimensions.
    """
    values: dict[str, ColumnInput] = {}
    dtypes: dict[str, str] = {}
    for name, value in columns.items():
        if isinstance(value, torch.Tensor):
            values[name], dtype = _to_numpy(value.detach().to("cpu", copy=True))
        elif isinstance(value, (list, tuple)) and value and all(isinstance(item, torch.Tensor) for item in value):
            values[name], dtype = _list_to_numpy(name, value)
        else:
            values[name], dtype = _copied(value), None
        if dtype is not None:
            dtypes[name] = dtype
    return CpuColumns(values=values, dtypes=dtypes)


def to_ragged(values: torch.Tensor, lengths: Sequence[int]) -> tuple[RaggedArray, str | None]:
    """Wrap a flat CPU tensor [total, ...] as items of the given lengths; second: its logical dtype if numpy has none."""
    array, dtype = _to_numpy(values)
    return RaggedArray(array, np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)), dtype


def _list_to_numpy(name: str, items: Sequence[torch.Tensor]) -> tuple[ColumnInput, str | None]:
    dtypes, shapes = {item.dtype for item in items}, [item.shape for item in items]
    if len(dtypes) > 1:
        msg = f"{name}: tensors of different dtypes {sorted(map(str, dtypes))}; a field has one dtype"
        raise DumpError(msg)
    dims = set(map(len, shapes))
    with torch.no_grad():
        if dims == {0}:
            return _to_numpy(torch.stack(list(items)).to("cpu", copy=True))
        if len(dims) > 1 or (dims != {1} and len({shape[1:] for shape in shapes}) > 1):
            msg = f"{name}: tensors of shapes that differ after the first dimension; a field is ragged in its first dimension only"
            raise DumpError(msg)
        return to_ragged(torch.cat(list(items)).cpu(), [shape[0] for shape in shapes])


def _to_numpy(tensor: torch.Tensor) -> tuple[np.ndarray[Any, Any], str | None]:
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy(), "bfloat16"
    return tensor.numpy(), None


def _copied(value: Any) -> Any:
    if isinstance(value, RaggedArray):
        return RaggedArray(value.values.copy(), value.offsets)
    return value.copy() if isinstance(value, np.ndarray) else list(value)
