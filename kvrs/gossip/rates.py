"""Limits on the packets that are authenticated: token buckets per source and in total. Pure.

Authentication costs a hash of the packet, so it is limited before anything is known of the sender.
A source from which an authentic packet came has a bucket of its own for packets that echo the run
of this process; all other packets share one that is much smaller than the total. So a flood costs
members nothing, whatever source addresses it forges, unless the attacker reads their packets.
"""

from collections import OrderedDict
from dataclasses import dataclass

Address = tuple[str, int]  # Numeric: no name is looked up.

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
    """Packets per second; each bucket holds those of `burst_s`. A member of 1,000 receives about 50
    packets per second.
    """

    member_per_s: float = 200.0
    unknown_per_s: float = 500.0
    total_per_s: float = 5000.0
    burst_s: float = 2.0


class ReceiveRates:
    def __init__(self, rates: Rates, now_s: float) -> None:
        self._rates = rates
        self._total = self._bucket(rates.total_per_s, now_s)
        self._unknown = self._bucket(rates.unknown_per_s, now_s)
        self._members: OrderedDict[Address, TokenBucket] = OrderedDict()

    @property
    def sources(self) -> int:
        return len(self._members)

    def admit(self, source: Address, is_answer: bool, now_s: float) -> bool:
        """One more packet from this source may be authenticated; `is_answer`: it echoes the run of
        this process.
        """
        own = self._members.get(source) if is_answer else None
        return (own or self._unknown).take(now_s) and self._total.take(now_s)

    def on_authentic(self, source: Address, now_s: float) -> None:
        """Give this source a bucket of its own, in place of that which is silent for longest when
        there are too many.
        """
        if source in self._members:
            self._members.move_to_end(source)
            return
        self._members[source] = self._bucket(self._rates.member_per_s, now_s)
        if len(self._members) > _MAX_SOURCES:
            self._members.popitem(last=False)

    def _bucket(self, per_s: float, now_s: float) -> TokenBucket:
        return TokenBucket(per_s, max(1.0, per_s * self._rates.burst_s), now_s)
