"""What the signals that ask a launcher to end do while a cluster starts, runs and ends."""

import signal
import threading
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndingSignals:
    """Takes the handlers that it finds and gives them back at the end. Does nothing outside of the main thread, which has none.

    Ray puts handlers of its own in place while it starts, so who had some before must get them back afterwards.
    """

    def __init__(self) -> None:
        self._found: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            # Who started us with a signal ignored (nohup) wants it ignored, and a handler not set from Python cannot be put back.
            self._found = {one: found for one in _ENDING if (found := signal.getsignal(one)) not in (signal.SIG_IGN, None)}

    def interrupt(self) -> None:
        """Each raises KeyboardInterrupt, whatever we are waiting for: a start is not worth waiting for its end."""
        for one in self._found:
            signal.signal(one, _raise_interrupt)

    def hand_back(self) -> None:
        """Each does what it did before; but where that was to end the process at once, it still raises: we clean up first."""
        for one, found in self._found.items():
            signal.signal(one, _raise_interrupt if found is signal.SIG_DFL else found)

    def ignore(self) -> None:
        """None does anything: the end is under way already, and half an end would leave things behind."""
        for one in self._found:
            signal.signal(one, signal.SIG_IGN)

    def restore(self) -> None:
        """Exactly what was found."""
        for one, found in self._found.items():
            signal.signal(one, found)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
