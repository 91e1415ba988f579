"""At most `slots_max` recovery transfers into one target at a time."""

from typing import Any

import pytest

from kvrs.config.policy import PolicyName
from kvrs.core.books.waiting import SlotBook
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import Capability
from tests.core.policy_harness import PolicyHarness, instance_up, load, of, only

D, D1 = InstanceId("d"), InstanceId("d1")
SLOW = PrefillTable("slow", "made up", 100, [0.0, 1.0, 2.0])  # 10 ms per token
A, B, C, E = (StreamId(name) for name in "ABCE")


def migrating(
    count: int, slots_max: int, name: PolicyName = PolicyName.ALWAYS_MIGRATE, **settings: Any
) -> PolicyHarness:
    """`count` victims s0, s1, ... of which as many as there are slots migrate to d1."""
    harness = PolicyHarness("p0", "d0", name=name, slots_max=slots_max, **settings)
    for n in range(count):
        harness.decoding(f"s{n}")
    harness.handle(instance_up("d1"))
    harness.lose("d0")
    return harness


def test_a_full_target_has_an_expected_wait() -> None:
    """Until the first transfer ends; each stream ahead in the queue adds a share of a mean
    transfer.
    """
    book = SlotBook(2)
    book.acquire(D, A, 0.0, 4.0)
    free = book.expected_wait_s(D, B, 1.0)
    book.acquire(D, B, 0.0, 2.0)

    full = book.expected_wait_s(D, C, 0.5)
    book.enqueue(D, C)
    behind = book.expected_wait_s(D, E, 0.5)

    assert (free, full, behind) == (0.0, 1.5, 1.5 + 3.0 / 2)
    assert book.expected_wait_s(D, C, 9.0) == 0.05


def test_a_freed_slot_belongs_to_the_first_in_the_queue() -> None:
    """First in, first out: a newcomer does not overtake."""
    book = SlotBook(1)
    book.acquire(D, A, 0.0, 1.0)
    book.enqueue(D, B)
    book.release(A)

    assert not book.acquire(D, C, 0.0, 1.0)
    assert book.next_served(0.0) == B
    assert book.acquire(D, B, 0.0, 1.0)
    assert book.next_served(0.0) is None


def test_transfers_into_one_target_never_exceed_the_cap() -> None:
    """The others wait for a slot, in order."""
    harness = migrating(5, slots_max=2)

    snapshot = harness.policy.snapshot()

    assert [start.stream for start in of(harness.actions, act.Start) if start.attempt == 2] == [
        "s0",
        "s1",
    ]
    assert snapshot["slots"] == {"d1": {"held": 2, "waiting": 3, "max": 2}}
    assert snapshot["streams"]["queued"] == 3


def test_a_slot_is_free_again_when_the_stream_flows_fails_or_ends() -> None:
    """Each of the three lets the next one in."""
    harness = migrating(5, slots_max=1)

    resumed = harness.handle(ev.StreamResumed(StreamId("s0"), 2))
    failed = harness.handle(ev.AttemptFailed(StreamId("s1"), 2, D1, "reset", 0))
    ended = harness.handle(ev.StreamEnded(StreamId("s2"), 2))

    assert [start.stream for start in of(resumed, act.Start)] == ["s1"]
    assert [start.stream for start in of(failed, act.Start)] == ["s2"]
    assert [start.stream for start in of(ended, act.Start)] == ["s3"]


@pytest.mark.parametrize(("slots_max", "second"), [(1, Option.RECOMPUTE), (2, Option.MIGRATE)])
def test_auto_weighs_the_wait_for_a_slot(slots_max: int, second: Option) -> None:
    """Two victims fetch over two links, so only the slot is shared: the one that would wait for it
    recomputes.
    """
    harness = PolicyHarness("p0", "d0", "p2", slots_max=slots_max)
    harness.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 3e6))
    harness.handle(ev.LinkMeasured(NodeId("n2"), NodeId("n1"), 3e6))
    harness.handle(ev.StreamArrived(A, 400))
    harness.handle(ev.StreamArrived(B, 400))
    harness.handle(ev.PrefillDone(A, 1, 400))
    harness.handle(ev.PrefillDone(B, 1, 400))
    harness.handle(ev.StreamResumed(A, 1))
    harness.handle(ev.StreamResumed(B, 1))
    harness.handle(instance_up("p1"))
    harness.handle(instance_up("d1", capabilities=frozenset(Capability) - {Capability.SPLIT}))

    records = of(harness.lose("d0"), act.Recovered)

    assert [record.option for record in records] == [Option.MIGRATE, second]


