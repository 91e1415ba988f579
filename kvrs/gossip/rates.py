"""How many packets are looked at: token buckets per source and in all. Pure: `now_s` is an argument.

Looking costs a hash of the packet, so it is rationed before anybody has proved anything. A source from which an authentic packet
came has a bucket of its own; all others share one that is much smaller than the total, so a flood from strangers costs members
nothing. Who forges the address of a member can use up that member's bucket, and no other.
"""

from collections import OrderedDict
from dataclasses import dataclass

Address = tuple[str, int]  # A numeric address: nothing is looked up by name.

_MAX_SOURCES = 4096


class TokenBucket:
    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._at_s = burst, now_s

    def take(self, now_s: float) -> bool:
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Packets per second; each bucket holds what comes in `burst_s`. A member of 1,000 hears about 50 packets per second."""

    member_per_s: float = 200.0
    strangers_per_s: float = 500.0
    total_per_s: float = 5000.0
    burst_s: float = 2.0


class ReceiveRates:
    def __init__(self, rates: Rates, now_s: float) -> None:
        self._rates = rates
        self._total = self._bucket(rates.total_per_s, now_s)
        self._strangers = self._bucket(rates.strangers_per_s, now_s)
        self._members: OrderedDict[Address, TokenBucket] = OrderedDict()

    @property
    def sources(self) -> int:
        return len(self._members)

    def admit(self, source: Address, now_s: float) -> bool:
        """Whether to look at one more packet from there."""
        return self._members.get(source, self._strangers).take(now_s) and self._total.take(now_s)

    def trust(self, source: Address, now_s: float) -> None:
        """An authentic packet came from there. Whoever was silent for longest is a stranger again when there are too many."""
        if source in self._members:
            self._members.move_to_end(source)
            return
        self._members[source] = self._bucket(self._rates.member_per_s, now_s)
        if len(self._members) > _MAX_SOURCES:
            self._members.popitem(last=False)

    def _bucket(self, per_s: float, now_s: float) -> TokenBucket:
        return TokenBucket(per_s, max(1.0, per_s * self._rates.burst_s), now_s)
