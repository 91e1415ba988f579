"""A stream whose target's agent denies it a slot, because other proxies hold them."""

from typing import Any

import pytest

from kvrs.config.policy import PolicyName
from kvrs.core.books.waiting import SlotBook
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Capability
from tests.core.policy_harness import PolicyHarness, instance_up, of, only

D, D1 = InstanceId("d"), InstanceId("d1")
A, B, C, E = (StreamId(name) for name in "ABCE")
S0, S1, S2 = (StreamId(f"s{n}") for n in range(3))


def migrating(count: int, slots_max: int = 32, **settings: Any) -> PolicyHarness:
    """`count` victims s0, s1, ... that migrate to d1, as far as there are slots in the proxy's own
    book.
    """
    harness = PolicyHarness(
        "p0", "d0", name=PolicyName.ALWAYS_MIGRATE, slots_max=slots_max, **settings
    )
    for n in range(count):
        harness.decoding(f"s{n}")
    harness.handle(instance_up("d1"))
    harness.lose("d0")
    return harness


def test_a_denied_stream_tries_again_at_the_time_that_the_denial_names() -> None:
    """In another attempt, for the number of the one that was never begun may have been seen."""
    harness = migrating(1)

    denied = harness.handle(ev.SlotDenied(S0, 2, D1, 0.4), at_s=1.0)
    early = harness.handle(ev.TimerFired(), at_s=1.3)
    in_time = harness.handle(ev.TimerFired(), at_s=1.4)

    assert (of(denied, act.Start), of(early, act.Start)) == ([], [])
    again = only(in_time, act.Start)
    assert (again.stream, again.attempt, again.plan.decode, bool(again.plan.runs)) == (
        S0,
        3,
        D1,
        True,
    )


def test_no_other_stream_of_this_proxy_tries_before() -> None:
    """The denial holds for all of them: more requests would be denied as well."""
    harness = migrating(3, slots_max=2)

    denied = harness.handle(ev.SlotDenied(S1, 2, D1, 0.4), at_s=1.0)
    snapshot = harness.policy.snapshot()["slots"]["d1"]
    later = harness.handle(ev.TimerFired(), at_s=1.4)

    assert of(denied, act.Start) == []
    assert snapshot == {"held": 1, "waiting": 2, "max": 2}
    assert [start.stream for start in of(later, act.Start)] == [S1]


def test_a_denied_stream_keeps_its_place_in_the_queue() -> None:
    """Before streams that have not tried yet, whatever the order of several denials."""
    harness = migrating(4, slots_max=2)
    for stream in (S1, S0):
        harness.handle(ev.SlotDenied(stream, 2, D1, 0.4), at_s=1.0)

    served = of(harness.handle(ev.TimerFired(), at_s=1.4), act.Start)

    assert {start.stream for start in served} == {S0, S1}


def test_a_slot_that_this_proxy_gives_back_is_requested_at_once() -> None:
    """Once: one released slot, one request."""
    harness = migrating(4, slots_max=3)
    for stream in (S1, S2):
        harness.handle(ev.SlotDenied(stream, 2, D1, 5.0), at_s=1.0)

    freed = harness.handle(ev.StreamResumed(S0, 2), at_s=1.1)

    assert only(freed, act.Start).stream == S1


def test_a_denial_is_no_failure() -> None:
    """`max_attempts` counts what was tried, and no option is taken away."""
    harness = migrating(1, max_attempts=3)

    for attempt in range(2, 40):
        harness.handle(ev.SlotDenied(S0, attempt, D1, 0.1))
        harness.handle(ev.TimerFired(), at_s=harness.now_s + 0.1)

    assert of(harness.actions, act.GiveUp) == []
    assert of(harness.actions, act.Recovered)[-1].option is Option.MIGRATE
    assert of(harness.actions, act.Start)[-1].attempt == 40


def test_a_stream_denied_for_too_long_takes_another_option() -> None:
    """No stream queues for longer than `recovery.wait_s`, wherever the queue is."""
    harness = migrating(1, wait_s=2.0)

    attempt = 2
    while of(harness.actions, act.Recovered)[-1].option is Option.MIGRATE:
        harness.handle(ev.SlotDenied(S0, attempt, D1, 0.5))
        harness.handle(ev.TimerFired(), at_s=harness.now_s + 0.5)
        attempt = of(harness.actions, act.Start)[-1].attempt
        assert harness.now_s < 10

    assert (of(harness.actions, act.Recovered)[-1].option, harness.now_s) == (Option.RECOMPUTE, 2.0)


def test_the_wait_is_weighed_against_other_ways() -> None:
    """A denial is a cost like others: a stream that would wait longer than computing computes."""
    harness = PolicyHarness("p0", "d0")
    harness.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 3e6))
    harness.handle(ev.StreamArrived(A, 400))
    harness.handle(ev.PrefillDone(A, 1, 400))
    harness.handle(instance_up("p1"))
    harness.handle(instance_up("d1", capabilities=frozenset(Capability) - {Capability.SPLIT}))
    first = only(harness.lose("d0"), act.Recovered)

    second = only(harness.handle(ev.SlotDenied(A, 2, D1, 9.0)), act.Recovered)

    assert (first.option, second.option, second.attempt) == (Option.MIGRATE, Option.RECOMPUTE, 3)
    assert harness.policy.snapshot()["slots"] == {}


@pytest.mark.parametrize(
    "late",
    [
        ev.SlotDenied(S0, 1, D1, 0.1),
        ev.SlotDenied(S0, 2, InstanceId("d7"), 0.1),
        ev.SlotDenied(StreamId("?"), 1, D1, 0.1),
    ],
)
def test_denials_that_concern_no_current_attempt_are_ignored(late: ev.SlotDenied) -> None:
    """The denials concern an older attempt, another target and an unknown stream."""
    harness = migrating(1)
    before = harness.policy.snapshot()

    assert harness.handle(late) == []
    assert harness.policy.snapshot() == before


def test_a_running_attempt_is_not_denied() -> None:
    """A token has come, so the slot was there and has been given back."""
    harness = migrating(1)
    harness.handle(ev.StreamResumed(S0, 2))

    assert harness.handle(ev.SlotDenied(S0, 2, D1, 0.1)) == []


def test_a_denial_sets_the_expected_wait_of_the_next_stream() -> None:
    """Until the time that the agent named, and the turns of all streams before it."""
    book = SlotBook(4)
    for stream in (A, B):
        book.acquire(D, stream, 0.0, 2.0)

    book.deny(B, 3.0)
    waits = [book.expected_wait_s(D, stream, 1.0) for stream in (B, C)]
    book.release(A)
    freed = book.acquire(D, B, 1.0, 2.0)

    assert waits == [2.0, 2.0 + 2.0 / 4]
    assert freed
    assert not book.acquire(D, C, 1.0, 2.0)
    assert book.acquire(D, C, 3.0, 2.0), "it is over"
