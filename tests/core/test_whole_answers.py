"""Attempts whose answer comes in one piece: nothing is known of them before its end."""

from typing import Any

from kvrs.core import ledger
from kvrs.core.books.prefills import _Period
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.routing import PROMPTS_MAX
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, of, only

D0 = InstanceId("d0")
A = StreamId("A")
PLAIN: dict[str, Any] = {"capabilities": frozenset[Any](), "computes_prompts": True}


def begun(*names: str, is_whole: bool = True) -> PolicyHarness:
    """Stream A decodes at d0."""
    harness = PolicyHarness(*names)
    harness.handle(ev.StreamArrived(A, 100))
    harness.handle(ev.PrefillDone(A, 1, 100))
    if is_whole:
        harness.handle(ev.WholeAsked(A, 1))
    return harness


def test_an_instance_is_not_late_with_an_answer_of_one_piece() -> None:
    """It would be with a first token, and get nothing new."""
    late, whole = (
        begun("p0", "d0", "d1", is_whole=each).policy.state.view.members[D0].answers
        for each in (False, True)
    )

    assert late.is_overdue(100.0, 0.0)
    assert not whole.is_overdue(100.0, 0.0)


def test_it_takes_no_room_of_prompts() -> None:
    """Its prompt is computed long before its end, and others would wait for that."""
    harness = PolicyHarness()
    harness.handle(instance_up("d0", **PLAIN))
    for number in range(PROMPTS_MAX):
        harness.handle(ev.StreamArrived(StreamId(f"s{number}"), 100))
    assert not of(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    actions = harness.handle(ev.WholeAsked(StreamId("s0"), 1))

    assert only(actions, act.Start).stream == A


def test_the_death_of_its_instance_counts_against_it() -> None:
    """It is one of those that wait for their first token."""
    harness = begun("p0", "d0", "d1")

    harness.lose("d0", at_s=50.0)

    deaths = harness.policy.streams[A].recovery.deaths
    assert [each.instance for each in deaths] == ["d0"]


def test_its_time_is_no_measure_of_a_prediction() -> None:
    """The time is that of the whole answer."""
    harness = begun("p0", "d0", "d1")
    harness.lose("d0", at_s=1.0)
    harness.handle(ev.PrefillDone(A, 2, 100), at_s=2.0)
    harness.handle(ev.WholeAsked(A, 2), at_s=2.0)

    actions = harness.handle(ev.StreamResumed(A, 2), at_s=90.0)

    assert not of(actions, act.Settled)
    assert harness.policy.state.spread.events == 1.0


def test_its_time_is_no_prefill_that_was_seen() -> None:
    """Its prompt is done long before its end."""
    state = begun("p0", "d0", "d1").policy.state
    state.view.members[D0].times.observed = state.view.members[D0].times.table
    state.prefill_scale._periods[D0] = period = _Period(0.0, {A})
    ledger.await_whole(state, state.streams[A])

    assert not period.computing
