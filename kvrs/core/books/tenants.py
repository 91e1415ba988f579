"""Limits of one proxy: the open streams of a tenant, and the failed keys of a client address."""

from collections import OrderedDict
from typing import Self

from kvrs.config.security import TenantSettings

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
        # Shares of streams that requests may take over, by key of the request.
        self._keyed: dict[str, StreamShare] = {}

    def take(self, streams: int, key: str | None = None) -> "StreamShare | None":
        """Return the share of a request for this number of streams; None, counting none: the limit
        would be exceeded. Requests with the same key are for the same stream, of which one attempt
        runs at a time: they hold one share.
        """
        if key is not None and (share := self._keyed.get(key)) is not None:
            share.holders += 1
            return share
        most = self.limits.streams
        if most is not None and self.open_streams + streams > most:
            self.refused += 1
            return None
        self.open_streams += streams
        share = StreamShare(self, streams, key)
        if key is not None:
            self._keyed[key] = share
        return share

    def forget_key(self, share: "StreamShare") -> None:
        """Let the next request with the share's key take a share of its own."""
        if share.key is not None and self._keyed.get(share.key) is share:
            del self._keyed[share.key]


class StreamShare:
    """The streams of a request in its tenant's limit. They belong to the stream and not to the
    request: they count as open until every holder has released the share, once each.
    """

    __slots__ = ("_meter", "_outliving", "holders", "key", "streams")

    def __init__(self, meter: TenantMeter, streams: int, key: str | None) -> None:
        self._meter = meter
        self.streams, self.key, self.holders = streams, key, 1
        self._outliving = 0

    def hold(self) -> Self:
        """Add a holder, such as the calls of an attempt."""
        assert self.holders
        self.holders += 1
        return self

    def outlive(self) -> None:
        """Note that a holder outlives its attempt, such as calls that are given up while their KV
        is transferred. The stream goes on by the same share, at another request too. From the
        second such holder on a later request needs a share of its own, because each could leave
        calls behind.
        """
        self._outliving += 1
        if self._outliving > 1:
            self._meter.forget_key(self)

    def release(self, *, outlived: bool = False) -> None:
        """End one holder's part; the last one gives the streams back to the limit. `outlived`: of a
        holder of `outlive`.
        """
        assert self.holders, "a share is released once by each holder"
        self.holders -= 1
        self._outliving -= outlived
        if not self.holders:
            self._meter.forget_key(self)
            self._meter.open_streams -= self.streams


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
