"""Which attempt at a stream may still be worked on here."""

from collections import OrderedDict
from collections.abc import Mapping

from kvrs.ids import StreamId

# This many streams are remembered; older ones ended long ago.
ATTEMPTS_REMEMBERED = 100_000

Attempt = tuple[int, int]  # (owner_epoch, attempt)


class FencedError(Exception):
    """The request's attempt is lower than one already seen for its stream."""


class AttemptBook:
    """The highest attempt seen of each stream."""

    def __init__(self) -> None:
        self._highest: OrderedDict[StreamId, Attempt] = OrderedDict()

    def admit(self, stream: StreamId, attempt: Attempt) -> None:
        """Raises FencedError: a higher one was already seen."""
        if attempt < self._highest.get(stream, (0, 0)):
            raise FencedError(f"stream {stream} has an attempt above {attempt}")

    def fence(self, attempts: Mapping[StreamId, Attempt]) -> None:
        """Whatever is below the attempt named for its stream is refused from now on."""
        for stream, attempt in attempts.items():
            self._highest[stream] = max(attempt, self._highest.get(stream, (0, 0)))
            self._highest.move_to_end(stream)
        while len(self._highest) > ATTEMPTS_REMEMBERED:
            self._highest.popitem(last=False)
