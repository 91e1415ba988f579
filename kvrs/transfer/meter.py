"""Measure what links carry, in bytes per second.

Pure: `now_s` is an argument. A link is busy while at least one answer is arriving over it; its rate is what arrived in that
time, by all transfers together, so the estimate is what the link can do and not what one of several transfers got:

    transfer A   begin |=================| end
    transfer B            begin |==================| end
    busy period        |---------------------------|          rate = bytes of A and B / length

A transfer begins with the first byte of its answer: connecting, the hand-shake and the peer's thinking time are latency, not
bandwidth, and the cost model counts them apart. A period ends with the last byte that arrived, so a peer that dies
silently does not make its link look slow.
"""

from dataclasses import dataclass
from math import exp, inf

from kvrs.ids import NodeId

# A shorter time says more about the clock and the scheduler than about the link.
_MIN_SAMPLE_S = 1e-6

# Under constant traffic a busy period has no end, so it is cut in pieces of at least this length.
_MAX_SAMPLE_S = 0.25

# A small sample moves the estimate by a quarter, so a few probes are enough to see a change; one of many MB nearly replaces it.
_SMALL_SAMPLE_WEIGHT = 0.25
_LARGE_SAMPLE_BYTES = 8 << 20


@dataclass(slots=True)
class _Link:
    transfers: int = 0
    since_s: float = 0.0  # Start of the sample that is being taken.
    last_s: float = 0.0  # When its last byte came.
    bytes: int = 0
    bytes_per_s: float | None = None
    measured_s: float = -inf


class LinkMeter:
    """EWMA of the bandwidth from every source node; samples weigh by their bytes."""

    def __init__(self, min_sample_bytes: int) -> None:
        self._min_sample_bytes = min_sample_bytes
        self._links: dict[NodeId, _Link] = {}

    def begin(self, source: NodeId, now_s: float) -> None:
        """The first byte of an answer is here; the bytes told to `add` come after it."""
        link = self._links.setdefault(source, _Link())
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
        """For how long no sample was taken; infinite if none ever was, zero while bytes may be arriving."""
        link = self._links.get(source)
        if link is None:
            return inf
        return 0.0 if link.transfers else max(0.0, now_s - link.measured_s)

    def estimates(self) -> dict[NodeId, float]:
        """Bytes per second of every link that has been measured."""
        return {source: link.bytes_per_s for source, link in self._links.items() if link.bytes_per_s is not None}

    def _take_sample(self, link: _Link) -> None:
        elapsed_s = link.last_s - link.since_s
        if elapsed_s >= _MIN_SAMPLE_S:
            rate = link.bytes / elapsed_s
            weight = 1 - (1 - _SMALL_SAMPLE_WEIGHT) * exp(-link.bytes / _LARGE_SAMPLE_BYTES)
            link.bytes_per_s = rate if link.bytes_per_s is None else link.bytes_per_s + weight * (rate - link.bytes_per_s)
            link.measured_s = link.last_s
        link.since_s, link.bytes = link.last_s, 0
