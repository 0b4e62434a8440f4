"""How plain columns are read: straight from the mapped file, nothing rebuilt that is known.

Most floats of a dump are noise and lie in the file as they are. Arrow decodes two levels per value
to find out how long each response is; the dump has said so in `response_lengths`. So the bytes at
the end of each column chunk are taken for its values, and the checksum, over lengths and values,
decides whether they are: a chunk that is packed, cut into several pages or damaged does not pass,
gives None, and is left to arrow, which reads it or finds the words for what is wrong.

Invariant, matched by tests in `tests/unit/test_plain_columns.py`: the result is what arrow gives,
or None.

Axes: N samples, T values of all samples end to end.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

__all__ = ["read_plain"]


def read_plain(
    data: memoryview,
    metadata: pq.FileMetaData,
    column: int,
    dtype: np.dtype[Any],
    lengths: NDArray[np.int64],
    checksums: Sequence[int],
) -> NDArray[Any] | None:
    """Return the values of one ragged column of plain numbers, all samples end to end.

    Args:
        data: the whole file.
        metadata: its footer.
        column: index of the column in the footer.
        dtype: dtype of the values in the file.
        lengths: values of each sample: int64 [N], as many samples as the footer counts.
        checksums: CRC-32 of each row group's lengths and values, as
            `parquet.arrow_columns.checksum` gives it.

    Returns:
        Array [sum of lengths], checked; None if the column is packed, or is not what `lengths` and
        `checksums` say.
    """
    if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > len(data)):
        return None
    if int(lengths.sum()) * dtype.itemsize > len(data):
        return None
    values = np.empty(int(lengths.sum()), dtype)
    start = at = 0
    for group, expected in enumerate(checksums):
        rows = metadata.row_group(group).num_rows
        mine = lengths[start : start + rows]
        size = int(mine.sum())
        found = _chunk_end(data, metadata.row_group(group).column(column), size * dtype.itemsize)
        if found is None or zlib.crc32(found, zlib.crc32(mine.astype("<i4"))) != expected:
            return None
        values[at : at + size] = np.frombuffer(found, dtype.newbyteorder("<"))
        start, at = start + rows, at + size
    return values


def _chunk_end(data: memoryview, chunk: pq.ColumnChunkMetaData, size: int) -> memoryview | None:
    """Return the last `size` bytes of an unpacked chunk: its values, if it is a single page."""
    # A page ends with its values; what stands before them (levels, headers) has no fixed size.
    if chunk.compression != "UNCOMPRESSED" or not set(chunk.encodings) <= {"PLAIN", "RLE"}:
        return None
    start, end = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
    return data[end - size : end] if 0 <= start <= end - size and end <= len(data) else None
