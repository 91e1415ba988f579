"""Measurement of links by hand-offs that an engine fetches and counts itself, as vLLM does with
NIXL.

Pure: times are arguments. The proxy knows when its calls were sent and when their first tokens
came; the engine counts transfers, their bytes and seconds, but not their sources:

    call A    sent |-queue-|== transfer ==|-step-| token
    call B               sent |-queue-|== transfer ==|-step-| token
    busy period    |---------------------------------|

A link is busy for at most the union of the calls of its hand-offs, and for at most the seconds of
their transfers, which count once for each that is under way. So there are two bounds of the rate
from below, and the larger one counts:

- bytes / union of the calls: close where hand-offs overlap;
- bytes / seconds of the transfers (of the ranks of a hand-off, which read at the same time, those
  of one): close where they do not, also if calls wait in the engine's queue.

Bytes are those of the geometry, at most those that the engine has counted, which are fewer where
its prefix cache has a part. Hand-offs of another proxy take time on the link, and their bytes count
for nothing: with two proxies the rate is what this one's hand-offs get.

A sample covers whole busy periods. It is taken within one after `_WAIT_S`, or once the link must
have become slower: if its rate is lower than the estimate even with all bytes of the hand-offs that
are still open. Then half of these bytes are assumed to have come.

**Latency** is not bandwidth: an engine sees the end of a transfer at its next step, and the token
comes a step later. It is fitted with the rate, seconds = latency * parts + bytes / rate, by least
squares over the last samples; a part is a transfer, or a busy period. The fit needs hand-offs of
different lengths: until it has them, the latency is 0 and the rate contains it, which is right for
the lengths that come. Latency stays while the rate changes, unless a transfer takes less than it. A
sample is taken once its time without latency is larger than the latency's noise, since a wait for a
step may have any length; after `_MOST_PARTS` that noise counts as time of the link. So where
transfers take less than a step, the rate is hardly known.

The samples go to a `LinkMeter`: how fast a change is believed, and what spread remains, is the same
for all links.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import NamedTuple

from kvrs.ids import NodeId
from kvrs.sums import sum_in_order
from kvrs.transfer.meter import STEP, LinkMeter, Measurement

_WAIT_S = 5.0  # Most time of an open busy period before a sample.

_KEPT = 0.99  # Weight of a sample in the fit, over that of the next one.
_LEAST_SAMPLES = 8
# Least variance of the bytes per part, over the mean of their squares, for a fit.
_LEAST_VARIETY = 0.02
# Standard deviation of a wait between 0 and twice its mean, over the mean.
_NOISE = 1 / sqrt(3)
_CLEAR = 3.0  # Time of a sample without latency, in standard deviations of its latency.
_MOST_PARTS = 64
# Least bytes of a sample, over the usual bytes of a part: less is mostly latency.
_LEAST_SHARE = 0.5
_USUAL = 0.2  # Weight of the newest sample in the usual bytes.


class Pulled(NamedTuple):
    """Transfers that an engine has completed since its start: number, bytes and seconds."""

    transfers: float = 0.0
    size_bytes: float = 0.0
    seconds: float = 0.0  # Sum of the transfers' durations, also of simultaneous ones.

    def plus(self, more: "Pulled", share: float = 1.0) -> "Pulled":
        return Pulled(*(one + share * other for one, other in zip(self, more, strict=True)))


@dataclass(slots=True, eq=False)
class FetchedHandOff:
    """A hand-off that the engine fetches, or has fetched since its counts were last read."""

    source: NodeId
    size_bytes: float  # By the geometry, with what the engine's prefix cache has.
    ranks: int
    began_s: float  # The call is sent.
    over_s: float | None = None  # The first token has come, or the call has ended without one.


class _Sample(NamedTuple):
    """Bytes that came in a time, with the latency of so many parts."""

    parts: float = 0.0
    size_bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, more: "_Sample") -> "_Sample":
        return _Sample(*(one + other for one, other in zip(self, more, strict=True)))


_NOTHING = _Sample()


@dataclass(slots=True)
class _Latency:
    """The latency of a part, in seconds; and the samples that have not given a rate yet."""

    latency_s: float = 0.0
    waiting: _Sample = _NOTHING
    usual_bytes: float = 0.0  # Moving average of a part's bytes.
    # Sums over the samples, each with weight 1 / parts.
    samples: int = 0
    sums: _Sample = _NOTHING
    squared_bytes: float = 0.0
    bytes_by_seconds: float = 0.0

    def rate(self, sample: _Sample, before: float | None) -> float | None:
        """Take a sample; return the rate in bytes per second of all that waited; None: they do not
        tell one yet. `before`: the rate of the last ones.
        """
        if sample.parts:
            self._fit(sample)
        parts, size_bytes, seconds = sample
        if before is not None and size_bytes > STEP * before * seconds:
            # The rate is higher than the estimate even if all time was the link's.
            self.waiting = _NOTHING
            if self.latency_s:  # The fit was made at another rate.
                self._begin_anew(seconds / max(1.0, parts))
            return size_bytes / seconds
        self.waiting = parts, size_bytes, seconds = self.waiting.plus(sample)
        noise_s = _NOISE * self.latency_s * sqrt(parts)
        left_s = seconds - self.latency_s * parts
        is_enough = left_s >= _CLEAR * noise_s and size_bytes >= _LEAST_SHARE * self.usual_bytes
        if not is_enough and parts < _MOST_PARTS:
            return None
        self.waiting = _NOTHING
        left_s = max(left_s, _CLEAR * noise_s)
        return size_bytes / left_s if left_s > 0 else None

    def _begin_anew(self, most_s: float) -> None:
        self.latency_s = min(self.latency_s, most_s)
        self.samples, self.sums = 0, _NOTHING
        self.squared_bytes = self.bytes_by_seconds = 0.0

    def _fit(self, sample: _Sample) -> None:
        parts, size_bytes, seconds = sample
        usual = size_bytes / parts
        self.usual_bytes += (_USUAL if self.usual_bytes else 1.0) * (usual - self.usual_bytes)
        self.samples += 1
        self.sums = _Sample(*(_KEPT * each for each in self.sums)).plus(sample)
        self.squared_bytes = _KEPT * self.squared_bytes + usual * size_bytes
        self.bytes_by_seconds = _KEPT * self.bytes_by_seconds + usual * seconds
        all_parts, all_bytes, all_s = self.sums
        variety = self.squared_bytes * all_parts - all_bytes**2
        if (
            self.samples < _LEAST_SAMPLES
            or variety < _LEAST_VARIETY * self.squared_bytes * all_parts
        ):
            return
        fitted_s = (self.squared_bytes * all_s - all_bytes * self.bytes_by_seconds) / variety
        self.latency_s = min(max(0.0, fitted_s), all_s / all_parts)


@dataclass(slots=True)
class _Link:
    """A link since its last sample."""

    since_s: float = -inf
    ended: list[FetchedHandOff] = field(default_factory=list)
    came: _Sample = _NOTHING  # By the engine's counts; its parts are hand-offs.
    # Bytes that the last sample has assumed as carried of hand-offs that were open.
    ahead_bytes: float = 0.0
    by_transfers: _Latency = field(default_factory=_Latency)
    by_periods: _Latency = field(default_factory=_Latency)

    def begin_anew(self, now_s: float, ahead_bytes: float) -> None:
        self.since_s, self.came, self.ahead_bytes = now_s, _NOTHING, ahead_bytes
        self.ended.clear()


class HandOffMeter:
    """Meter of the links to one engine, by source node."""

    def __init__(self) -> None:
        self._open: list[FetchedHandOff] = []
        self._links: dict[NodeId, _Link] = {}
        self._meter = LinkMeter(0)
        self._counted: tuple[Pulled, float | None] | None = None
        # Counts of transfers whose hand-offs have not ended: an engine counts a transfer before
        # the proxy hears the first token behind it.
        self._came = Pulled()

    def begins(self, pull: FetchedHandOff) -> None:
        """Note a hand-off whose request is about to be sent; `over_s` is set at its end."""
        self._open.append(pull)

    def counted(self, now: Pulled, now_s: float, process: float | None = None) -> None:
        """Take an engine's counts, and measure by their increase and the hand-offs that have ended.
        There is no increase if `process`, which identifies the engine's process, has changed.
        """
        before, self._counted = self._counted, (now, process)
        over = [pull for pull in self._open if pull.over_s is not None]
        self._open = [pull for pull in self._open if pull.over_s is None]
        increase = Pulled() if before is None else now.plus(before[0], -1.0)
        if before is None or before[1] != process or min(increase) < 0:
            self._came = Pulled()
            self._pass_over({pull.source for pull in over}, now_s)
            return
        self._came = self._came.plus(increase)
        if over:
            self._take(over, now_s)
        if not self._open:
            self._came = Pulled()  # The rest was transferred for others.

    def measurements(self, now_s: float) -> dict[NodeId, Measurement]:
        return self._meter.measurements(now_s)

    def _pass_over(self, sources: Iterable[NodeId], now_s: float) -> None:
        """Measure nothing of the time until now, in which the engine has counted nothing."""
        for source in sources:
            link = self._links.setdefault(source, _Link())
            link.begin_anew(now_s, self._open_bytes(source) / 2)

    def _open_bytes(self, source: NodeId) -> float:
        return sum_in_order(pull.size_bytes for pull in self._open if pull.source == source)

    def _take(self, over: list[FetchedHandOff], now_s: float) -> None:
        """Divide the engine's counts among the hand-offs that have ended, and measure."""
        by_source: dict[NodeId, list[FetchedHandOff]] = {}
        for pull in over:
            by_source.setdefault(pull.source, []).append(pull)
        own_bytes = sum_in_order(pull.size_bytes for pull in over)
        if min(self._came) <= 0 or own_bytes <= 0:
            self._pass_over(by_source, now_s)
            return
        share = min(1.0, own_bytes / self._came.size_bytes)
        came = Pulled().plus(self._came, share)
        self._came = self._came.plus(came, -1.0)
        ranks = min(max(pull.ranks for pull in over), max(1.0, came.transfers / len(over)))
        loaded = came.size_bytes / own_bytes
        for source, pulls in by_source.items():
            link = self._links.setdefault(source, _Link())
            size_bytes = loaded * sum_in_order(pull.size_bytes for pull in pulls)
            # Seconds of several sources are not told apart: each link has all of them.
            link.came = link.came.plus(_Sample(len(pulls), size_bytes, came.seconds / ranks))
            link.ended += pulls
            self._measure(source, link, loaded, now_s)

    def _measure(self, source: NodeId, link: _Link, loaded: float, now_s: float) -> None:
        """Take a sample of a link, unless it is better to wait for the end of the busy period;
        `loaded` is the share of the bytes of hand-offs that is transferred.
        """
        pulls = [*link.ended, *(pull for pull in self._open if pull.source == source)]
        is_open = len(pulls) > len(link.ended)
        busy_s, periods = _union(
            ((pull.began_s, pull.over_s or now_s) for pull in pulls), link.since_s
        )
        open_bytes = loaded * self._open_bytes(source)
        most_bytes = link.came.size_bytes + open_bytes - link.ahead_bytes
        before = self._meter.estimates().get(source)
        # The rate is lower than the estimate even if all that is open has come.
        is_lower = before is not None and most_bytes * STEP < before * busy_s
        if is_open and busy_s < _WAIT_S and not is_lower:
            return
        by_periods = _Sample(periods, most_bytes - open_bytes / 2, busy_s)
        is_closer = by_periods.size_bytes * link.came.seconds > link.came.size_bytes * busy_s
        latency = link.by_periods if is_closer else link.by_transfers
        rate = latency.rate(by_periods if is_closer else link.came, before)
        link.begin_anew(now_s, open_bytes / 2)
        if rate is not None:
            self._meter.sampled(source, rate, now_s)


def _union(spans: Iterable[tuple[float, float]], since_s: float) -> tuple[float, int]:
    """Return the length of the union of spans from `since_s` on, and the number of its parts that
    begin then.
    """
    length_s, begun, until_s = 0.0, 0, since_s
    for start_s, end_s in sorted(spans):
        if start_s >= until_s:
            begun, length_s = begun + 1, length_s + end_s - start_s
        elif end_s > until_s:
            length_s += end_s - until_s
        until_s = max(until_s, end_s)
    return length_s, begun
