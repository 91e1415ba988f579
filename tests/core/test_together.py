"""Predictions of the victims of one event together."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import HANDSHAKE_S
from kvrs.core.together import Sending, Steps, Work, share_link
from kvrs.ids import StreamId
from kvrs.profiles.tables import PrefillTable
from tests.core.policy_harness import PolicyHarness, instance_up, load, member, of, only

SECONDS = st.floats(0.001, 10.0)


def steps(
    *work: Work, decode_s: float = 0.0, overhead_s: float = 0.01, ahead_s: float = 0.0
) -> list[float]:
    """The ends of this work."""
    Steps(decode_s, overhead_s, 100, ahead_s, [*work]).play()
    return [each.ends_s for each in work]


def ends(*sendings: Sending, before_s: float = 0.0) -> list[float]:
    share_link(sendings, before_s)
    return [each.ends_s for each in sendings]


def test_all_that_is_ready_ends_with_one_step() -> None:
    assert steps(Work(40, 0.2), Work(50, 0.3)) == pytest.approx([0.51, 0.51])


def test_a_step_takes_so_many_tokens_and_what_is_left_goes_on_in_the_next() -> None:
    """Each step has its own overhead."""
    first, second = steps(Work(80, 0.8), Work(60, 0.6))

    assert first == pytest.approx(0.01 + 0.8 + 0.2)
    assert second == pytest.approx(first + 0.01 + 0.4)


def test_work_waits_for_what_was_there_before_and_for_half_of_the_running_step() -> None:
    assert steps(Work(1, 0.0), decode_s=0.02, ahead_s=0.3) == pytest.approx([0.3 + 0.01 + 0.02])


def test_a_step_takes_as_long_as_a_decode_step_where_streams_decode() -> None:
    assert steps(Work(10, 0.1), decode_s=0.04) == pytest.approx([0.02 + 0.04 + 0.1])


def test_work_that_comes_within_a_step_waits_for_its_end() -> None:
    """Where no stream decodes, it begins at once."""
    late = Work(1, 0.0, ready_s=0.05)
    assert steps(late, decode_s=0.02) == pytest.approx([0.01 + 2 * 0.02 + 0.02])
    assert steps(Work(1, 0.0, ready_s=0.05)) == pytest.approx([0.05 + 0.01])


def test_transfers_share_their_link() -> None:
    """Three at a time take three times as long; the last goes on alone."""
    assert ends(Sending(1.0), Sending(1.0), Sending(2.0)) == pytest.approx([3.0, 3.0, 4.0])


def test_a_transfer_that_begins_later_slows_the_others_from_then_on() -> None:
    assert ends(Sending(1.0), Sending(1.0, begins_s=0.5)) == pytest.approx([1.5, 2.0])


def test_bytes_that_were_on_the_link_before_share_it_too() -> None:
    assert ends(Sending(1.0), before_s=0.5) == pytest.approx([1.5])
    (one,) = [Sending(1.0)]
    share_link([one], 4.0, before=4)
    assert one.ends_s == pytest.approx(5.0)  # Each of the five gets a fifth.


@pytest.mark.parametrize("absurd", [Sending(inf), Sending(1.0, begins_s=inf)])
def test_a_transfer_that_never_ends_delays_no_other(absurd: Sending) -> None:
    """There are those over a link for which the settings assume next to nothing."""
    assert ends(absurd, Sending(1.0), absurd, before_s=0.5) == [inf, pytest.approx(1.5), inf]


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=20), st.floats(0.0, 5.0))
def test_a_link_is_never_idle_and_never_faster_than_its_rate(
    drawn: list[tuple[float, float]], before_s: float
) -> None:
    sendings = [Sending(seconds, begins_s) for seconds, begins_s in drawn]
    share_link(sendings, before_s)

    assert all(each.ends_s >= each.begins_s + 0.999 * each.seconds for each in sendings)
    # All that begins in one busy period ends with it, in the time of its sum.
    order = sorted(sendings, key=lambda each: each.begins_s)
    busy_until_s = before_s
    for each in order:
        busy_until_s = max(busy_until_s, each.begins_s) + each.seconds
    last_s = max(each.ends_s for each in sendings)
    assert last_s <= busy_until_s * 1.001
    assert last_s >= 0.999 * (busy_until_s - before_s) or before_s > 0


@given(st.lists(st.tuples(st.integers(1, 300), SECONDS, SECONDS), min_size=1, max_size=15))
def test_all_work_ends_after_it_is_ready_and_takes_its_time(
    drawn: list[tuple[int, float, float]],
) -> None:
    work = [Work(*each) for each in drawn]
    Steps(0.02, 0.01, 100, 0.0, work).play()

    assert all(each.ready_s + 0.99 * each.seconds <= each.ends_s < inf for each in work)
    last_s = max(each.ends_s for each in work)
    assert last_s >= sum(each.seconds for each in work)


WITH_OVERHEAD = PrefillTable("test", "made up", 100, [0.02, 0.12, 0.22, 0.32, 0.42])


def victims(*names: str) -> tuple[PolicyHarness, list[act.Recovered]]:
    """Streams that were computed again after the death of their instance, at another one."""
    harness = PolicyHarness()
    for name in ("p0", "d0"):
        harness.handle(instance_up(name, prefill=WITH_OVERHEAD, capabilities=[]))
    for name in names:
        harness.decoding(name)
    harness.handle(instance_up("d1", prefill=WITH_OVERHEAD, capabilities=[]))
    harness.handle(load("d1", step_s=0.05))
    return harness, of(harness.lose("d0", **dict.fromkeys(names, 1)), act.Recovered)


def test_victims_that_end_with_one_step_are_predicted_alike() -> None:
    """The choice of each takes the others as work before its own: two of these are computed at the
    prefill instance, and the third at the target beside them.
    """
    harness, recovered = victims("A", "B", "C")
    harness.handle(ev.TimerFired(), at_s=0.1)
    for each in recovered:
        harness.handle(ev.PrefillDone(each.stream, each.attempt, 101))
    settled = [
        only(harness.handle(ev.StreamResumed(each.stream, each.attempt), at_s=1.0), act.Settled)
        for each in recovered
    ]

    first, second, third = (each.predicted_s for each in recovered)
    assert first < third < second
    together_s = 0.02 + 2 * 0.101 + 2 * HANDSHAKE_S + 2 * 112 * 2048 / 10e9 + 0.02
    assert [each.predicted_s for each in settled] == pytest.approx(
        [together_s, together_s, 0.02 + 0.101 + HANDSHAKE_S], rel=0.01
    )
    assert {each.real_s for each in settled} == {1.0}


def test_work_adds_the_part_of_a_step_that_it_fills() -> None:
    """Not the overhead of a step for each victim: they share steps."""
    recovered = victims("A", "B", "C")[1]

    first, second = (
        next(each for each in one.estimates if each.source is not None) for one in recovered[:2]
    )
    assert second.queue_s - first.queue_s == pytest.approx(0.101 + 101 / 2048 * 0.02)
    assert first.compute_s == pytest.approx(0.02 + 0.101)


def test_of_the_first_work_the_time_since_its_begin_is_done() -> None:
    """And a history waits for a quarter of new prompts where the engine has a fair queue."""
    fair, plain = member("p0"), member("p1", capabilities=[])
    for each in (fair, plain):
        each.bookings, each.work_s, each.history_work_s, each.head_since_s = 2, 1.0, 0.4, 5.0

    assert plain.wait_of_history_s(5.0) == pytest.approx(1.0)
    assert plain.wait_of_history_s(5.2) == pytest.approx(0.8)
    assert plain.wait_of_history_s(9.0) == pytest.approx(0.5)  # The second has not begun.
    assert plain.wait_of_history_s(5.0, besides_s=0.4) == pytest.approx(0.6)
    assert fair.wait_of_history_s(5.0) == pytest.approx(0.4 + 0.6 / 4)


def test_a_report_counts_where_more_waits_than_was_booked() -> None:
    plain = member("p1", capabilities=[])
    plain.note_queue(2.0)

    assert plain.wait_of_history_s(0.0) == 2.0


def test_a_token_comes_after_its_hand_off_also_between_instances_that_do_both_stages() -> None:
    """Each computes prompts for the other, and awaits what the other one computes."""
    harness = PolicyHarness()
    harness.handle(instance_up("b0", prefill=WITH_OVERHEAD, capabilities=[]))
    names = ("A", "B", "C", "D")
    for name in names:
        harness.decoding(name)
    for name in ("b10", "b11"):  # On one node, so that the idle one of them computes.
        harness.handle(instance_up(name, prefill=WITH_OVERHEAD, capabilities=[]))
    harness.handle(load("b11", 0.05))
    harness.lose("b0", **dict.fromkeys(names, 1))
    harness.handle(ev.TimerFired(), at_s=0.1)

    attempts = [harness.policy.streams[StreamId(name)].attempt for name in names]
    plans = [attempt.plan for attempt in attempts]
    assert {(plan.prefill, plan.decode) for plan in plans if plan is not None} == {
        ("b10", "b11"),
        ("b11", "b10"),
    }
    assert all(each.predicted is not None and each.predicted.seconds > 0.1 for each in attempts)


@pytest.mark.parametrize("step_s", [1e-320, 86_400.0])
def test_absurd_times_of_steps_end_in_a_prediction(step_s: float) -> None:
    """A failure here would lose the event behind the decision, for all streams."""
    harness = PolicyHarness()
    for name in ("p0", "d0"):
        harness.handle(instance_up(name, prefill=WITH_OVERHEAD, capabilities=[]))
    for name in ("A", "B", "C"):
        harness.decoding(name)
    harness.handle(instance_up("d1", prefill=WITH_OVERHEAD, capabilities=[]))
    harness.decoding("D")  # It decodes where the victims go.
    harness.handle(load("d1", step_s=step_s))
    harness.lose("d0", A=1, B=1, C=1)
    harness.handle(ev.TimerFired(), at_s=0.1)

    for name in ("A", "B", "C"):
        predicted = harness.policy.streams[StreamId(name)].attempt.predicted
        assert predicted is not None
        assert 0.0 < predicted.low_s < predicted.high_s < inf
