"""Comments for streams that wait or recover: a proxy in front of this one cuts what is silent for
too long. Where nothing was sent yet the head goes before the first comment, so an error before that
has a status of its own.
"""

import asyncio

from kvrs.proxy.streams.clients import SseClient

# Each look finds the streams that were silent since the one before, so the longest silence is two.
_LOOKS = 2


class KeepAlives:
    """One timer for all streams that are open, while there are any; None: no comments."""

    def __init__(self, interval_s: float | None) -> None:
        self._interval_s = interval_s
        self._open: set[SseClient] = set()
        self._timer: asyncio.TimerHandle | None = None

    def over(self, client: SseClient | None) -> "_Over":
        """For `with`: a block in which the client is not left without a word; None: it gets no
        stream.
        """
        if client is not None and self._interval_s is not None:
            self._open.add(client)
            if self._timer is None:
                self._arm(self._interval_s)
        return _Over(self._open, client)

    def _arm(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(interval_s / _LOOKS, self._look, interval_s)

    def _look(self, interval_s: float) -> None:
        self._timer = None
        for client in list(self._open):
            client.break_silence()
        if self._open:
            self._arm(interval_s)


class _Over:
    """Until the block is left the client is among the open ones."""

    __slots__ = ("_client", "_open")

    def __init__(self, among: set[SseClient], client: SseClient | None) -> None:
        self._open = among
        self._client = client

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._open.discard(self._client)
