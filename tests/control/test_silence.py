"""Silence: when it counts, and what excuses it."""

from math import inf

import pytest

from kvrs.config.proxy import ProxySettings
from kvrs.control.silence import (
    EVENT_LOOP_STALL_S,
    SHORTEST_SILENCE_S,
    SilenceTimer,
    WatchLimits,
    mean_interval_s,
)


def never() -> bool:
    return False


def test_a_timer_looks_again_when_the_limit_could_be_passed() -> None:
    """It is re-armed when it fires, not with every token."""
    timer = SilenceTimer(0.0)

    assert timer.look(0.0, 1.5, never) == 1.5
    timer.heard_s = 1.0
    assert timer.look(1.5, 1.5, never) == 2.5
    assert timer.look(2.5, 1.5, never) is None


def test_a_long_limit_is_looked_at_in_between() -> None:
    """It may become shorter: an attempt's limit follows its own pace."""
    assert SilenceTimer(0.0).look(0.0, 3600.0, never) == SHORTEST_SILENCE_S


def test_a_stall_of_the_own_event_loop_starts_the_timeout_again() -> None:
    """What came meanwhile may be read after the look."""
    timer = SilenceTimer(0.0)
    next_s = timer.look(0.0, 1.0, never)
    assert next_s == 1.0

    assert timer.look(1.0 + EVENT_LOOP_STALL_S + 0.01, 1.0, never) is not None
    assert timer.look(2.3, 1.0, never) is None


def test_an_excuse_starts_the_timeout_again() -> None:
    """A queue at an instance that delivers is no hang."""
    timer = SilenceTimer(0.0)

    assert timer.look(0.0, 1.0, never) == 1.0
    assert timer.look(1.0, 1.0, lambda: True) == 2.0


def test_a_gossiped_death_only_shortens_the_report_timeout() -> None:
    """A process that goes on reporting stays in use."""
    limits = WatchLimits.of(ProxySettings(load_interval_s=0.25, token_gap_s=10.0))

    assert limits.silence_s(is_gossiped_dead=False) == 5.0
    assert limits.silence_s(is_gossiped_dead=True) == 1.0


def test_a_process_whose_heartbeats_go_on_has_until_they_are_overdue() -> None:
    """Its event loop stalls; but no longer than any silence may last."""
    limits = WatchLimits.of(ProxySettings(load_interval_s=0.25, token_gap_s=10.0))

    for is_gossiped_dead in (False, True):
        allowed = [
            limits.silence_s(is_gossiped_dead=is_gossiped_dead, beats_for_s=beats_for_s)
            for beats_for_s in (-inf, 0.5, 6.0, 60.0)
        ]
        usual_s = limits.silence_s(is_gossiped_dead=is_gossiped_dead)
        assert allowed == [usual_s, max(usual_s, 1.5), 7.0, 10.0]


@pytest.mark.parametrize(
    ("first_s", "last_s", "tokens", "mean_s"),
    [(None, None, 0, None), (1.0, 1.0, 1, None), (1.0, 3.0, 5, 0.5)],
)
def test_the_usual_interval_is_the_mean_over_the_stream(
    first_s: float | None, last_s: float | None, tokens: int, mean_s: float | None
) -> None:
    """In the proxy and in the simulator alike."""
    assert mean_interval_s(first_s, last_s, tokens) == mean_s
