"""Decide how plain float columns are read: straight from the mapped file, without rebuilding what is known already.

Layer: algorithms. Most floats of a dump are noise and lie in the file as they are. Arrow decodes two levels per value to find out how long
each response is; the dump has said so in `response_lengths`. So the values are taken as they lie, and the checksum - over lengths and
values - decides whether that was right. Whatever is not as expected gives None, and arrow reads the column.

Invariant, matched by a test in `tests/unit/test_parquet.py`: the result is what arrow gives, or None.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow.parquet as pq
    from numpy.typing import NDArray

__all__ = ["read_plain"]

_DATA_PAGE, _PLAIN = 0, 0
_U4 = struct.Struct("<I")
_MAX_HEADER_BYTES = 512


class _Page(NamedTuple):
    """What the header of a data page says, and where its body starts."""

    size: int
    num_values: int
    body: int


def read_plain(
    data: mmap.mmap, metadata: pq.FileMetaData, column: int, dtype: np.dtype[Any], lengths: NDArray[np.int64], rows: Sequence[int], checksums: Sequence[int]
) -> NDArray[Any] | None:
    """Return the values of one ragged column of plain, uncompressed numbers, all samples end to end.

    Args:
        data: the whole file.
        metadata: its footer.
        column: index of the column in the footer.
        dtype: dtype of the values in the file.
        lengths: values of each sample: int64 [N].
        rows: samples in each row group.
        checksums: CRC-32 of each row group's lengths and values, as `parquet.checksum` gives it.

    Returns:
        Array [sum of lengths], checked; None if the column is packed, or is not what `lengths` and `checksums` say.
    """
    values = np.empty(int(lengths.sum()), dtype)
    start = at = 0
    try:
        for group, count in enumerate(rows):
            mine = lengths[start : start + count]
            chunk = metadata.row_group(group).column(column)
            if chunk.compression != "UNCOMPRESSED" or chunk.dictionary_page_offset is not None:
                return None
            size = int(mine.sum())
            found = _chunk_values(data, chunk.data_page_offset, chunk.num_values, size * dtype.itemsize)
            if found is None or zlib.crc32(found, zlib.crc32(mine.astype("<i4").tobytes())) != checksums[group]:
                return None
            values[at : at + size] = np.frombuffer(found, dtype)
            start, at = start + count, at + size
    except (OSError, ValueError, IndexError, struct.error):
        # A damaged footer or header; arrow finds the words for it.
        return None
    return values


def _chunk_values(data: mmap.mmap, offset: int, num_values: int, size: int) -> memoryview | None:
    """Return the bytes of a chunk's values if they are one plain page of exactly `size` bytes, None otherwise."""
    page = _page_at(data, offset)
    if page is None or page.num_values != num_values or page.body + page.size > len(data):
        return None
    at, end = page.body, page.body + page.size
    # Repetition levels, then definition levels, each with its length in front.
    for _ in range(2):
        at += _U4.size + _U4.unpack_from(data, at)[0]
        if at > end:
            return None
    return memoryview(data)[at:end] if end - at == size else None


def _page_at(data: mmap.mmap, offset: int) -> _Page | None:
    """Read a page header: thrift's compact protocol, of which a data page needs integers and one struct."""
    reader = _Reader(data[offset : offset + _MAX_HEADER_BYTES])
    outer = reader.fields()
    inner = outer.get(5)
    if outer.get(1) != _DATA_PAGE or not isinstance(inner, dict) or inner.get(2) != _PLAIN:
        return None
    size, num_values = outer.get(3), inner.get(1)
    if not isinstance(size, int) or not isinstance(num_values, int) or size < 0:
        return None
    return _Page(size, num_values, offset + reader.at)


class _Reader:
    """Read the integers and structs of a thrift compact message."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.at = 0

    def fields(self, depth: int = 0) -> dict[int, Any]:
        found: dict[int, Any] = {}
        number = 0
        while True:
            head = self._raw[self.at]
            self.at += 1
            if head == 0:
                return found
            step, kind = head >> 4, head & 0x0F
            number = number + step if step else self._zigzag()
            if kind in (4, 5, 6):
                found[number] = self._zigzag()
            elif kind in (1, 2):
                found[number] = kind == 1
            elif kind == 12 and depth < 2:
                found[number] = self.fields(depth + 1)
            else:
                raise ValueError("a page header with a field of another kind")

    def _zigzag(self) -> int:
        value = shift = 0
        while True:
            byte = self._raw[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)
            if shift > 63:
                raise ValueError("a number that does not end")
