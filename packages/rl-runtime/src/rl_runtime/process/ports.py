"""Choose and check TCP ports."""

from __future__ import annotations

import socket

__all__ = ["free_port"]


def free_port(host: str) -> int:
    """Ask the operating system for a port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
