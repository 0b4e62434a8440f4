"""How a file appears on disk: whole or not at all.

A crash at any point leaves the old file or none, never half of the new one. What a command reads is
never what it writes, and only regular files are replaced: not a device, a pipe or a folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from rl_dump.errors import DumpError, WriteError

__all__ = ["atomic_path", "refuse_input"]


def refuse_input(target: str | os.PathLike[str], *inputs: str | os.PathLike[str] | None) -> None:
    """Refuse to write over a file that is being read.

    Args:
        target: the file to write.
        inputs: files that are read for it; None stands for no file.

    Raises:
        DumpError: `target` is one of them, under whatever name or link.
    """
    for path in inputs:
        if path is not None and _same_file(Path(target), Path(path)):
            raise DumpError(
                f"{target}: is the file to write and also an input ({path}), which would be lost;"
                " give another target"
            )


@contextlib.contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `target`.

    On success it is synced to disk and renamed to `target`.

    Args:
        target: where the file shall be. Its directory is made if it is missing.

    Raises:
        WriteError: the file system refused (disk full, permission), or `target` is there and is no
            regular file. The temporary file is removed; a process that is killed leaves it behind,
            under a name that starts with a dot and ends in `.tmp`.
    """
    final = Path(target)
    temporary = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        if final.exists() and not final.is_file():
            kind = "a folder" if final.is_dir() else "a device, pipe or socket"
            raise WriteError(
                f"cannot write {final}: it is {kind}, and only a regular file can be replaced; give"
                " the path of a file"
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        temporary.replace(final)
        _sync(final.parent)
    except OSError as error:
        raise WriteError(f"cannot write {final}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _same_file(target: Path, path: Path) -> bool:
    try:
        return target.samefile(path)
    except OSError:
        return os.path.realpath(target) == os.path.realpath(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
