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
"""

from dataclasses import dataclass
from math import exp, inf, sqrt
from typing import NamedTuple

from kvrs.ids import NodeId

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
