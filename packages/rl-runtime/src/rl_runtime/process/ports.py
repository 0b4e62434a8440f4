"""TCP ports: choose one for a server, check one that was asked for, see whether one answers.

Invariants: a chosen port is free, and the system does not hand it out by itself; what cannot be
used is told with the port, its host and what to do.
"""

from __future__ import annotations

import contextlib
import random
import socket

from rl_runtime.errors import RuntimeSetupError

__all__ = ["check_answers", "check_port_free", "choose_port"]

_PORTS = range(20_000, 32_000)
"""Ports to choose from.

Below Linux's ephemeral ports (from 32768), so that no outgoing connection or `bind(0)` of SGLang,
Ray or torch takes one between the choice and the start.
"""

_HIGHEST_PORT = 55_535
"""SGLang derives a second number, port + 10000, and refuses one above 65535.

It does so even though it opens no such port here.
"""

_PORT_ATTEMPTS = 50


def choose_port(host: str) -> int:
    """Return a port that is free now and that nothing else picks by itself.

    Raises:
        RuntimeSetupError: none of 50 drawn ports was free.
    """
    for port in random.SystemRandom().sample(_PORTS, _PORT_ATTEMPTS):
        with contextlib.suppress(RuntimeSetupError):
            check_port_free(host, port)
            return port
    raise RuntimeSetupError(
        f"none of {_PORT_ATTEMPTS} ports drawn from {_PORTS.start} to {_PORTS.stop - 1} is free on"
        f" {host}: set engine.port"
    )


def check_port_free(host: str, port: int) -> None:
    """Check that a server can listen on a port now.

    Raises:
        RuntimeSetupError: another process listens there, the port may not be used, or SGLang cannot
            use it.
    """
    if port > _HIGHEST_PORT:
        raise RuntimeSetupError(
            f"port {port} is too high for SGLang, which derives port + 10000 from it: choose one up"
            f" to {_HIGHEST_PORT}, or engine.port = 0"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier server that linger in TIME_WAIT do not count as
        # taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RuntimeSetupError(
                f"port {port} on {host} cannot be used ({error.strerror}): choose another, or"
                " engine.port = 0 to have a free one chosen"
            ) from error


def check_answers(address: str, *, timeout_seconds: float) -> None:
    """Check that something listens at an address.

    Args:
        address: "host:port".
        timeout_seconds: how long the connection may take.

    Raises:
        ValueError: the address has another form.
        OSError: nothing listens there, or it does not answer in time.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) not in range(1, 2**16):
        raise ValueError(f"{address!r} is not host:port")
    socket.create_connection((host, int(port)), timeout=timeout_seconds).close()
