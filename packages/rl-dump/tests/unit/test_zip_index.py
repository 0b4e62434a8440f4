"""The directory of a torch archive is believed only where checksums and headers agree."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

import pytest

from rl_dump import DumpError
from rl_dump.archive.zip_index import ZipIndex


def archive(entries: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, data in entries.items():
            file.writestr(zipfile.ZipInfo(name), data, **options)
    return buffer.getvalue()


ENTRIES = {"a/data.pkl": b"pickle", "a/data/0": b"\x00" * 64, "a/data/1": b""}


def test_entries_are_found_and_read() -> None:
    index = ZipIndex(archive(ENTRIES), "f")
    assert list(index.entries) == list(ENTRIES)
    assert {name: bytes(index.read(entry)) for name, entry in index.entries.items()} == ENTRIES


def test_it_agrees_with_pythons_zipfile_on_many_entries() -> None:
    entries = {f"a/data/{number}": bytes([number % 256]) * (number % 7) for number in range(70_000)}
    data = archive(entries)
    index = ZipIndex(data, "f")
    assert len(index.entries) == 70_000
    assert bytes(index.read(index.entries["a/data/69999"])) == entries["a/data/69999"]


def test_a_changed_byte_anywhere_is_noticed_or_changes_nothing() -> None:
    data = archive(ENTRIES)
    for at in range(len(data)):
        for bit in (0x01, 0x80):
            changed = bytearray(data)
            changed[at] ^= bit
            try:
                index = ZipIndex(bytes(changed), "f")
                found = {name: bytes(index.read(entry)) for name, entry in index.entries.items()}
            except DumpError:
                continue
            assert found == ENTRIES, at


@pytest.mark.parametrize("cut", [0, 1, 21, 22, 60, 100])
def test_a_file_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(DumpError, match="damaged torch archive"):
        ZipIndex(archive(ENTRIES)[:cut], "f")


def test_compressed_entries_and_double_names_are_refused() -> None:
    index = ZipIndex(archive({"a": b"x" * 100}, compress_type=zipfile.ZIP_DEFLATED), "f")
    with pytest.raises(DumpError, match="compressed or encrypted"):
        index.read(index.entries["a"])
    data = archive({"a": b"1", "b": b"2"}).replace(b"b", b"a")
    with pytest.raises(DumpError, match="'a' stands twice"):
        ZipIndex(data, "f")


def test_sizes_beyond_the_file_are_refused() -> None:
    data = archive({"a": b"1234"})
    end = data.rindex(b"PK\x01\x02")
    for offset in (20, 24, 42):
        changed = bytearray(data)
        struct.pack_into("<I", changed, end + offset, 0x7FFFFFFF)
        with pytest.raises(DumpError):
            index = ZipIndex(bytes(changed), "f")
            index.read(index.entries["a"])


def test_an_archive_of_64_bit_sizes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lets zipfile write the 64-bit records of an archive of many gigabytes around a few bytes.
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 3)
    written = bytearray(archive(ENTRIES))
    # In a file that is truly so large, the old end record holds only the marks that its numbers are
    # too small.
    struct.pack_into("<2H2L", written, len(written) - 14, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    data = bytes(written)
    index = ZipIndex(data, "f")
    assert {name: bytes(index.read(entry)) for name, entry in index.entries.items()} == ENTRIES
    locator = data.rindex(b"PK\x06\x07")
    for at, wrong in (
        (locator, b"XX"),
        (locator + 8, b"\xff\xff"),
        (data.rindex(b"PK\x06\x06"), b"XX"),
    ):
        with pytest.raises(DumpError, match="the directory is damaged"):
            ZipIndex(data[:at] + wrong + data[at + 2 :], "f")


def test_a_name_that_is_not_text_is_refused() -> None:
    data = archive({"abcd": b"1"}).replace(b"abcd", b"ab\xff\xfe")
    with pytest.raises(DumpError, match="a name that is not text"):
        ZipIndex(data, "f")
