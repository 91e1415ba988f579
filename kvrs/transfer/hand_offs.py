"""Measurement of links by hand-offs that an engine performs and counts itself, as vLLM does with
NIXL.

Pure: `now_s` is an argument. The engine counts transfers, their bytes and seconds, but not their
sources; the proxy knows the source nodes of its own hand-offs. The counts between two reads give a
sample of

    bytes / (seconds / ranks)

since the ranks of one hand-off read at the same time: as many as there were transfers per hand-off,
and no more than ranks at prefill. It is a lower bound: hand-offs that share a link have the time of
each, and an engine sees the end of a transfer at its next step.

- From one node: the sample is that node's.
- From several nodes: their rates are scaled by one factor, with which they explain the seconds of
  all. A node without a rate gets that of all together.
- Where less than `_OWN_SHARE` of the bytes is this proxy's, and hand-offs have come from several
  nodes, the sample tells nothing of any of them.

The rate of a link is the mean of its samples, each with the weight bytes * exp(-age / `MEMORY_S`).
So a small transfer weighs little, and so does one that stalled: its rate is near 0, however long it
took, where the sum of all bytes over all seconds would be that of the stall alone.
"""

from dataclasses import dataclass
from math import exp
from typing import NamedTuple

from kvrs.ids import NodeId
from kvrs.sums import sum_in_order
from kvrs.transfer.meter import Measurement

MEMORY_S = 30.0
_FIRST_SPREAD = 0.25  # Spread after the first sample, as a share of the rate.
_OWN_SHARE = 0.8


class Pulled(NamedTuple):
    """Transfers that an engine has completed since its start: number, bytes and seconds."""

    transfers: float
    size_bytes: float
    seconds: float  # Sum of the transfers' durations, also of simultaneous ones.


@dataclass(slots=True, eq=False)
class FetchedHandOff:
    """A hand-off that the engine fetches, or has fetched since its counts were last read."""

    source: NodeId
    size_bytes: float  # Predicted size, without what the engine's prefix cache has.
    ranks: int
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Rate:
    """Mean rate of a link and its spread; `measured_s`: time of the last sample."""

    bytes_per_s: float
    spread: float  # Mean absolute deviation of the samples from the rate, in bytes per second.
    measured_s: float
    # Bytes of the samples, weighted by their age: the weight of both means.
    size_bytes: float = 0.0

    @classmethod
    def of(cls, bytes_per_s: float, now_s: float) -> "_Rate":
        """Make the rate of a link whose first sample this is."""
        return cls(bytes_per_s, _FIRST_SPREAD * bytes_per_s, now_s)

    def add(self, size_bytes: float, bytes_per_s: float, now_s: float) -> None:
        self.size_bytes *= exp(-max(0.0, now_s - self.measured_s) / MEMORY_S)
        is_first = self.size_bytes == 0.0
        self.size_bytes += size_bytes
        share, off = size_bytes / self.size_bytes, bytes_per_s - self.bytes_per_s
        self.bytes_per_s += share * off
        if not is_first:
            self.spread += share * (abs(off) - self.spread)
        self.measured_s = now_s


class HandOffMeter:
    """Meter of the links to one engine, by source node."""

    def __init__(self) -> None:
        self._pulls: list[FetchedHandOff] = []
        self._rates: dict[NodeId, _Rate] = {}
        self._sources: set[NodeId] = set()
        self._counted: tuple[Pulled, float | None] | None = None
        # Last increase that was read while hand-offs were open and none of them was over: an engine
        # counts a transfer before the proxy hears the first token behind it.
        self._early: Pulled | None = None

    def begins(self, pull: FetchedHandOff) -> None:
        """Note a hand-off whose request is about to be sent; `is_over` is set at its end."""
        self._pulls.append(pull)
        self._sources.add(pull.source)

    def counted(self, now: Pulled, now_s: float, process: float | None = None) -> None:
        """Take an engine's counts, and measure by their increase since the last call, or by an
        earlier increase if there is none. There is no increase if `process`, which identifies the
        engine's process, has changed.
        """
        before, self._counted = self._counted, (now, process)
        pulls = self._pulls
        self._pulls = [pull for pull in pulls if not pull.is_over]
        early, self._early = self._early, None
        if before is None or before[1] != process:
            return
        increase = Pulled(*(new - old for new, old in zip(now, before[0], strict=True)))
        came = increase if min(increase) > 0 else early
        if pulls and len(pulls) == len(self._pulls):
            self._early = came
        elif came is not None:
            self._take(came, pulls, now_s)

    def measurements(self, now_s: float) -> dict[NodeId, Measurement]:
        return {
            source: Measurement(rate.bytes_per_s, rate.spread, max(0.0, now_s - rate.measured_s))
            for source, rate in self._rates.items()
        }

    def _take(self, came: Pulled, pulls: list[FetchedHandOff], now_s: float) -> None:
        over = [pull for pull in pulls if pull.is_over]
        if not over:
            return
        own_bytes = sum_in_order(pull.size_bytes for pull in over)
        if len(self._sources) > 1 and own_bytes < _OWN_SHARE * came.size_bytes:
            return
        ranks = min(max(pull.ranks for pull in over), max(1.0, came.transfers / len(over)))
        seconds = came.seconds / ranks
        shares = dict.fromkeys((pull.source for pull in pulls), 0.0)
        for pull in over:
            shares[pull.source] += pull.size_bytes / own_bytes
        usual = came.size_bytes / seconds
        rates = {
            source: self._rates[source].bytes_per_s if source in self._rates else usual
            for source in shares
        }
        predicted_s = sum_in_order(
            share * came.size_bytes / rates[source] for source, share in shares.items()
        )
        for source, share in shares.items():
            if share:
                sample = rates[source] * predicted_s / seconds
                rate = self._rates.setdefault(source, _Rate.of(sample, now_s))
                rate.add(share * came.size_bytes, sample, now_s)
