"""Open streams of a tenant at one proxy, and addresses that guess at keys. Pure: every question
about a moment takes the time.
"""

from collections import OrderedDict

from kvrs.config.tenants import TenantSettings

RETRY_S = 1.0  # One of the tenant's own requests may have ended by then.
# Failed keys of one address: so many at once, then one per second.
_MAX_GUESSES = 10.0
_GUESSES_PER_S = 1.0
_MAX_ADDRESSES = 4096


class TenantMeter:
    """The open streams of one tenant. Other `limits` may be set at any time; what is open stays
    open.
    """

    def __init__(self, limits: TenantSettings) -> None:
        self.open_streams = 0
        self.refused = 0
        self.limits = limits

    def take(self, streams: int) -> bool:
        """Count streams as open; False: the limit would be exceeded."""
        most = self.limits.streams
        if most is not None and self.open_streams + streams > most:
            self.refused += 1
            return False
        self.open_streams += streams
        return True

    def give(self, streams: int) -> None:
        self.open_streams -= streams


class GuessLimit:
    """Slows failed keys down, by address. Bounded: the address that failed longest ago is
    forgotten first.
    """

    def __init__(self) -> None:
        # Guesses that an address had left at its last failure, and the time of that.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, address: str, now_s: float) -> float:
        """Seconds that the address has to wait for its next try; 0: none."""
        return max(0.0, 1.0 - self._left_at(address, now_s)) / _GUESSES_PER_S

    def guess(self, address: str, now_s: float) -> float:
        """Note a failed key; returns how long the address has to wait before one counts, 0: not at
        all.
        """
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
