"""The failure-impact window by a moving mean."""

from experiments.lumen.moving_window import moving_window_s
from kvrs_lab.traces.records import StreamRecord

CLEAN = [0.1] * 160


def records(ttft_s: list[float]) -> list[StreamRecord]:
    return [
        StreamRecord(
            n, n / 10, 10, 1, sent_s=n / 10, ended_s=n / 10 + s, token_times_s=[n / 10 + s]
        )
        for n, s in enumerate(ttft_s)
    ]


def window(ttft_s: list[float], fault_s: float = 3.0, size: int = 10) -> tuple[float, bool]:
    found_s, has_ended = moving_window_s(records(ttft_s), records(CLEAN), {}, fault_s, size)
    return round(found_s, 6), has_ended


def test_the_window_ends_at_the_request_from_which_on_all_is_as_without_the_fault() -> None:
    """To a request, not to a bucket."""
    slow = [1.0 if 30 <= n < 93 else 0.1 for n in range(160)]

    assert window(slow) == (6.3, True)


def test_a_late_wave_belongs_to_the_window() -> None:
    """Less than three buckets' length of calm ends nothing."""
    slow = [1.0 if 30 <= n < 50 or 70 <= n < 80 else 0.1 for n in range(160)]

    assert window(slow) == (5.0, True)


def test_nothing_is_worse() -> None:
    assert window(CLEAN) == (0.0, True)


def test_a_run_that_ends_in_the_window_leaves_it_open() -> None:
    slow = [1.0 if n >= 30 else 0.1 for n in range(160)]

    assert window(slow) == (12.9, False)


def test_what_was_slow_before_the_fault_does_not_count() -> None:
    """Only buckets with a first token behind the fault."""
    slow = [0.5 if n < 15 else 0.1 for n in range(160)]

    assert window(slow) == (0.0, True)
