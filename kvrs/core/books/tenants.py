"""Use of a tenant's limits at one proxy, and addresses that guess at keys. Pure: every question
about a moment takes the time.
"""

from collections import OrderedDict

import msgspec

from kvrs.config.tenants import TenantSettings

RETRY_S = 1.0  # One of the tenant's own requests may have ended by then.
# Failed keys of one address: so many at once, then one per second.
_MAX_GUESSES = 10.0
_GUESSES_PER_S = 1.0
_MAX_ADDRESSES = 4096


class Excess(msgspec.Struct, frozen=True):
    """A limit that a request exceeds."""

    kind: str  # "streams" or "bytes", as the type of OpenAI's error.
    message: str


class TenantMeter:
    """The use of one tenant: streams and bytes count while they are open. Other `limits` may be set
    at any time; what is open stays open.
    """

    def __init__(self, limits: TenantSettings) -> None:
        self.open_streams = 0
        self.open_bytes = 0
        self.refused = 0
        self.limits = limits

    def take_bytes(self, size_bytes: int) -> Excess | None:
        """Take the bytes of a body before it is read."""
        most = self.limits.open_bytes
        if most is not None and self.open_bytes + size_bytes > most:
            return self._refuse("open_bytes", "bytes", most)
        self.open_bytes += size_bytes
        return None

    def give_bytes(self, size_bytes: int) -> None:
        self.open_bytes -= size_bytes

    def take_streams(self, streams: int) -> Excess | None:
        most = self.limits.streams
        if most is not None and self.open_streams + streams > most:
            return self._refuse("streams", "streams", most)
        self.open_streams += streams
        return None

    def give_streams(self, streams: int) -> None:
        self.open_streams -= streams

    def _refuse(self, limit: str, kind: str, most: int) -> Excess:
        self.refused += 1
        return Excess(kind, f"limit of {kind} reached: {limit} is {most}")


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
