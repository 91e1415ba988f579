"""Measure what links carry, in bytes per second.

Pure: `now_s` is an argument. A link is busy while at least one answer is arriving over it; its rate
is what arrived in that time, by all transfers together, so the estimate is what the link can do and
not what one of several transfers got:

    transfer A   begin |=================| end
    transfer B            begin |==================| end
    busy period        |---------------------------|          rate = bytes of A and B / length

A transfer begins with the first byte of its answer: connecting, the hand-shake and the peer's
processing time are latency, not bandwidth, and the cost model counts them apart. A period ends with
the last byte that arrived, so a peer that dies silently does not make its link look slow.

Rate and spread are updated as TCP's round-trip estimator (Jacobson 1988), with weight w of a sample
of b bytes: w = 1 - (1 - 1/4) * exp(-b / 8 MB), spread += w * (|sample - rate| - spread), then
rate += w * (sample - rate). `lower_bound` is what a decision may count on:
rate - spread - rate * 0.01 * sqrt(age). Probes are for links without traffic of their own, and all
that are sent over a link together take no more than a hundredth of what it carries.
"""

from dataclasses import dataclass
from math import exp, inf, sqrt
from typing import NamedTuple

from kvrs.ids import NodeId

# A shorter time measures the clock and the scheduler rather than the link.
_MIN_SAMPLE_S = 1e-6

# Under constant traffic a busy period has no end, so it is cut in pieces of at least this length.
_MAX_SAMPLE_S = 0.25

# A small sample moves the estimate by a quarter, so a few probes are enough to see a change; one of
# many MB nearly replaces it.
_SMALL_SAMPLE_WEIGHT = 0.25
_LARGE_SAMPLE_BYTES = 8 << 20

_FIRST_SPREAD = 0.25  # Of the rate, after one sample.
# Links change as a random walk does: by a hundredth in a second, a tenth in a hundred, and never to
# less than a tenth.
_DRIFT_PER_ROOT_S = 0.01
_LEAST_SHARE = 0.1

_PROBE_SHARE = 0.01  # Of what a link carries.
_PROBE_OVERHEAD = 1.05  # Frames and packets around the bytes.
_BLIND_PAUSE_S = 10.0  # After a probe that was cut off before anything could be seen in it.


class Measurement(NamedTuple):
    bytes_per_s: float
    spread: float  # Mean deviation of the samples from the estimate, in bytes per second.
    age_s: float  # Of the last sample.


def lower_bound(measured: Measurement) -> float:
    """Bytes per second that the link carries at least, by a measurement of that age; more than
    0.
    """
    rate, spread, age_s = measured
    margin = spread + rate * _DRIFT_PER_ROOT_S * sqrt(max(0.0, age_s))
    return max(rate * _LEAST_SHARE, rate - margin)


@dataclass(slots=True)
class _MeteredLink:
    transfers: int = 0
    since_s: float = 0.0  # Start of the sample that is being taken.
    last_s: float = 0.0  # When its last byte came.
    bytes: int = 0
    bytes_per_s: float | None = None
    spread: float = 0.0
    latest_bytes_per_s: float = 0.0  # Of the last sample alone.
    measured_s: float = -inf
    probed_s: float = -inf


class LinkMeter:
    """EWMA of the bandwidth from every source node; samples weigh by their bytes."""

    def __init__(self, min_sample_bytes: int) -> None:
        self._min_sample_bytes = min_sample_bytes
        self._links: dict[NodeId, _MeteredLink] = {}

    def begin(self, source: NodeId, now_s: float) -> None:
        """The first byte of an answer has arrived; the bytes passed to `add` come after it."""
        link = self._links.setdefault(source, _MeteredLink())
        if link.transfers == 0:
            link.since_s, link.last_s, link.bytes = now_s, now_s, 0
        link.transfers += 1

    def add(self, source: NodeId, size_bytes: int, now_s: float) -> None:
        link = self._links[source]
        assert link.transfers > 0
        link.bytes += size_bytes
        link.last_s = max(link.last_s, now_s)
        if now_s - link.since_s >= _MAX_SAMPLE_S and link.bytes >= self._min_sample_bytes:
            self._take_sample(link)

    def end(self, source: NodeId, now_s: float) -> None:
        """The answer is complete or was given up; `now_s` may be long after its last byte."""
        link = self._links[source]
        assert link.transfers > 0
        link.transfers -= 1
        if link.transfers == 0 and link.bytes >= self._min_sample_bytes:
            self._take_sample(link)

    def unmeasured_s(self, source: NodeId, now_s: float) -> float:
        """Time without a sample; infinite if there never was one, zero while bytes may be
        arriving.
        """
        link = self._links.get(source)
        if link is None:
            return inf
        return 0.0 if link.transfers else max(0.0, now_s - link.measured_s)

    def estimates(self) -> dict[NodeId, float]:
        """Bytes per second of every link that has been measured."""
        return {
            source: link.bytes_per_s
            for source, link in self._links.items()
            if link.bytes_per_s is not None
        }

    def measurements(self, now_s: float) -> dict[NodeId, Measurement]:
        """Of every link that has been measured."""
        return {
            source: Measurement(link.bytes_per_s, link.spread, max(0.0, now_s - link.measured_s))
            for source, link in self._links.items()
            if link.bytes_per_s is not None
        }

    def may_probe(
        self, source: NodeId, size_bytes: int, interval_s: float, probers: int, now_s: float
    ) -> bool:
        """Whether a probe is due: the link was not measured for `interval_s`, and `probers` that
        all probe like this take at most a hundredth of it.
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
        return now_s - link.probed_s >= size_bytes * _PROBE_OVERHEAD * probers / (
            _PROBE_SHARE * slowest
        )

    def probe_begins(self, source: NodeId, now_s: float) -> None:
        """The first byte of a probe's answer has arrived."""
        self.begin(source, now_s)
        self._links[source].probed_s = now_s

    def _take_sample(self, link: _MeteredLink) -> None:
        elapsed_s = link.last_s - link.since_s
        if elapsed_s >= _MIN_SAMPLE_S:
            rate = link.bytes / elapsed_s
            weight = 1 - (1 - _SMALL_SAMPLE_WEIGHT) * exp(-link.bytes / _LARGE_SAMPLE_BYTES)
            if link.bytes_per_s is None:
                link.bytes_per_s, link.spread = rate, rate * _FIRST_SPREAD
            else:
                link.spread += weight * (abs(rate - link.bytes_per_s) - link.spread)
                link.bytes_per_s += weight * (rate - link.bytes_per_s)
            link.latest_bytes_per_s, link.measured_s = rate, link.last_s
        link.since_s, link.bytes = link.last_s, 0
