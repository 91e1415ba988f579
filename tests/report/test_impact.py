"""Failure-impact window, time to peak, and intervals: against cases worked out by hand."""

from collections.abc import Sequence

import pytest

from kvrs_lab.report.impact import bucket_size, impact_window, throughput, time_to_peak_s
from kvrs_lab.report.student import interval, t975
from kvrs_lab.traces.records import StreamRecord


def stream(index: int, ttft_s: float, *more_s: float) -> StreamRecord:
    first_s = index + ttft_s
    times_s = [first_s, *(first_s + later for later in more_s)]
    return StreamRecord(
        index, float(index), 5, 9, sent_s=index + 0.1, ended_s=times_s[-1], token_times_s=times_s
    )


def runs(*ttft_s: float) -> tuple[list[StreamRecord], list[StreamRecord]]:
    return [stream(i, ttft) for i, ttft in enumerate(ttft_s)], [
        stream(i, 1.0) for i in range(len(ttft_s))
    ]


def window_of(
    faulted: Sequence[StreamRecord], clean: Sequence[StreamRecord], fault_s: float = 0.0
) -> tuple[int | None, int | None, float]:
    found = impact_window(faulted, clean, {}, fault_s, bucket_requests=2)
    return found.first_bucket, found.end_bucket, found.recovery_time_s


def test_the_window_runs_from_the_first_worse_bucket_to_three_calm_ones() -> None:
    """Two calm buckets between two bad ones are no end yet; 5 % is within, more is not."""
    faulted, clean = runs(1, 1, 2, 1, 1, 1.1, 1, 1, 1, 1.12, 1, 1, 1, 1.1, 1, 1)

    assert window_of(faulted, clean) == (1, 5, 8.0)


def test_a_window_that_never_closes_ends_with_the_run() -> None:
    """`end_bucket` is then None."""
    faulted, clean = runs(1, 1, 1, 2, 1, 1, 1, 1)

    assert window_of(faulted, clean) == (1, None, 8.0 - 2.0)


def test_a_fault_without_effect_has_no_window() -> None:
    """The recovery time is then 0, and not missing."""
    assert window_of(*runs(1, 1, 1.05, 1.05)) == (None, None, 0.0)


def test_what_was_slow_before_the_fault_is_no_impact_of_it() -> None:
    """Buckets whose first tokens had all come before it do not count."""
    faulted, clean = runs(1.2, 1.2, 1, 1, 1, 1)

    assert window_of(faulted, clean, fault_s=0.0)[0] == 0
    assert window_of(faulted, clean, fault_s=2.5) == (None, None, 0.0)


def test_the_window_begins_at_the_fault_at_the_earliest() -> None:
    """The requests of the bucket had arrived before it, and waited for their first tokens."""
    faulted, clean = runs(1, 1, 2, 2, 1, 1, 1, 1, 1, 1)

    found = impact_window(faulted, clean, {}, 3.5, bucket_requests=2)

    assert (found.first_bucket, found.from_s, found.recovery_time_s) == (1, 3.5, 0.5)


def test_an_interrupted_request_counts_with_its_replay_ttft() -> None:
    """Its own first token came early, but had to be made again; a request that never got a token
    makes its bucket worse, too.
    """
    faulted, clean = runs(1, 1, 1, 1)

    found = impact_window(faulted, clean, {0: 7.0}, 3.0, bucket_requests=2)
    nothing = [faulted[0], faulted[1], StreamRecord(2, 2.0, 5, 9), StreamRecord(3, 3.0, 5, 9)]

    assert (found.first_bucket, found.from_s) == (0, 3.0)
    assert found.buckets[0].ttft_s == pytest.approx(4.0)
    assert window_of(nothing, clean)[0] == 1


def test_buckets_hold_200_requests_and_fewer_in_short_runs() -> None:
    """The paper's number, as far as there are enough for ten of them."""
    assert [bucket_size(count) for count in (0, 60, 500, 2000, 40_000)] == [5, 6, 50, 200, 200]


def test_throughput_counts_tokens_of_all_clients_in_bins() -> None:
    """The last bin is part of it, however empty."""
    records = [stream(0, 0.1, 0.1, 0.2), stream(0, 0.6, 1.0)]

    assert throughput(records, bin_s=0.5) == [6.0, 2.0, 0.0, 2.0]
    assert throughput([], bin_s=0.5) == [0.0]


def test_the_peak_is_stable_where_three_bins_keep_nine_tenths_of_it() -> None:
    """One lucky bin is no peak; the bin in which the first token came is not whole, nor is the last
    of the run.
    """
    rates = [9, 9, 0, 1, 9, 2, 4, 5, 5, 6, 5, 5, 4]

    assert time_to_peak_s(rates, bin_s=0.5, first_success_s=1.2) == pytest.approx(7 * 0.5 - 1.2)
    assert time_to_peak_s([9, 9, 9, 9], bin_s=0.5, first_success_s=1.9) is None
    assert time_to_peak_s([0] * 9, bin_s=0.5, first_success_s=0.1) is None


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (4, 2.776), (30, 2.042), (40, 2.021), (60, 2.000), (1000, 1.962)],
)
def test_quantiles_of_t_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    """To the third digit."""
    assert t975(degrees) == pytest.approx(quantile, abs=6e-4)
    assert t975(degrees) > t975(degrees + 0.5) > t975(degrees + 1)


def test_five_runs_have_the_interval_of_the_textbook() -> None:
    """mean ± t(4) s / sqrt(5); one run has a mean and no interval."""
    found = interval([9.0, 10.0, 11.0, 12.0, 13.0])
    single = interval([4.0])

    assert found is not None
    assert found.mean == 11.0
    assert found.half_width == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-3)
    assert single is not None
    assert single.half_width is None
    assert interval([]) is None
