"""Signals that end a launcher."""

import contextlib
import os
import signal
import time

import pytest

from kvrs_lab.cluster.signals import EndingSignals

WITHIN_S = 10.0


def test_an_interrupt_that_a_library_swallows_is_raised_again_until_the_end_begins() -> None:
    # A process in the background may have been started with SIGINT ignored, which would stay so.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    signals = EndingSignals()
    signals.interrupt()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(WITHIN_S)

        with pytest.raises(KeyboardInterrupt):
            time.sleep(WITHIN_S)
    finally:
        signals.ignore()
        signals.restore()
        signal.signal(signal.SIGINT, found)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
