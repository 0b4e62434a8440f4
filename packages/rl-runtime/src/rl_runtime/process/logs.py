"""Send what an actor's process prints to a file of the run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["errors_to_file", "log_driver_to_file", "log_to_file"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_file(path: Path) -> None:
    """Append everything that this process prints or logs to a file, native libraries included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _redirect(path, 1, 2)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, stream=sys.stderr, force=True)


def log_driver_to_file(path: Path) -> None:
    """Append log records of the driver to a file; what it prints stays on the terminal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, filename=path, force=True)


@contextlib.contextmanager
def errors_to_file(path: Path) -> Iterator[None]:
    """Append standard error to a file for the time of a `with` block, native libraries included."""
    terminal = os.dup(2)
    _redirect(path, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)


def _redirect(path: Path, *descriptors: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # As a descriptor, not a stream of Python's: native code writes to the number.
    with path.open("ab") as file:
        for descriptor in descriptors:
            os.dup2(file.fileno(), descriptor)
