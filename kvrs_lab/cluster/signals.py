"""Handlers of the signals that end a launcher, for the start, run and end of a cluster."""

import signal
import threading
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A library's callback may swallow an interrupt, which is repeated until the end has begun.
_AGAIN_S = 1.0


class EndingSignals:
    """Replaces signal handlers until the end; without effect outside of the main thread.

    Ray installs its own handlers when it starts, so earlier handlers have to be restored.
    """

    def __init__(self) -> None:
        self._found: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            # An ignored signal (nohup) stays ignored. A handler not set from Python cannot be
            # restored.
            self._found = {
                one: found
                for one in _ENDING
                if (found := signal.getsignal(one)) not in (signal.SIG_IGN, None)
            }

    def interrupt(self) -> None:
        """Make each signal raise KeyboardInterrupt, again and again until `ignore`."""
        for one in self._found:
            signal.signal(one, _raise_interrupt)

    def hand_back(self) -> None:
        """Restore the former handlers; a default one raises, so that the cluster ends first."""
        for one, found in self._found.items():
            signal.signal(one, _raise_interrupt if found is signal.SIG_DFL else found)

    def ignore(self) -> None:
        """Ignore all signals during the end, since half an end would leave processes behind."""
        if self._found:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for one in self._found:
            signal.signal(one, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the former handlers."""
        for one, found in self._found.items():
            signal.signal(one, found)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    if number != signal.SIGALRM:
        signal.signal(signal.SIGALRM, _raise_interrupt)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
    raise KeyboardInterrupt
