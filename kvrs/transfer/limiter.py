"""Hold a link to a rate.

Pure: `now_s` is an argument. A token bucket in the form of a schedule (GCRA): what is remembered is only the moment at which
the link will have carried everything that was granted so far. All connections of a link ask the same limiter for one small
chunk at a time, so that they take turns and share the link evenly.
"""

# How late a sender may wake up and still catch up. More than a timer's usual lateness; it is also the largest burst.
_CATCH_UP_S = 0.02

_CHUNK_S = 0.005
_MIN_CHUNK_BYTES = 64
_MAX_CHUNK_BYTES = 1 << 20


class RateLimiter:
    """One per link, shared by all of its connections."""

    def __init__(self, bytes_per_s: float) -> None:
        assert bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        self._busy_until_s = float("-inf")

    @property
    def chunk_bytes(self) -> int:
        """How much a connection asks for at a time: little, so that others get their turn and the rate is even."""
        return int(min(max(self._bytes_per_s * _CHUNK_S, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES))

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """Grant `size_bytes`; they may be sent after the returned time, which is when a real link would have carried them.

        In any span of T seconds at most `(T + 0.02) * bytes_per_s` bytes, and one chunk per connection, are let through.
        """
        # A link that was idle owes nothing: credit would let probes and short transfers see more than the limit.
        # A sender that comes a little late was not idle, it overslept.
        overslept = now_s - self._busy_until_s <= _CATCH_UP_S
        start_s = self._busy_until_s if overslept else now_s
        self._busy_until_s = start_s + size_bytes / self._bytes_per_s
        return max(0.0, self._busy_until_s - now_s)
