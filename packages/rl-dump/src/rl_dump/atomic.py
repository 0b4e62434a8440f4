"""Decide how a file appears on disk: whole or not at all.

Layer: records (standard library only). A crash at any point leaves the old file or none, never half of the new one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from rl_dump.errors import WriteError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["atomic_path"]


@contextlib.contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `target`; on success it is synced to disk and renamed to `target`.

    Args:
        target: where the file shall be. Its directory is made if it is missing.

    Raises:
        WriteError: the file system refused (disk full, permission, a directory in the way). The temporary file is removed.
    """
    final = Path(target)
    temporary = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        temporary.replace(final)
        _sync(final.parent)
    except OSError as error:
        msg = f"cannot write {final}: {error.strerror or error}"
        raise WriteError(msg) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
