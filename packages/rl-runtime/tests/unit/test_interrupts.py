"""Signals: one ends the run, the next ones are not heard, and stopping is not interrupted."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from rl_runtime.process.interrupts import (
    delayed_interrupts,
    ended_by_signals,
    keeping_signal_handlers,
)

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    """Begin with a hang-up that is heard, whatever started the tests (nohup does not hear it)."""
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        yield
        assert [signal.getsignal(number) for number in SIGNALS] == before
    finally:
        signal.signal(signal.SIGHUP, hang_up)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_each_signal_is_an_interrupt(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        os.kill(os.getpid(), number)


def test_only_the_first_signal_is_heard() -> None:
    stopped = []
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            stopped.append("all")
    assert stopped == ["all"]


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    found = []
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            found.append(signal.getsignal(signal.SIGHUP))
        found.append(signal.getsignal(signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == [signal.SIG_IGN, signal.SIG_IGN]


def test_a_signal_waits_for_the_end_of_what_must_not_be_interrupted() -> None:
    stopped = []
    with pytest.raises(KeyboardInterrupt), ended_by_signals(), delayed_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        stopped.append("all")
    assert stopped == ["all"]


def test_handlers_that_a_library_sets_are_taken_back() -> None:
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        with keeping_signal_handlers():
            signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
        os.kill(os.getpid(), signal.SIGTERM)


def test_other_threads_change_no_handler() -> None:
    failures = []

    def use() -> None:
        try:
            with ended_by_signals(), delayed_interrupts():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not failures
