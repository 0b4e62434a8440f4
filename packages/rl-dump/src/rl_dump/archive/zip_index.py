"""Where the entries of a torch archive lie; nothing is trusted that no checksum covers.

A torch archive is a zip file whose entries are stored uncompressed, so an entry is a range of
the memory-mapped file. Python's `zipfile` takes half a second for the 60,000 entries of one batch;
this reads the directory only.

Invariants, each matched by a test in `tests/unit/test_zip_index.py`:

- an entry's bytes lie inside the file, before the directory, and match the entry's checksum;
- the name and size in the directory are those in front of the bytes.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import Final, NamedTuple

from rl_dump.errors import DumpError

__all__ = ["Entry", "ZipIndex"]

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s4x2H4x3L3H8xL")
_LOCAL = struct.Struct("<4s2B4HL2L2H")
_FULL32: Final = 0xFFFFFFFF
_FULL16: Final = 0xFFFF
_ENCRYPTED: Final = 0x1


class Entry(NamedTuple):
    """One entry of the archive; a tuple, because there are tens of thousands."""

    name: str
    """Its name in the directory."""
    header: int
    """Where its local header starts, bytes from the start of the file."""
    size: int
    """Its size, bytes."""
    crc32: int
    """Checksum of its bytes."""
    plain: bool
    """Whether its bytes stand in the file as they are, neither compressed nor encrypted."""


class ZipIndex:
    """The entries of a mapped zip file, and their bytes.

    Args:
        data: the whole file.
        where: what to name in errors.

    Raises:
        DumpError: not a zip file, cut short, or with two entries of one name.
    """

    def __init__(self, data: mmap.mmap | bytes, where: str) -> None:
        self._data = data
        self._where = where
        self._directory, entries = self._read_directory()
        self.entries: dict[str, Entry] = {}
        """Entries by name, in file order."""
        for entry in entries:
            if entry.name in self.entries:
                raise self._damaged(f"entry {entry.name!r} stands twice")
            self.entries[entry.name] = entry

    @classmethod
    def empty(cls, where: str) -> ZipIndex:
        """Return an index without entries, for a file that was closed."""
        return cls(_END.pack(b"PK\x05\x06", 0, 0, 0, 0, 0, 0, 0), where)

    def read(self, entry: Entry, *, check: bool = True) -> memoryview:
        """Return an entry's bytes, a view of the file.

        Args:
            entry: one of `entries`.
            check: compare the checksum; False for files that were written without checksums.

        Raises:
            DumpError: the entry is damaged, or compressed or encrypted.
        """
        start = self._start(entry)
        view = memoryview(self._data)[start : start + entry.size]
        if check and zlib.crc32(view) != entry.crc32:
            raise self._damaged(f"entry {entry.name!r} does not match its checksum")
        return view

    def _start(self, entry: Entry) -> int:
        if not entry.plain:
            raise self._damaged(
                f"entry {entry.name!r} is compressed or encrypted, which torch never does"
            )
        if entry.header + _LOCAL.size > self._directory:
            raise self._damaged(f"entry {entry.name!r} lies outside of the file")
        magic, _, _, _, method, _, _, _, _, _, name_size, extra_size = _LOCAL.unpack_from(
            self._data, entry.header
        )
        name_at = entry.header + _LOCAL.size
        name = bytes(self._data[name_at : name_at + name_size])
        if magic != b"PK\x03\x04" or method != 0 or name != entry.name.encode():
            raise self._damaged(f"entry {entry.name!r} does not start with its own header")
        start: int = name_at + name_size + extra_size
        if start + entry.size > self._directory:
            raise self._damaged(f"entry {entry.name!r} lies outside of the file")
        return start

    def _read_directory(self) -> tuple[int, list[Entry]]:
        start, size, count = self._find_directory()
        entries = []
        at, end = start, start + size
        for _ in range(count):
            if at + _CENTRAL.size > end:
                raise self._damaged("the directory is cut short")
            entry, at = self._entry(at, end)
            entries.append(entry)
        if at != end:
            raise self._damaged("the directory has another length than it says")
        return start, entries

    def _entry(self, at: int, end: int) -> tuple[Entry, int]:
        magic, flags, method, crc, packed, size, name_size, extra_size, comment_size, header = (
            _CENTRAL.unpack_from(self._data, at)
        )
        name_at = at + _CENTRAL.size
        following = name_at + name_size + extra_size + comment_size
        if magic != b"PK\x01\x02" or following > end:
            raise self._damaged("the directory is damaged")
        try:
            name = bytes(self._data[name_at : name_at + name_size]).decode()
        except UnicodeDecodeError as error:
            raise self._damaged("the directory holds a name that is not text") from error
        if _FULL32 in (size, packed, header):
            extra = bytes(self._data[name_at + name_size : name_at + name_size + extra_size])
            size, packed, header = _wide(extra, size, packed, header)
        plain = method == 0 and not flags & _ENCRYPTED and size == packed
        return Entry(name, header, size, crc, plain), following

    def _find_directory(self) -> tuple[int, int, int]:
        # Without a comment, which torch never writes, the end record is the last thing in the file.
        at = len(self._data) - _END.size
        if at < 0 or bytes(self._data[at : at + 4]) != b"PK\x05\x06":
            raise self._damaged("no directory at its end: cut short, or not a zip file")
        _, _, _, _, count, size, start, comment = _END.unpack_from(self._data, at)
        end = at
        if count == _FULL16 or _FULL32 in (size, start):
            locator = at - _END64_LOCATOR.size
            if locator < 0:
                raise self._damaged("the directory is damaged")
            magic, _, end, _ = _END64_LOCATOR.unpack_from(self._data, locator)
            if magic != b"PK\x06\x07" or end + _END64.size > locator:
                raise self._damaged("the directory is damaged")
            magic, _, _, _, _, _, _, count, size, start = _END64.unpack_from(self._data, end)
            if magic != b"PK\x06\x06":
                raise self._damaged("the directory is damaged")
        if comment or start + size > end:
            raise self._damaged("the directory is damaged")
        return start, size, count

    def _damaged(self, what: str) -> DumpError:
        return DumpError(f"{self._where}: damaged torch archive: {what}")


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Replace full 32-bit values by those of the zip64 field, which holds only these, in order."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(
                struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4)
            )
            return tuple(
                next(wide, value) if value == _FULL32 else value for value in (size, packed, header)
            )  # type: ignore[return-value]
        at += 4 + length
    return size, packed, header
