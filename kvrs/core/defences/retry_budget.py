"""The retry budget of one proxy: a token bucket that keeps retries below a share of starts.

Attempts that follow a failure load the survivors of it; where these fail under that load, each
failure asks for more. A bucket that holds one token per open stream lets all victims of a loss go
on at once, and what fails again after that at the rate of the refill.
"""

# Tokens for each new stream: a fifth of the starts may be tried again.
SHARE = 0.2
# The bucket holds a token for each open stream, and refills within so many seconds on its own.
REFILL_S = 10.0
LEAST_TOKENS = 100.0
# The last part of the bucket is kept for streams that have begun.
_KEPT_SHARE = 0.25


class RetryBudget:
    def __init__(self) -> None:
        self.used = 0.0  # Tokens that are not refilled yet; more than there are: given in advance.
        self._refilled_s = 0.0
        self.delayed = 0  # Attempts that had to wait for a token.

    def started(self, open_streams: int, now_s: float) -> None:
        """A new stream has its first attempt."""
        self._refill(_capacity(open_streams), now_s)
        self.used = max(0.0, self.used - SHARE)

    def take(self, open_streams: int, now_s: float) -> float:
        """The token of an attempt of a stream that has begun: how long until it may be used. Tokens
        are given out in advance, in the order in which they are asked for.
        """
        capacity = _capacity(open_streams)
        self._refill(capacity, now_s)
        self.used += 1.0
        wait_s = max(0.0, self.used - capacity) * REFILL_S / capacity
        self.delayed += wait_s > 0
        return wait_s

    def take_spare(self, open_streams: int, now_s: float) -> bool:
        """The token of an attempt of a stream that has not begun, if there are enough for the
        others.
        """
        capacity = _capacity(open_streams)
        self._refill(capacity, now_s)
        if self.used + 1.0 > (1 - _KEPT_SHARE) * capacity:
            self.delayed += 1
            return False
        self.used += 1.0
        return True

    def snapshot(self, open_streams: int) -> dict[str, float]:
        """Plain data for people."""
        return {
            "used": self.used,
            "capacity": _capacity(open_streams),
            "delayed": self.delayed,
        }

    def _refill(self, capacity: float, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._refilled_s)
        self.used = max(0.0, self.used - capacity * passed_s / REFILL_S)
        self._refilled_s = now_s


def _capacity(open_streams: int) -> float:
    return max(LEAST_TOKENS, open_streams)
