"""What travels when pieces of responses are gathered: bits, and a header for each rank.

By the headers ranks find out that they disagree. Every number takes 8 bytes on the wire, so that
ranks of different dtypes still send buffers of one size and can tell one another. Invariants,
tested: `from_bits(to_bits(x), x.dtype)` is `x` bit for bit; all ranks build the same message from
the same headers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rl_metrics.errors import MetricsError
from rl_metrics.geometry.context_parallel import ContextParallel, int_array

__all__ = ["PieceHeader", "agreed_dtype", "check_dtype", "from_bits", "layout_digest", "to_bits"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a number of so many bytes."""

_DTYPES = sorted(
    {
        dtype
        for name in dir(torch)
        if isinstance(dtype := getattr(torch, name), torch.dtype)
        and "q" not in name
        and "bits" not in name
    },
    key=str,
)
"""Dtypes a header can name, by their place here; the same on ranks that run the same torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceHeader:
    """What one rank is about to send."""

    SIZE: ClassVar[int] = 3
    """Integers a header takes."""

    dtype: torch.dtype | None
    """Dtype of its numbers; None where it owns no token, whose dtype does not matter."""

    layout: int
    """Digest of lengths and layout, 63 bits."""

    requires_grad: bool
    """Whether it will come back with a gradient."""

    def packed(self) -> list[int]:
        """Return the header as integers."""
        code = 0 if self.dtype is None else 1 + _DTYPES.index(self.dtype)
        return [code, self.layout, int(self.requires_grad)]

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> list[PieceHeader]:
        """Return the headers of all ranks from their integers, one after another."""
        rows = [numbers[i : i + cls.SIZE] for i in range(0, len(numbers), cls.SIZE)]
        return [
            cls(dtype=_DTYPES[code - 1] if code else None, layout=layout, requires_grad=bool(grad))
            for code, layout, grad in rows
        ]


def agreed_dtype(headers: Sequence[PieceHeader], *, default: torch.dtype) -> torch.dtype:
    """Return the dtype of the ranks that send numbers.

    Args:
        headers: one per rank, in rank order.
        default: dtype of this rank, taken where nobody sends any.

    Raises:
        MetricsError: the same on all ranks, when lengths or layouts, dtypes, or the need for
            gradients differ.
    """
    others = [rank for rank, header in enumerate(headers) if header.layout != headers[0].layout]
    if others:
        raise MetricsError(
            f"ranks of the group gather different samples: ranks {others} pass other lengths, order"
            " or layout than rank 0. Pass the same on every rank"
        )
    dtypes = {rank: header.dtype for rank, header in enumerate(headers) if header.dtype is not None}
    if len(set(dtypes.values())) > 1:
        told = ", ".join(f"{dtype} on rank {rank}" for rank, dtype in dtypes.items())
        raise MetricsError(
            f"ranks of the group gather different dtypes: {told}. Convert the pieces to one dtype"
        )
    without = [rank for rank, header in enumerate(headers) if not header.requires_grad]
    if 0 < len(without) < len(headers):
        raise MetricsError(
            f"ranks of the group disagree: pieces require grad, but not on ranks {without}, which"
            " would miss the collective of the backward pass. Cut empty pieces from the graph too,"
            " or detach on every rank"
        )
    return next(iter(dtypes.values()), default)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise `MetricsError` for numbers that 8 bytes cannot hold."""
    if dtype.itemsize not in _INTEGERS or dtype not in _DTYPES:
        raise MetricsError(
            f"pieces of {dtype} cannot be gathered; give numbers of at most 8 bytes, such as"
            " view_as_real of complex128"
        )


def to_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor of any shape as int64 [n], one per number."""
    return values.contiguous().reshape(-1).view(_INTEGERS[values.dtype.itemsize]).to(torch.int64)


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `to_bits`."""
    return bits.to(_INTEGERS[dtype.itemsize]).view(dtype)


def layout_digest(
    total_lengths: Any,
    response_lengths: Any,
    cp: ContextParallel,
    *,
    offsets: Any,
    **stream: int | None,
) -> int:
    """Return 63 bits of a hash of everything that says where a token goes, the rank aside.

    Args:
        total_lengths: int [N].
        response_lengths: int [N].
        cp: any rank's place; size and layout enter.
        offsets: int [N] or None.
        stream: further lengths, or None.
    """
    lists = (total_lengths, response_lengths, offsets)
    told = [None if values is None else int_array(values).tolist() for values in lists]
    lengths = sorted((name, value and int(value)) for name, value in stream.items())
    text = repr((told, cp.size, cp.layout, lengths))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
