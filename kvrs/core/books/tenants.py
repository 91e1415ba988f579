"""Limits of one proxy: the open streams of a tenant, and the failed keys of a client address."""

from collections import OrderedDict

from kvrs.config.tenants import TenantSettings

RETRY_S = 1.0  # `Retry-After` for a tenant at its limit.
# Token bucket of failed keys per address: a burst of ten, then one per second.
_MAX_GUESSES = 10.0
_GUESSES_PER_S = 1.0
_MAX_ADDRESSES = 4096


class TenantMeter:
    """Counts the open streams of one tenant. A change of `limits` closes no open stream."""

    def __init__(self, limits: TenantSettings) -> None:
        self.open_streams = 0
        self.refused = 0
        self.limits = limits

    def take(self, streams: int) -> bool:
        """Count streams as open; return False, counting none, if the limit would be exceeded."""
        most = self.limits.streams
        if most is not None and self.open_streams + streams > most:
            self.refused += 1
            return False
        self.open_streams += streams
        return True

    def give(self, streams: int) -> None:
        self.open_streams -= streams


class GuessLimit:
    """Limits the rate of failed keys per address. The table is bounded; the address with the oldest
    failure is forgotten first.
    """

    def __init__(self) -> None:
        # The remaining guesses of an address after its last failure, and the time of that failure.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, address: str, now_s: float) -> float:
        """Return the time until the address may try again; 0: now."""
        return max(0.0, 1.0 - self._left_at(address, now_s)) / _GUESSES_PER_S

    def guess(self, address: str, now_s: float) -> float:
        """Note a failed key if the address may try now; return `wait_s`."""
        if not (wait_s := self.wait_s(address, now_s)):
            self.note_failure(address, now_s)
        return wait_s

    def note_failure(self, address: str, now_s: float) -> None:
        left = self._left_at(address, now_s) - 1.0
        self._left.pop(address, None)
        self._left[address] = left, now_s
        if len(self._left) > _MAX_ADDRESSES:
            self._left.popitem(last=False)

    def _left_at(self, address: str, now_s: float) -> float:
        left, failed_s = self._left.get(address, (_MAX_GUESSES, now_s))
        return min(_MAX_GUESSES, left + (now_s - failed_s) * _GUESSES_PER_S)
