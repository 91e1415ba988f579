"""How often a stream is tried again: attempts, and waits for instances that are busy."""

from itertools import pairwise

import pytest

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, of, only

A = StreamId("A")
P0, D0, D1 = (InstanceId(name) for name in ("p0", "d0", "d1"))


def busy(
    harness: PolicyHarness, start: act.Start, at_s: float, retry_after_s: float | None = None
) -> act.Start | None:
    """The attempt is told that there is no room; the attempt that follows at once."""
    where = start.plan.prefill or start.plan.decode
    event = ev.AttemptFailed(
        start.stream, start.attempt, where, "HTTP 503", 0, False, ev.FailureKind.BUSY, retry_after_s
    )
    return next(iter(of(harness.handle(event, at_s), act.Start)), None)


def until_start_or_end(harness: PolicyHarness, max_s: float = 100.0) -> act.Start | act.GiveUp:
    """Fire timers as they are asked for."""
    while harness.now_s < max_s:
        at_s = min(
            each.at_s for each in of(harness.actions, act.WakeAt) if each.at_s > harness.now_s
        )
        for action in harness.handle(ev.TimerFired(), at_s):
            if isinstance(action, act.Start | act.GiveUp):
                return action
    raise AssertionError("neither")


def test_busy_answers_count_as_no_attempt_and_pauses_grow() -> None:
    """The stream goes on once there is room, however often it has been told that there is none."""
    harness = PolicyHarness("p0", "d0", max_attempts=1)
    start: act.Start | act.GiveUp = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    times = [0.0]
    while harness.now_s < 20.0:
        assert isinstance(start, act.Start)
        assert busy(harness, start, harness.now_s + 0.001) is None
        start = until_start_or_end(harness)
        times.append(harness.now_s)

    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[0] < 0.6
    assert max(pauses) < 3.0
    assert len(times) < 20
    assert isinstance(start, act.Start)


def test_a_busy_instance_gets_nothing_before_its_retry_after_is_over() -> None:
    """Neither the stream that was told nor one that comes later."""
    harness = PolicyHarness("p0", "d0")
    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)
    busy(harness, start, 1.0, retry_after_s=7.0)

    later = harness.handle(ev.StreamArrived(StreamId("B"), 100), at_s=5.0)
    next_start = until_start_or_end(harness)

    assert of(later, act.Start) == []
    assert isinstance(next_start, act.Start)
    assert 8.0 <= harness.now_s < 8.0 + 7.0 * 0.25 + 0.2


def test_after_a_busy_pause_one_stream_tries_and_the_others_wait_for_its_answer() -> None:
    """The others would only get the same answer."""
    harness = PolicyHarness("p0", "d0")
    starts = [
        only(harness.handle(ev.StreamArrived(StreamId(f"s{n}"), 100)), act.Start) for n in range(9)
    ]
    for start in starts:
        busy(harness, start, 1.0)

    first = until_start_or_end(harness)
    until_s, tries = harness.now_s + 0.4, [first]
    while (
        at_s := min(w.at_s for w in of(harness.actions, act.WakeAt) if w.at_s > harness.now_s)
    ) < (until_s):
        tries += of(harness.handle(ev.TimerFired(), at_s), act.Start)

    assert len(tries) == 1


def test_a_stream_that_flows_waits_for_busy_survivors_and_is_told_when_the_wait_is_over() -> None:
    """`recovery.wait_s` from the first busy answer on."""
    harness = PolicyHarness("p0", "d0", "d1", wait_s=10.0)
    harness.decoding("A")
    start: act.Start | act.GiveUp | None = only(harness.lose("d0", at_s=5.0, A=3), act.Start)

    while isinstance(start, act.Start):
        start = busy(harness, start, harness.now_s + 0.01) or until_start_or_end(harness)

    assert isinstance(start, act.GiveUp)
    assert start.reason is act.Reason.BUSY
    assert harness.now_s == pytest.approx(15.01, abs=0.02)


def test_a_new_request_is_not_kept_where_the_wait_would_be_in_vain() -> None:
    """The instance asks for more time than the stream has: the client learns it at once."""
    harness = PolicyHarness("p0", "d0", wait_s=10.0)
    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    event = ev.AttemptFailed(A, start.attempt, P0, "HTTP 429", 0, False, ev.FailureKind.BUSY, 40.0)
    given_up = only(harness.handle(event, 1.0), act.GiveUp)

    assert given_up.reason is act.Reason.BUSY
    assert 40.0 <= given_up.retry_after_s <= 100.0


def test_an_alarm_that_comes_a_little_early_is_not_the_last() -> None:
    """Timers round; a stream that finds the instance still busy looks again soon."""
    for n in range(200):
        harness = PolicyHarness("p0", "d0")
        start = only(harness.handle(ev.StreamArrived(StreamId(f"s{n}"), 100)), act.Start)
        busy(harness, start, 1.0)
        first_s = min(each.at_s for each in of(harness.actions, act.WakeAt) if each.at_s > 1.0)

        actions = harness.handle(ev.TimerFired(), first_s - 0.004)

        assert (
            of(actions, act.Start)
            or min(each.at_s for each in of(actions, act.WakeAt)) < first_s + 1.0
        )
