"""Comments for streams that wait or recover: a proxy in front of this one cuts what is silent for
too long.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvrs.proxy.streams.clients import SseClient

# Each look finds who was silent since the one before: so none is silent for longer than two.
_LOOKS = 2


class KeepAlives:
    """One timer for all streams that are open, while there are any; None: no comments."""

    def __init__(self, interval_s: float | None) -> None:
        self._interval_s = interval_s
        self._open: set[SseClient] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def over(self, client: SseClient | None) -> Iterator[None]:
        """A block in which the client is not left without a word; None: it gets no stream."""
        if client is None or self._interval_s is None:
            yield
            return
        self._open.add(client)
        if self._timer is None:
            self._arm(self._interval_s)
        try:
            yield
        finally:
            self._open.discard(client)

    def _arm(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(interval_s / _LOOKS, self._look, interval_s)

    def _look(self, interval_s: float) -> None:
        self._timer = None
        for client in list(self._open):
            client.break_silence()
        if self._open:
            self._arm(interval_s)
