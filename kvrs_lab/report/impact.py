"""The effect of a fault over time: the failure-impact window, and the time to peak throughput.

Window (LUMEN section 6.1): requests in the order of their arrival form buckets. The window begins
with the first bucket, from the fault on, whose mean TTFT exceeds that of the same bucket of the run
without a fault by more than 5 %. The window ends where three consecutive buckets are within 5 %
again. A bucket that the fault fell into, or whose requests still waited then, begins at the fault.
The length of the window is the recovery time. TTFT counts from arrival. An interrupted request has
its replay TTFT, since its earlier progress was lost with the instance.

TTP (AnchorTP section V): from the first successful token after the fault (TFS) until throughput is
stable at its peak. Tokens are counted in bins. The stable peak is the highest rate that three
consecutive bins keep, and is reached where three consecutive bins first keep 90 % of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvrs_lab.report import metrics
from kvrs_lab.traces.records import StreamRecord

EXCESS = 1.05
CALM_BUCKETS = 3
STABLE_BINS = 3
STABLE_SHARE = 0.9
_BUCKET_REQUESTS = 200  # The paper's; smaller in short runs, for several buckets.
_FEWEST_BUCKETS = 10
_SMALLEST_BUCKET = 5


@dataclass(frozen=True, slots=True)
class Bucket:
    first: int  # Position of the first request by arrival.
    from_s: float  # Due time of the first request.
    ttft_s: float | None  # Mean; None: no request of the bucket got a token.
    clean_ttft_s: float | None
    tpot_s: float | None
    clean_tpot_s: float | None

    @property
    def is_worse(self) -> bool:
        if self.clean_ttft_s is None:
            return False
        return self.ttft_s is None or self.ttft_s > EXCESS * self.clean_ttft_s


@dataclass(frozen=True, slots=True)
class Impact:
    bucket_requests: int
    buckets: tuple[Bucket, ...]
    first_bucket: int | None  # First bucket of the window; None: no window.
    end_bucket: int | None  # First bucket after the window; None: the run ended earlier.
    from_s: float  # Start of the window, not before the fault.
    recovery_time_s: float


def bucket_size(requests: int) -> int:
    return max(_SMALLEST_BUCKET, min(_BUCKET_REQUESTS, requests // _FEWEST_BUCKETS))


def impact_window(
    faulted: Sequence[StreamRecord],
    clean: Sequence[StreamRecord],
    replay_ttft_s: Mapping[int, float],
    fault_s: float,
    bucket_requests: int | None = None,
) -> Impact:
    """Find the window of a run, compared with the same requests without a fault.

    Args:
        faulted: the records of the run with faults.
        clean: the records of the same requests without faults, by index.
        replay_ttft_s: replay TTFT of every interrupted request, by index.
        fault_s: time of the first fault.
        bucket_requests: requests per bucket; default: 200, fewer in runs of less than 2,000
            requests.
    """
    size = bucket_requests or bucket_size(len(faulted))
    ordered = sorted(faulted, key=lambda record: (record.due_s, record.index))
    twins = {record.index: record for record in clean}
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    buckets = tuple(
        _bucket(number * size, group, twins, replay_ttft_s) for number, group in enumerate(groups)
    )
    first = next(
        (
            i
            for i, group in enumerate(groups)
            if buckets[i].is_worse and _may_feel(group, replay_ttft_s, fault_s)
        ),
        None,
    )
    if first is None:
        return Impact(size, buckets, None, None, fault_s, 0.0)
    from_s = max(fault_s, buckets[first].from_s)
    end = next(
        (i for i in range(first + 1, len(buckets)) if _is_calm(buckets[i : i + CALM_BUCKETS])), None
    )
    ends_s = buckets[end].from_s if end is not None else max(record.ended_s for record in ordered)
    return Impact(size, buckets, first, end, from_s, max(0.0, ends_s - from_s))


def _bucket(
    first: int,
    group: Sequence[StreamRecord],
    twins: Mapping[int, StreamRecord],
    replay_ttft_s: Mapping[int, float],
) -> Bucket:
    others = [twins[record.index] for record in group if record.index in twins]
    return Bucket(
        first,
        group[0].due_s,
        _mean(
            [replay_ttft_s.get(record.index, metrics.arrival_ttft_s(record)) for record in group]
        ),
        _mean([metrics.arrival_ttft_s(record) for record in others]),
        _mean([metrics.tpot_s(record) for record in group]),
        _mean([metrics.tpot_s(record) for record in others]),
    )


def _may_feel(
    group: Sequence[StreamRecord], replay_ttft_s: Mapping[int, float], fault_s: float
) -> bool:
    """Return whether the fault may affect a bucket: some first token did not come earlier."""
    ttft_s = [
        (record, replay_ttft_s.get(record.index, metrics.arrival_ttft_s(record)))
        for record in group
    ]
    return any(own is None or record.due_s + own >= fault_s for record, own in ttft_s)


def _is_calm(buckets: Sequence[Bucket]) -> bool:
    return len(buckets) == CALM_BUCKETS and not any(bucket.is_worse for bucket in buckets)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def throughput(records: Sequence[StreamRecord], bin_s: float) -> list[float]:
    """Tokens per second of all clients together, in bins from the start of the run."""
    times_s = [at_s for record in records for at_s in record.token_times_s]
    counts = [0] * (int(max(times_s, default=0.0) / bin_s) + 1)
    for at_s in times_s:
        counts[int(at_s / bin_s)] += 1
    return [count / bin_s for count in counts]


def time_to_peak_s(rates: Sequence[float], bin_s: float, first_success_s: float) -> float | None:
    """TTP; None: the run ended before a stable peak."""
    first = int(first_success_s / bin_s) + 1
    # The last bin is not full.
    kept = [min(rates[i : i + STABLE_BINS]) for i in range(first, len(rates) - STABLE_BINS)]
    peak = max(kept, default=0.0)
    if peak <= 0:
        return None
    reached = first + next(i for i, rate in enumerate(kept) if rate >= STABLE_SHARE * peak)
    return reached * bin_s - first_success_s
