"""Lateness of the own event loop: what counts as starvation, and what it excuses."""

import pytest

from kvrs.core.fleet.silence import EXCUSED_S, Lateness


def run(lateness: Lateness, seconds: float, *, late_s: float = 0.0, every_s: float = 0.1) -> None:
    """Let a timer be due each `every_s`, and fire `late_s` later, for about `seconds`."""
    end_s = lateness.looked_s + seconds
    while lateness.looked_s < end_s:
        due_s = lateness.looked_s + every_s
        lateness.looked(due_s, due_s + late_s)


def test_a_loop_on_time_excuses_nothing() -> None:
    lateness = Lateness(0.0)

    run(lateness, 60.0)

    assert (lateness.is_starved, lateness.excused_s, lateness.spells) == (False, 0.0, 0)


def test_small_delays_are_left_out_and_no_starvation() -> None:
    """A loop that is late by a tenth of its time is busy."""
    lateness = Lateness(0.0)

    run(lateness, 11.0, late_s=0.01)

    assert not lateness.spells
    assert lateness.excused_s == pytest.approx(1.0, rel=0.05)


def test_a_pause_excuses_itself_and_two_seconds_behind_it() -> None:
    """Others' messages are read then, and they may have been paused, too."""
    lateness = Lateness(0.0)
    run(lateness, 5.0)

    lateness.looked(lateness.looked_s, lateness.looked_s + 8.0)
    assert lateness.is_starved
    run(lateness, 30.0)

    assert not lateness.is_starved
    assert (lateness.spells, lateness.spell_late_s) == (1, pytest.approx(8.0))
    assert lateness.excused_s == pytest.approx(10.0, abs=0.2)


def test_starvation_by_many_small_delays_excuses_all_time_up_to_a_bound() -> None:
    """A container beyond its CPU limit runs for a part of each tenth of a second. A hung instance
    is found all the same, later.
    """
    lateness = Lateness(0.0)

    run(lateness, 12.0, late_s=0.1)
    assert lateness.is_starved
    assert lateness.excused_s == pytest.approx(12.0, abs=0.5)
    run(lateness, 600.0, late_s=0.1)

    assert lateness.spells == 1
    beside_delays_s = lateness.excused_s - lateness.late_s
    assert beside_delays_s == pytest.approx(EXCUSED_S)


def test_timers_that_overlap_count_a_delay_once() -> None:
    lateness = Lateness(0.0)

    lateness.looked(1.0, 3.0)
    lateness.looked(1.5, 3.0)
    lateness.looked(2.5, 3.5)

    assert lateness.late_s == 2.5


def test_a_process_is_awake_since_the_start_of_a_pause_that_has_just_ended() -> None:
    """Data that is read now may have come then."""
    lateness = Lateness(0.0)

    assert lateness.awake_since_s(None, 4.0) == 4.0
    assert lateness.awake_since_s(3.9, 12.0) == pytest.approx(3.85)
    lateness.looked(3.9, 12.0)
    assert lateness.awake_since_s(12.1, 12.05) == pytest.approx(3.85)
    assert lateness.awake_since_s(13.1, 13.05) == 13.05
