"""Send everything that an actor's process prints to a file of the run. Layer: cluster."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

__all__ = ["log_to_file"]


def log_to_file(path: Path) -> None:
    """Append standard output, standard error and log records of this process to a file, also those of native libraries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
