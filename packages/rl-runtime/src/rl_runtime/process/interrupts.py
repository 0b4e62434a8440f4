"""What Ctrl-C and its kin do to a run.

SIGINT, SIGTERM and SIGHUP all end a run in the same way: the first one raises KeyboardInterrupt in
the main thread, and whatever comes after it is not heard, because the run is being stopped already:
an impatient second Ctrl-C must not leave servers behind.

Invariants: at most one KeyboardInterrupt per block; what was set before is set again afterwards.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["delayed_interrupts", "ended_by_signals", "keeping_signal_handlers"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_Handler = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn the first signal in a `with` block into a KeyboardInterrupt and be deaf to all others.

    A hang-up that the starter ignores, as `nohup` does, stays ignored. SIGINT counts even where a
    shell ignores it for its background jobs: a run has no other way to end well.
    """

    def end(_signal: int, _frame: FrameType | None) -> None:
        _handle_with(_do_nothing)
        raise KeyboardInterrupt

    with keeping_signal_handlers():
        _handle_with(end)
        yield


@contextlib.contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Hear signals at the end of a `with` block, which must be one that ends by itself: stopping what was started, for instance."""
    arrived: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    with keeping_signal_handlers():
        _handle_with(remember)
        yield
    if arrived:
        handler = signal.getsignal(arrived[0])
        if callable(handler):
            handler(arrived[0], None)


@contextlib.contextmanager
def keeping_signal_handlers() -> Iterator[None]:
    """Give the handlers back that were there before a `with` block.

    `ray.init`, for one, sets its own, which exit without a word.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that some library set outside Python, which cannot be set again from
            # here.
            if handler is not None:
                signal.signal(number, handler)


def _handle_with(handler: _Handler) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _do_nothing(_signal: int, _frame: FrameType | None) -> None:
    pass
