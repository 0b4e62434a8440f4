"""A file appears whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from stubs.dump_batches import Columns

from rl_dump import DumpError, WriteError, open_dump, write_dump
from rl_dump.atomic import atomic_path, refuse_input


def test_an_exception_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "x.parquet"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="boom"), atomic_path(target) as temporary:
        temporary.write_bytes(b"new")
        raise RuntimeError("boom")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_success_replaces_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "x"
    with atomic_path(target) as temporary:
        temporary.write_bytes(b"new")
        assert not target.exists()
    assert target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]


def test_the_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, events = tmp_path / "x", list[str]()
    sync, replace = os.fsync, Path.replace

    def recorded_sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append("sync folder" if path == tmp_path else f"sync {path.suffix}")
        sync(descriptor)

    def recorded_replace(path: Path, other: Path) -> Path:
        events.append("replace")
        return replace(path, other)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    with atomic_path(target) as temporary:
        temporary.write_bytes(b"new")
    assert events == ["sync .tmp", "replace", "sync folder"]


def test_what_the_file_system_refuses_is_a_write_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(
            WriteError,
            match=r"cannot write .*file/x: Not a directory|cannot write .*file/x: File exists",
        ),
        atomic_path(tmp_path / "file" / "x"),
    ):
        pass


def test_a_directory_in_the_way_is_a_write_error(tmp_path: Path, columns: Columns) -> None:
    (tmp_path / "x.parquet").mkdir()
    with pytest.raises(WriteError, match=r"cannot write .*x\.parquet: it is a folder"):
        write_dump(tmp_path / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


def test_a_pipe_or_device_is_never_replaced(tmp_path: Path, columns: Columns) -> None:
    pipe = tmp_path / "x.parquet"
    os.mkfifo(pipe)
    with pytest.raises(
        WriteError, match="a device, pipe or socket, and only a regular file can be replaced"
    ):
        write_dump(pipe, contract="train-dump.v2", batch_id=0, columns=columns)
    assert pipe.is_fifo()


def test_a_file_is_known_as_an_input_under_every_name(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"x")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    for name in ("a", "link", "hard", "../" + tmp_path.name + "/a"):
        with pytest.raises(DumpError, match="also an input"):
            refuse_input(tmp_path / name, None, source)
    refuse_input(tmp_path / "b", source, None)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_disk_is_a_write_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: Columns
) -> None:
    import pyarrow.parquet as pq

    import rl_dump.parquet.writer as module

    real = pq.ParquetWriter
    full = SimpleNamespace(
        ParquetWriter=lambda path, *rest, **options: real("/dev/full", *rest, **options)
    )
    monkeypatch.setattr(module, "pq", full)
    with pytest.raises(WriteError, match=r"cannot write .*x\.parquet: .*No space left on device"):
        write_dump(tmp_path / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_the_old_dump_readable(tmp_path: Path, columns: Columns) -> None:
    target = write_dump(
        tmp_path / "x.parquet", contract="train-dump.v2", batch_id=1, columns=columns
    )
    code = f"""
import os, sys
from rl_dump import DumpWriter, open_dump
dump = open_dump({str(target)!r})
fields = list(dump.fields.values())
writer = DumpWriter({str(target)!r}, fields=fields, contract="train-dump.v2", batch_id=2)
writer.__enter__()
writer.write(dump.columns())
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -9
    with open_dump(target) as dump:
        assert dump.batch_id == 1
        assert dump.verify() == []