def test_an_expired_slot_ends_its_transfer_and_removes_the_option() -> None:
    """`slot_lease_s`: a transfer that hangs does not keep others out, nor does its stream try the
    same again.
    """
    harness = migrating(2, slots_max=1, slot_lease_s=7.0)

    actions = harness.handle(ev.TimerFired(), at_s=7.0)

    first, second = of(actions, act.Recovered)
    assert (first.stream, first.attempt, first.option) == ("s0", 3, Option.RECOMPUTE)
    assert (second.stream, second.attempt, second.option) == ("s1", 2, Option.MIGRATE)


def test_an_attempt_whose_slot_expired_is_followed_by_one_that_needs_none() -> None:
    """Its transfer may still be under way: it ends with the attempt, and the slot is not shared
    until then.
    """
    harness = PolicyHarness(slots_max=1, slot_lease_s=7.0)
    for name in ("p0", "d0"):
        harness.handle(instance_up(name, prefill=SLOW))
    for stream in (A, B):
        harness.decoding(stream, 321)
    harness.handle(instance_up("d1", prefill=SLOW))
    harness.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 2e5))
    harness.handle(load("p0", 100.0))
    harness.lose("d0")
    waiting = harness.policy.snapshot()["slots"]["d1"]["waiting"]

    expired = of(harness.handle(ev.TimerFired(), at_s=7.0), act.Recovered)

    assert (of(harness.actions, act.Recovered)[0].option, waiting) == (Option.SPLIT, 1)
    assert (expired[0].stream, expired[0].option) == (A, Option.RECOMPUTE)
    failed, slotless = "it has just failed for this stream", "it needs a slot, and none was free in"
    assert expired[0].excluded.pop(Option.SPLIT) == failed
    assert expired[0].excluded
    assert all(each.startswith(slotless) for each in expired[0].excluded.values())


def test_when_every_way_has_failed_only_the_last_stays_removed() -> None:
    """The ways take turns; a transfer that was given up is always replaced at once, so its slot is
    really free.
    """
    harness = migrating(1, slots_max=1, slot_lease_s=7.0)
    options = []

    for attempt in (2, 3, 4):
        options.append(of(harness.actions, act.Recovered)[-1].option)
        harness.handle(ev.AttemptFailed(StreamId("s0"), attempt, D1, "reset", 0))
        harness.handle(ev.TimerFired(), at_s=harness.now_s + 2.0)

    assert options == [Option.MIGRATE, Option.RECOMPUTE, Option.MIGRATE]
    assert of(harness.actions, act.Recovered)[-1].option is Option.RECOMPUTE
    excluded = [sorted(each.excluded) for each in of(harness.actions, act.Recovered)]
    assert excluded[:2] == [[], [Option.MIGRATE]]


def test_a_stream_in_the_queue_is_decided_again_when_its_wait_is_over() -> None:
    """The denial's prediction may have been wrong: it looks again, and keeps its place while
    nothing is better.
    """
    harness = migrating(3, slots_max=1)
    wake = harness.actions[-1]
    assert isinstance(wake, act.WakeAt)

    looked = harness.handle(ev.TimerFired(), at_s=wake.at_s)
    served = harness.handle(ev.StreamResumed(StreamId("s0"), 2))

    assert of(looked, act.Start) == []
    assert only(served, act.Start).stream == "s1"


def test_no_stream_queues_longer_than_streams_wait_for_instances() -> None:
    """After `recovery.wait_s` even a policy that always migrates takes the other way."""
    harness = migrating(2, slots_max=1, wait_s=3.0)

    actions = harness.handle(ev.TimerFired(), at_s=3.0)

    assert (only(actions, act.Recovered).stream, only(actions, act.Recovered).option) == (
        "s1",
        Option.RECOMPUTE,
    )


def test_streams_that_queue_for_a_lost_target_are_decided_again() -> None:
    """The queue is lost with its target."""
    harness = migrating(3, slots_max=1)
    harness.handle(instance_up("d2"))

    harness.lose("d1")

    assert "d1" not in harness.policy.snapshot()["slots"]
    assert harness.policy.snapshot()["slots"]["d2"]["held"] == 1


def test_a_new_target_serves_the_queue_at_once() -> None:
    """Its slots are all free."""
    harness = migrating(3, slots_max=1)

    actions = harness.handle(instance_up("d2"))

    assert [(start.stream, start.plan.decode) for start in of(actions, act.Start)] == [("s1", "d2")]
