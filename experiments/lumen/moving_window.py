"""The failure-impact window by a moving mean, beside that of buckets (kvrs_lab/report/impact.py).

Buckets of 200 requests begin at fixed positions, so that the window of a few workers is a multiple
of half a minute. Here a bucket begins at each request. The window begins with the first one that
the fault can have touched and whose mean TTFT is worse by more than 5 %, and ends at the first
request from which on all buckets that begin within two buckets' length are within 5 % again.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from kvrs_lab.report import metrics
from kvrs_lab.report.impact import CALM_BUCKETS, EXCESS
from kvrs_lab.traces.records import StreamRecord


def moving_window_s(
    faulted: Sequence[StreamRecord],
    clean: Sequence[StreamRecord],
    replay_ttft_s: Mapping[int, float],
    fault_s: float,
    size: int,
) -> tuple[float, bool]:
    """Return the length of the window, and whether it has ended before the run."""
    twins = {record.index: metrics.arrival_ttft_s(record) for record in clean}
    due_s, own_s, clean_s = list[float](), list[float](), list[float]()
    for record in sorted(faulted, key=lambda each: (each.due_s, each.index)):
        own = replay_ttft_s.get(record.index, metrics.arrival_ttft_s(record))
        twin = twins.get(record.index)
        if own is not None and twin is not None:
            due_s.append(record.due_s)
            own_s.append(own)
            clean_s.append(twin)
    # The size of a bucket cancels: sums are compared.
    own_sums, clean_sums = ([0.0, *accumulate(each)] for each in (own_s, clean_s))
    is_worse = [
        own_sums[at + size] - own_sums[at] > EXCESS * (clean_sums[at + size] - clean_sums[at])
        for at in range(len(due_s) - size + 1)
    ]
    felt = next((at for at in range(len(due_s)) if due_s[at] + own_s[at] >= fault_s), len(due_s))
    first = next((at for at in range(max(0, felt - size + 1), len(is_worse)) if is_worse[at]), None)
    if first is None:
        return 0.0, True
    from_s = max(fault_s, due_s[first])
    calm_from = first + 1
    for at in range(first + 1, len(is_worse)):
        if is_worse[at]:
            calm_from = at + 1
        elif at - calm_from >= (CALM_BUCKETS - 1) * size:
            return max(0.0, due_s[calm_from] - from_s), True
    return max(0.0, due_s[-1] - from_s), False
