"""What Ctrl-C and its kin do to a run.

SIGINT, SIGTERM and SIGHUP all end a run in the same way: the first one raises KeyboardInterrupt in
the main thread, and whatever comes after it is ignored, because the run is being stopped already:
an impatient second Ctrl-C must not leave servers behind.

Invariants: at most one KeyboardInterrupt per block; what was set before is set again afterwards;
other threads than the main one, which Python never interrupts, change nothing.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["SIGNALS", "delayed_interrupts", "ended_by_signals", "handle", "keeping_signal_handlers"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run."""

_Handler = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn the first signal in a `with` block into a KeyboardInterrupt and ignore all others.

    A hang-up that the starter ignores, as `nohup` does, stays ignored. SIGINT counts even where a
    shell ignores it for its background jobs: a run has no other way to end well.
    """

    def end(_signal: int, _frame: FrameType | None) -> None:
        handle(lambda *_: None)
        raise KeyboardInterrupt

    with keeping_signal_handlers(end):
        yield


@contextlib.contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Hold signals back until the end of a `with` block.

    The block must be one that ends by itself: stopping what was started, for instance.
    """
    arrived: list[int] = []
    with keeping_signal_handlers(lambda number, _frame: arrived.append(number)):
        yield
    if arrived:
        handler = signal.getsignal(arrived[0])
        if callable(handler):
            handler(arrived[0], None)


@contextlib.contextmanager
def keeping_signal_handlers(handler: _Handler | None = None) -> Iterator[None]:
    """Give the handlers back that were there before a `with` block.

    `ray.init`, for one, sets its own, which exit without a word.

    Args:
        handler: handles the signals within the block; None: the handlers that were there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if handler is not None:
        handle(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            # None: a handler that some library set outside Python, which cannot be set again from
            # here.
            if earlier is not None:
                signal.signal(number, earlier)


def handle(handler: _Handler) -> None:
    """Set the handler of all signals but of a hang-up that is ignored, as under `nohup`."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
