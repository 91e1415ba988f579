"""What becomes of a stream whose target's agent has no slot for it, because other proxies hold them."""

from typing import Any

import pytest

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.actions import GiveUp, Recovered, Start
from kvrs.policy.config import PolicyName
from kvrs.policy.costs import Option
from kvrs.policy.events import InstanceUp, LinkMeasured, PrefillDone, SlotDenied, StreamArrived, StreamResumed, TimerFired
from kvrs.policy.slots import SlotBook
from kvrs.protocol.instance import Capability
from tests.policy.policy_stories import Story, instance, of, only

D, D1 = InstanceId("d"), InstanceId("d1")
A, B, C, E = (StreamId(name) for name in "ABCE")
S0, S1, S2 = (StreamId(f"s{n}") for n in range(3))


def migrating(count: int, slots_max: int = 32, **settings: Any) -> Story:
    """`count` victims s0, s1, ... that migrate to d1, as far as there are slots in the proxy's own book."""
    story = Story("p0", "d0", name=PolicyName.ALWAYS_MIGRATE, slots_max=slots_max, **settings)
    for n in range(count):
        story.decoding(f"s{n}")
    story.tell(InstanceUp(instance("d1")))
    story.lose("d0")
    return story


def test_who_is_denied_asks_again_when_it_was_told_to() -> None:
    """In another attempt, for the number of the one that was never begun may have been seen."""
    story = migrating(1)

    denied = story.tell(SlotDenied(S0, 2, D1, 0.4), at_s=1.0)
    early = story.tell(TimerFired(), at_s=1.3)
    in_time = story.tell(TimerFired(), at_s=1.4)

    assert (of(denied, Start), of(early, Start)) == ([], [])
    again = only(in_time, Start)
    assert (again.stream, again.attempt, again.plan.decode, bool(again.plan.runs)) == (S0, 3, D1, True)


def test_nobody_else_of_this_proxy_asks_before() -> None:
    """The agent has said it for all: to ask for each of them would only tell the same."""
    story = migrating(3, slots_max=2)

    denied = story.tell(SlotDenied(S1, 2, D1, 0.4), at_s=1.0)
    snapshot = story.policy.snapshot()["slots"]["d1"]
    later = story.tell(TimerFired(), at_s=1.4)

    assert of(denied, Start) == []
    assert snapshot == {"held": 1, "waiting": 2, "max": 2}
    assert [start.stream for start in of(later, Start)] == [S1]


def test_who_was_denied_keeps_its_place_in_the_queue() -> None:
    """Before those who have not asked yet, whatever the order in which several hear of it."""
    story = migrating(4, slots_max=2)
    for stream in (S1, S0):
        story.tell(SlotDenied(stream, 2, D1, 0.4), at_s=1.0)

    served = of(story.tell(TimerFired(), at_s=1.4), Start)

    assert {start.stream for start in served} == {S0, S1}


def test_a_slot_that_this_proxy_gives_back_is_asked_for_at_once() -> None:
    """Once: for one that came free there, one is asked for."""
    story = migrating(4, slots_max=3)
    for stream in (S1, S2):
        story.tell(SlotDenied(stream, 2, D1, 5.0), at_s=1.0)

    freed = story.tell(StreamResumed(S0, 2), at_s=1.1)

    assert only(freed, Start).stream == S1


def test_a_denial_is_no_failure() -> None:
    """`max_attempts` counts what was tried, and no option is taken away."""
    story = migrating(1, max_attempts=3)

    for attempt in range(2, 40):
        story.tell(SlotDenied(S0, attempt, D1, 0.1))
        story.tell(TimerFired(), at_s=story.now_s + 0.1)

    assert of(story.actions, GiveUp) == []
    assert of(story.actions, Recovered)[-1].option is Option.MIGRATE
    assert of(story.actions, Start)[-1].attempt == 40


def test_who_is_denied_for_too_long_goes_another_way() -> None:
    """Nobody queues longer than anybody waits for an instance, wherever the queue is."""
    story = migrating(1, wait_s=2.0)

    attempt = 2
    while of(story.actions, Recovered)[-1].option is Option.MIGRATE:
        story.tell(SlotDenied(S0, attempt, D1, 0.5))
        story.tell(TimerFired(), at_s=story.now_s + 0.5)
        attempt = of(story.actions, Start)[-1].attempt
        assert story.now_s < 10

    assert (of(story.actions, Recovered)[-1].option, story.now_s) == (Option.RECOMPUTE, 2.0)


def test_the_wait_is_weighed_against_other_ways() -> None:
    """A denial is a cost like others: who would wait for longer than computing takes computes."""
    story = Story("p0", "d0")
    story.tell(LinkMeasured(NodeId("n0"), NodeId("n1"), 3e6))
    story.tell(StreamArrived(A, 400))
    story.tell(PrefillDone(A, 1, 400))
    story.tell(InstanceUp(instance("p1")))
    story.tell(InstanceUp(instance("d1", capabilities=frozenset(Capability) - {Capability.SPLIT})))
    first = only(story.lose("d0"), Recovered)

    second = only(story.tell(SlotDenied(A, 2, D1, 9.0)), Recovered)

    assert (first.option, second.option, second.attempt) == (Option.MIGRATE, Option.RECOMPUTE, 3)
    assert story.policy.snapshot()["slots"] == {}


@pytest.mark.parametrize(
    "late",
    [SlotDenied(S0, 1, D1, 0.1), SlotDenied(S0, 2, InstanceId("d7"), 0.1), SlotDenied(StreamId("?"), 1, D1, 0.1)],
)
def test_what_is_said_of_others_changes_nothing(late: SlotDenied) -> None:
    """Of an older attempt, of another target, of nobody that is known."""
    story = migrating(1)
    before = story.policy.snapshot()

    assert story.tell(late) == []
    assert story.policy.snapshot() == before


def test_who_runs_already_is_not_denied() -> None:
    """A token has come, so the slot was there and has been given back."""
    story = migrating(1)
    story.tell(StreamResumed(S0, 2))

    assert story.tell(SlotDenied(S0, 2, D1, 0.1)) == []


def test_a_denial_says_what_the_next_one_has_to_wait() -> None:
    """Of those who ask the book: as long as the agent has said, and everybody's turn before."""
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
