"""Definitions of the measures that a client sees."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs_lab.report import metrics
from kvrs_lab.report.metrics import Pause, Slo
from kvrs_lab.traces.records import ErrorKind, StreamRecord
from kvrs_testkit.examples import examples


def record(*times_s: float, sent_s: float = 0.0, finish: str | None = "length") -> StreamRecord:
    ended_s = times_s[-1] if times_s else sent_s
    return StreamRecord(
        0,
        sent_s,
        1,
        9,
        sent_s,
        ended_s,
        token_ids=[1] * len(times_s),
        token_times_s=list(times_s),
        finish_reason=finish,
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
@examples(200)
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    """Linear interpolation between closest ranks."""
    assert metrics.percentile(values, q) == pytest.approx(
        float(np.percentile(values, q)), rel=1e-9, abs=1e-9
    )


def test_no_values_have_no_percentile() -> None:
    """0 would read like a perfect result."""
    assert metrics.spread([None]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"))


def test_token_times_become_ttft_tpot_and_the_longest_gap() -> None:
    """TTFT from the send, TPOT over the tokens after the first, gap between consecutive
    receipts.
    """
    stream = record(1.5, 1.6, 2.0, 2.1, sent_s=1.0)

    assert metrics.ttft_s(stream) == pytest.approx(0.5)
    assert metrics.tpot_s(stream) == pytest.approx(0.2)
    assert metrics.max_gap_s(stream) == pytest.approx(0.4)


def test_a_stream_without_tokens_has_no_times() -> None:
    """It is counted as an error elsewhere, not as a fast stream here."""
    stream = record()

    assert (metrics.ttft_s(stream), metrics.tpot_s(stream), metrics.max_gap_s(stream)) == (
        None,
        None,
        None,
    )
    assert metrics.tpot_s(record(1.0)) is None


@pytest.mark.parametrize(
    ("times_s", "produced", "expected"),
    [
        pytest.param((1.0, 1.1, 1.9, 2.0), 2, Pause(1.1, 1.9), id="around the decision"),
        pytest.param((1.0, 1.1, 1.21, 1.9), 3, Pause(1.21, 1.9), id="a token was on its way"),
        pytest.param((1.0, 1.1, 1.3, 9.9), 2, Pause(1.1, 1.3), id="a longer wait comes later"),
        pytest.param((2.0, 2.1), 0, None, id="no token came before it"),
        pytest.param((1.0, 1.1), 2, None, id="no token came after it"),
    ],
)
def test_the_pause_of_a_recovery_is_the_wait_that_it_ended(
    times_s: tuple[float, ...], produced: int, expected: Pause | None
) -> None:
    """Neither an earlier nor a later wait of the stream is blamed on the recovery."""
    assert metrics.pause_of(record(*times_s), 1.2, produced) == expected


def test_the_pause_of_a_stream_without_token_ids_is_found_by_time() -> None:
    """An event may contain several tokens, which only ids would count."""
    events = replace(record(1.0, 1.1, 1.9, 2.0), token_ids=[])

    assert metrics.pause_of(events, 1.2, 40) == Pause(1.1, 1.9)


def test_tfs_ignores_tokens_that_were_on_their_way() -> None:
    """Only a token after the recovery's decision is a success; the first of any victim counts."""
    first, second = record(0.9, 1.01, 1.5), record(0.8, 1.3)

    assert metrics.fault_to_first_token_s([(first, 1.02), (second, 1.02)], 1.0) == pytest.approx(
        0.3
    )
    assert metrics.fault_to_first_token_s([(first, 1.02)], 1.0) == pytest.approx(0.5)
    assert metrics.fault_to_first_token_s([], 1.0) is None


def test_goodput_counts_only_complete_streams_within_the_slo() -> None:
    """A fast stream that is cut off is worth nothing."""
    good, slow, cut = record(0.1, 0.2), record(0.9, 10.0), record(0.1, 0.2, finish=None)
    cut.fail(ErrorKind.TRUNCATED, "cut")

    assert metrics.goodput_per_s([good, slow, cut], Slo(ttft_s=0.5, tpot_s=0.2)) == pytest.approx(
        1 / 10.0
    )


def test_a_run_without_streams_has_a_summary() -> None:
    """Nothing divides by zero."""
    assert metrics.summary([], Slo())["goodput_per_s"] == 0.0
