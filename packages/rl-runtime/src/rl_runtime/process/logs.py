"""Send everything that an actor's process prints to a file of the run."""

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
    """Append standard output, standard error and log records of this process to a file, also those of native libraries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, stream=sys.stderr, force=True)


def log_driver_to_file(path: Path) -> None:
    """Append log records of the driver to a file; what it prints stays on the terminal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, filename=path, force=True)


@contextlib.contextmanager
def errors_to_file(path: Path) -> Iterator[None]:
    """Append this process's standard error to a file for the time of a `with` block, also what native libraries write."""
    sys.stderr.flush()
    terminal = os.dup(2)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
