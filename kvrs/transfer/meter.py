"""Meter of the bandwidth of links, in bytes per second.

Pure: `now_s` is an argument. A link is busy while at least one answer is arriving over it; its rate
is what arrived in that time, by all transfers together, so the estimate is what the link can do and
not what one of several transfers got:

    transfer A   begin |=================| end
    transfer B            begin |==================| end
    busy period        |---------------------------|          rate = bytes of A and B / length

A transfer begins with the first byte of its answer: connecting, the hand-shake and the peer's
processing time are latency, not bandwidth, and the cost model counts them apart. A period ends with
the last byte that arrived, so a peer that dies silently does not make its link look slow.

Rate and spread are moving averages with a time constant T in seconds: a sample that ends t after
the one before it has the weight w = 1 - exp(-t / T), rate += w * (sample - rate), and the spread
follows |sample - rate| with 4 T, so that one step does not saturate it. Samples that keep to one
side of the rate have a larger weight, up to 1: the smoothed deviation over the smoothed absolute
deviation (the adaptive response rate of Trigg and Leach, 1967), which is 1 for a trend without
noise and near 0 for noise without a trend.

A step is believed at once: a sample that is far off is the new rate. The next one refutes it, if it
agrees with the rate before, which then holds again; else the spread begins anew. Until then the
spread after a step upwards is the step, so that decisions still count on the lower rate. They
take `lower_bound`: rate - spread - rate * DRIFT * sqrt(age).

Times are those of arrival, which may lie before the bytes are read, without those in which the
sender waited for the reader (`stream.py`). Probes are for links without traffic of their own:
long enough that a rate is seen in them, and all that are sent over a link together take no more
than a share of what it carries. Their first half is not measured. A probe that tells of another
rate, or is the first of all, is followed at once by one that takes `PROBE_S` at that rate; the next
pause is longer for it.

Measurement of links by hand-offs that an engine fetches and counts itself, as vLLM does with
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
from math import exp, inf, sqrt
from typing import NamedTuple

from kvrs.ids import NodeId
from kvrs.sums import sum_in_order

# Time constant of the moving average: after five of these the estimate is within 1 % of a rate that
# has changed.
TIME_CONSTANT_S = 2.0

# Duration of a probe at the estimated rate, its smallest size, and the share of a link that all
# probes take together. A link whose rate drops during a probe carries more than that share, and
# still less than 1 %.
PROBE_S = 0.03
PROBE_BYTES = 65536
PROBE_SHARE = 0.009

# Decisions subtract from the estimate its spread, and this share of it times the root of the
# seconds without a measurement; at least `LEAST_SHARE` of it remains.
DRIFT = 0.01
LEAST_SHARE = 0.1

# Shortest time of a sample; bytes that arrive in less time are dropped, since they measure the
# clock and the scheduler.
_MIN_SAMPLE_S = 1e-6

# Time after which a busy period, which has no end under constant traffic, gives a sample.
_MAX_SAMPLE_S = 0.1

_FIRST_SPREAD = 0.25  # Spread after the first sample, as a share of the rate.
_SPREAD_CONSTANTS = 4  # Time constant of the spread, as a multiple of `TIME_CONSTANT_S`.

# Factor between sample and estimate, in either direction, above which the sample is a step.
STEP = 1.5
# Weight of the newest sample in the two averages of deviations, by which a trend is told from
# noise.
_TREND = 0.1

# Factor from a probe's bytes to those on the link, with frames and packet headers.
_PROBE_OVERHEAD = 1.05
# Pause between probes of a link without an estimate: the last one gave no sample.
_BLIND_PAUSE_S = 10.0
_BLIND_GROWTH = 4  # Factor of a probe's size for each probe before it that gave no sample.
_MAX_BLIND_BYTES = 1 << 20
_MAX_BLIND = 4

_MAX_FOLLOW_UPS = 3  # Most follow-ups of one probe.
# Largest factor between a probe and its follow-up: a very short probe may tell far too high a rate.
_FOLLOW_UP_GROWTH = 8


class Measurement(NamedTuple):
    bytes_per_s: float
    spread: float  # Mean deviation of the samples from the estimate, in bytes per second.
    age_s: float  # Time since the last sample.


def lower_bound(measured: Measurement) -> float:
    """Return the rate in bytes per second on which decisions count; above 0 for a rate above 0.
    Links change like a random walk, so the margin grows with the root of the age.
    """
    rate, spread, age_s = measured
    margin = spread + rate * DRIFT * sqrt(max(0.0, age_s))
    return max(rate * LEAST_SHARE, rate - margin)


@dataclass(slots=True)
class _MeteredLink:
    transfers: int = 0
    since_s: float = 0.0  # Start of the sample being collected.
    last_s: float = 0.0  # Arrival of the last byte of that sample.
    bytes: int = 0
    bytes_per_s: float | None = None
    spread: float = 0.0
    deviation: float = 0.0  # Moving average of the samples' signed deviations from the estimate.
    deviation_size: float = 0.0  # Moving average of their absolute deviations.
    latest_bytes_per_s: float = 0.0  # Rate of the last sample alone.
    measured_s: float = -inf
    # The last sample was a step, or the first of all, and no later sample has confirmed it.
    is_doubtful: bool = False
    # Estimate and spread before the doubtful step; None: no step is in doubt.
    before: tuple[float, float] | None = None
    probed_s: float = -inf
    probe_bytes: int = 0  # Size of the last probe.
    probes: int = 0  # Length of the last series of probes that followed each other at once.
    blind: int = 0  # Consecutive probes that gave no sample.

    def begin_anew(self, bytes_per_s: float, spread: float) -> None:
        """Take this rate and spread as the estimate, and forget all earlier samples."""
        self.bytes_per_s, self.spread = bytes_per_s, spread
        self.deviation = self.deviation_size = 0.0

    def average(self, bytes_per_s: float, constants: float) -> None:
        """Add a sample to the averages; `constants`: time since the last sample, in time
        constants.
        """
        assert self.bytes_per_s is not None
        off = bytes_per_s - self.bytes_per_s
        self.deviation += _TREND * (off - self.deviation)
        self.deviation_size += _TREND * (abs(off) - self.deviation_size)
        trend = abs(self.deviation) / self.deviation_size if self.deviation_size else 0.0
        self.spread += (1 - exp(-constants / _SPREAD_CONSTANTS)) * (abs(off) - self.spread)
        self.bytes_per_s += max(1 - exp(-constants), trend) * off


class LinkMeter:
    """Measures the bandwidth from every source node: a moving average over time, and its spread."""

    def __init__(self, min_sample_bytes: int) -> None:
        self._min_sample_bytes = min_sample_bytes
        self._links: dict[NodeId, _MeteredLink] = {}

    def begin(self, source: NodeId, now_s: float) -> None:
        """Note an answer's first byte; the bytes passed to `add` follow it."""
        link = self._links.setdefault(source, _MeteredLink())
        if link.transfers == 0:
            link.since_s, link.last_s, link.bytes = now_s, now_s, 0
        link.transfers += 1

    def add(self, source: NodeId, size_bytes: int, now_s: float, waited_s: float = 0.0) -> None:
        """Add bytes, the last of which arrived at `now_s`.

        waited_s: time before them in which the sender waited for the reader, which is not the
        link's.
        """
        link = self._links[source]
        assert link.transfers > 0
        link.bytes += size_bytes
        link.last_s = max(link.last_s, now_s)
        link.since_s = min(link.since_s + waited_s, link.last_s)
        is_enough = link.bytes >= self._min_sample_bytes
        if is_enough and link.last_s - link.since_s >= _MAX_SAMPLE_S:
            self._take_sample(link)

    def restart(self, source: NodeId, now_s: float) -> None:
        """Begin the present sample anew at `now_s`: its bytes so far are not counted, unless other
        transfers share the link.
        """
        link = self._links[source]
        if link.transfers == 1:
            link.since_s, link.last_s, link.bytes = now_s, now_s, 0

    def end(self, source: NodeId, now_s: float) -> None:
        """Note an answer's end, complete or given up; `now_s` may be long after its last byte."""
        link = self._links[source]
        assert link.transfers > 0
        link.transfers -= 1
        if link.transfers == 0 and link.bytes >= self._min_sample_bytes:
            self._take_sample(link)

    def sampled(self, source: NodeId, bytes_per_s: float, now_s: float) -> None:
        """Take a sample that was measured elsewhere, and ends at `now_s`."""
        link = self._links.setdefault(source, _MeteredLink())
        link.last_s = now_s
        self._note(link, bytes_per_s)

    def unmeasured_s(self, source: NodeId, now_s: float) -> float:
        """Return the time since the last sample; infinite if there was none, 0 while a transfer is
        open.
        """
        link = self._links.get(source)
        if link is None:
            return inf
        return 0.0 if link.transfers else max(0.0, now_s - link.measured_s)

    def estimates(self) -> dict[NodeId, float]:
        """Return the estimated bytes per second of every link with a sample."""
        return {
            source: link.bytes_per_s
            for source, link in self._links.items()
            if link.bytes_per_s is not None
        }

    def measurements(self, now_s: float) -> dict[NodeId, Measurement]:
        """Return the measurements of all links with a sample."""
        return {
            source: Measurement(link.bytes_per_s, link.spread, max(0.0, now_s - link.measured_s))
            for source, link in self._links.items()
            if link.bytes_per_s is not None
        }

    def probe_bytes(self, source: NodeId, least: int, most: int) -> int:
        """Return the bytes of a probe that should take `PROBE_S`, within `least` and `most`; more
        if the last probes gave no sample.
        """
        link = self._links.get(source)
        if link is None:
            return least
        growth = int(_BLIND_GROWTH**link.blind)
        grown = least * growth
        if link.bytes_per_s is None:
            return min(grown, max(least, _MAX_BLIND_BYTES))
        slowest = min(link.bytes_per_s, link.latest_bytes_per_s)
        wanted = int(slowest * PROBE_S)
        return max(least, min(most, wanted * growth))

    def follow_up_bytes(self, source: NodeId, least: int, most: int) -> int | None:
        """Return the bytes of a probe that follows the last one at once; None: the last one has
        told enough.

        On a link without an estimate, a larger probe follows one that was too short for a sample. A
        probe that tells a rate far from the estimate is confirmed or refuted by one that takes
        `PROBE_S` at that rate.
        """
        link = self._links.get(source)
        if link is None:
            return None
        if link.bytes_per_s is None:
            size_bytes = self.probe_bytes(source, least, most)
            return size_bytes if size_bytes > link.probe_bytes else None
        if link.blind or not link.is_doubtful or link.probes > _MAX_FOLLOW_UPS:
            return None
        wanted = int(link.latest_bytes_per_s * PROBE_S)
        return max(least, min(most, wanted, link.probe_bytes * _FOLLOW_UP_GROWTH))

    def may_probe(
        self, source: NodeId, size_bytes: int, interval_s: float, probers: int, now_s: float
    ) -> bool:
        """Return whether a probe of this size is due: the link was not measured for `interval_s`,
        and `probers` processes that all probe it in this way take at most `PROBE_SHARE` of it.
        """
        if self.unmeasured_s(source, now_s) < interval_s:
            return False
        link = self._links.get(source)
        if link is None:
            return True
        if link.bytes_per_s is None:
            return now_s - link.probed_s >= max(interval_s, _BLIND_PAUSE_S)
        # A link that has become slow counts as slow at once, before the estimate has followed.
        slowest = min(link.bytes_per_s, link.latest_bytes_per_s)
        return now_s - link.probed_s >= link.probes * size_bytes * _PROBE_OVERHEAD * probers / (
            PROBE_SHARE * slowest
        )

    def probe_begins(
        self, source: NodeId, now_s: float, size_bytes: int, *, follows: bool = False
    ) -> None:
        """Note the first byte of the answer to a probe of this size; `follows`: the probe follows
        another one at once.
        """
        self.begin(source, now_s)
        link = self._links[source]
        link.probed_s, link.probe_bytes = now_s, size_bytes
        link.probes = link.probes + 1 if follows else 1
        # The probe counts as one without a sample until a sample is taken.
        link.blind = min(link.blind + 1, _MAX_BLIND)

    def _take_sample(self, link: _MeteredLink) -> None:
        elapsed_s = link.last_s - link.since_s
        if elapsed_s >= _MIN_SAMPLE_S:
            self._note(link, link.bytes / elapsed_s)
            link.blind = 0
        link.since_s, link.bytes = link.last_s, 0

    def _note(self, link: _MeteredLink, rate: float) -> None:
        self._judge(link, rate)
        link.latest_bytes_per_s, link.measured_s = rate, link.last_s

    def _judge(self, link: _MeteredLink, rate: float) -> None:
        estimate, in_doubt, before = link.bytes_per_s, link.is_doubtful, link.before
        if estimate is None:
            link.begin_anew(rate, rate * _FIRST_SPREAD)
            link.is_doubtful = True
            return
        constants = max(0.0, link.last_s - link.measured_s) / TIME_CONSTANT_S
        is_step = _is_far(rate, estimate)
        # The sample refutes the step before it.
        if is_step and before is not None and not _is_far(rate, before[0]):
            link.begin_anew(*before)
            link.average(rate, constants)
            link.is_doubtful, link.before = False, None
        elif is_step:
            link.before = before or (estimate, link.spread)
            link.begin_anew(rate, max(rate * _FIRST_SPREAD, rate - link.before[0]))
            link.is_doubtful = True
        elif in_doubt:  # The sample confirms the step before it.
            link.begin_anew(rate, rate * _FIRST_SPREAD)
            link.is_doubtful, link.before = False, None
        else:
            link.average(rate, constants)


def _is_far(rate: float, estimate: float) -> bool:
    return rate > estimate * STEP or rate < estimate / STEP


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
