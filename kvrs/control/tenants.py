"""How much of its limits a tenant has used, at one proxy. Pure: every question takes the time."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from kvrs.config.tenants import TenantSettings

_RETRY_S = 1.0  # Until one of the tenant's own requests may have ended.
# Failed keys of one address: so many at once, then one per second.
_MOST_GUESSES = 10.0
_GUESSES_PER_S = 1.0
_MOST_ADDRESSES = 4096


class RateBucket:
    """A token bucket: it refills at `rate_per_s` up to its capacity, and may go below zero by what
    was found out too late.
    """

    __slots__ = ("_level", "_updated_s", "capacity", "rate_per_s")

    def __init__(self, rate_per_s: float, capacity: float, now_s: float) -> None:
        self.rate_per_s = rate_per_s
        self.capacity = capacity
        self._level = capacity
        self._updated_s = now_s

    def level(self, now_s: float) -> float:
        passed_s = max(0.0, now_s - self._updated_s)
        self._level = min(self.capacity, self._level + passed_s * self.rate_per_s)
        self._updated_s = max(self._updated_s, now_s)
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        """A negative amount gives back."""
        self._level = min(self.capacity, self.level(now_s) - amount)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much is there, or the bucket is full; 0: it is there now."""
        return max(0.0, min(amount, self.capacity) - self.level(now_s)) / self.rate_per_s

    def resize(self, rate_per_s: float, capacity: float, now_s: float) -> None:
        """What was used stays used."""
        used = self.capacity - self.level(now_s)
        self.rate_per_s, self.capacity, self._level = rate_per_s, capacity, capacity - used


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that a request exceeds."""

    limit: str  # Its name in the key file.
    kind: str  # "requests", "tokens", "streams" or "bytes", as the type of OpenAI's error.
    message: str
    retry_after_s: float


class TenantMeter:
    """The use of one tenant. Requests are counted as they come, streams and bytes while they are
    open, tokens by an estimate that is settled at the end.
    """

    def __init__(self, limits: TenantSettings, now_s: float) -> None:
        self.open_streams = 0
        self.open_bytes = 0
        self.refused = 0
        self.limits = limits
        self._requests: RateBucket | None = None
        self._tokens: RateBucket | None = None
        self.change(limits, now_s)

    def change(self, limits: TenantSettings, now_s: float) -> None:
        """Take other limits; what is open stays open."""
        self.limits = limits
        per_s, per_min = limits.requests_per_s, limits.tokens_per_min
        self._requests = _resized(self._requests, per_s, max(1.0, per_s or 0.0), now_s)
        self._tokens = _resized(
            self._tokens, None if per_min is None else per_min / 60, float(per_min or 0), now_s
        )

    def take_request(self, now_s: float) -> Excess | None:
        bucket = self._requests
        if bucket is None:
            return None
        if wait_s := bucket.wait_s(1.0, now_s):
            return self._refuse("requests_per_s", "requests", bucket.rate_per_s, wait_s)
        bucket.take(1.0, now_s)
        return None

    def take_bytes(self, size_bytes: int) -> Excess | None:
        """Take the bytes of a body before it is read."""
        most = self.limits.open_bytes
        if most is not None and self.open_bytes + size_bytes > most:
            return self._refuse("open_bytes", "bytes", most, _RETRY_S)
        self.open_bytes += size_bytes
        return None

    def give_bytes(self, size_bytes: int) -> None:
        self.open_bytes -= size_bytes

    def take_streams(self, streams: int, tokens: int, now_s: float) -> Excess | None:
        """`tokens`: as many as the request may need."""
        most = self.limits.streams
        if most is not None and self.open_streams + streams > most:
            return self._refuse("streams", "streams", most, _RETRY_S)
        if self._tokens is not None:
            if wait_s := self._tokens.wait_s(tokens, now_s):
                limit = self.limits.tokens_per_min
                assert limit is not None
                return self._refuse("tokens_per_min", "tokens", limit, wait_s)
            self._tokens.take(min(tokens, self._tokens.capacity), now_s)
        self.open_streams += streams
        return None

    def end_streams(self, streams: int, expected: int, used: int, now_s: float) -> None:
        """Streams have ended; `expected` tokens were taken for them."""
        self.open_streams -= streams
        if self._tokens is not None:
            self._tokens.take(used - min(expected, self._tokens.capacity), now_s)

    def rates(self, now_s: float) -> list[tuple[str, int, int, float]]:
        """Of each limited rate its kind, its burst, what is left of it, and seconds until it is
        full.
        """
        return [
            (
                kind,
                int(bucket.capacity),
                max(0, int(bucket.level(now_s))),
                bucket.wait_s(math.inf, now_s),
            )
            for kind, bucket in (("requests", self._requests), ("tokens", self._tokens))
            if bucket is not None
        ]

    def _refuse(self, limit: str, kind: str, most: float, wait_s: float) -> Excess:
        self.refused += 1
        return Excess(limit, kind, f"limit of {kind} reached: {limit} is {most:g}", wait_s)


def _resized(
    bucket: RateBucket | None, rate_per_s: float | None, capacity: float, now_s: float
) -> RateBucket | None:
    if rate_per_s is None:
        return None
    if bucket is None:
        return RateBucket(rate_per_s, capacity, now_s)
    bucket.resize(rate_per_s, capacity, now_s)
    return bucket


class GuessLimit:
    """Slows failed keys down, by address. Bounded: the address that failed longest ago is
    forgotten first.
    """

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, RateBucket] = OrderedDict()

    def wait_s(self, address: str, now_s: float) -> float:
        """How long the address has to wait for its next try; 0: none."""
        bucket = self._buckets.get(address)
        return 0.0 if bucket is None else bucket.wait_s(1.0, now_s)

    def guess(self, address: str, now_s: float) -> float:
        """Note a failed key; returns how long the address has to wait before one counts, 0: not at
        all.
        """
        if not (wait_s := self.wait_s(address, now_s)):
            self.note_failure(address, now_s)
        return wait_s

    def note_failure(self, address: str, now_s: float) -> None:
        bucket = self._buckets.pop(address, None) or RateBucket(
            _GUESSES_PER_S, _MOST_GUESSES, now_s
        )
        bucket.take(1.0, now_s)
        self._buckets[address] = bucket
        if len(self._buckets) > _MOST_ADDRESSES:
            self._buckets.popitem(last=False)
