"""Handlers of the signals that end a launcher, while a cluster starts, runs and ends."""

import signal
import threading
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A callback of a library may swallow an interrupt: it is raised again until the end has begun.
_AGAIN_S = 1.0


class EndingSignals:
    """Replaces the handlers and restores them at the end. Does nothing outside of the main thread.

    Ray installs handlers of its own while it starts, so earlier ones have to be restored.
    """

    def __init__(self) -> None:
        self._found: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            # An ignored signal (nohup) stays ignored, and a handler not set from Python cannot be
            # restored.
            self._found = {
                one: found
                for one in _ENDING
                if (found := signal.getsignal(one)) not in (signal.SIG_IGN, None)
            }

    def interrupt(self) -> None:
        """Each signal raises KeyboardInterrupt, also during a start, and again until `ignore`."""
        for one in self._found:
            signal.signal(one, _raise_interrupt)

    def hand_back(self) -> None:
        """Each signal has its former effect; but one that would end the process at once raises, so
        that the cluster is ended first.
        """
        for one, found in self._found.items():
            signal.signal(one, _raise_interrupt if found is signal.SIG_DFL else found)

    def ignore(self) -> None:
        """No signal has an effect: the end is under way, and half an end would leave processes
        behind.
        """
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
