"""Instances that the endpoint picker of a gateway names are preferred for the start of a stream."""

import pytest

from kvrs.config.policy import Handoff
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, load, only

S = StreamId("s")


def started(harness: PolicyHarness, *picked: str) -> tuple[str | None, str]:
    """Prefill and decode instance of a new stream for which these were picked."""
    names = tuple(map(InstanceId, picked))
    stream = StreamId(f"s{len(harness.actions)}")
    plan = only(harness.handle(ev.StreamArrived(stream, 100, picked=names)), act.Start).plan
    return plan.prefill, plan.decode


@pytest.mark.parametrize(
    ("picked", "pair"),
    [
        ((), ("p0", "d0")),
        (("d1",), ("p0", "d1")),
        (("p1",), ("p1", "d1")),
        (("d1", "p0"), ("p0", "d1")),
        (("gone", "d1", "d0"), ("p0", "d1")),  # The first that is up.
        (("gone",), ("p0", "d0")),
    ],
)
def test_a_stream_starts_at_the_first_picked_instances(
    picked: tuple[str, ...], pair: tuple[str, str]
) -> None:
    """The policy chooses what the picker leaves open."""
    assert started(PolicyHarness("p0", "d0", "p1", "d1"), *picked) == pair


def test_a_picked_instance_without_room_is_passed_over() -> None:
    """One that is drained, one that asked for a pause, and one whose queue is too long."""
    drained, busy, slow = (PolicyHarness("p0", "d0", "p1", "d1") for _ in range(3))
    drained.handle(ev.DrainOrdered(InstanceId("d1"), False, {}))
    members = busy.policy.state.view.members
    members[InstanceId("d1")].answers.note_busy(InstanceId("d1"), S, 5.0, 0.0)
    slow.handle(load("p1", 100.0))

    assert started(drained, "d1") == ("p0", "d0")
    assert started(busy, "d1") == ("p0", "d0")
    assert started(slow, "p1") == ("p0", "d0")


def test_a_picked_decode_instance_computes_the_prompt_where_there_is_no_prefill() -> None:
    harness = PolicyHarness()
    for name in ("d0", "d1"):
        harness.handle(instance_up(name, computes_prompts=True))

    assert started(harness, "d1") == (None, "d1")


def test_a_hand_off_stays_with_the_picked_instance() -> None:
    """Though another one would go on sooner."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", handoff=Handoff.AUTO)
    harness.handle(load("d1", 1.0))

    ways = []
    for picked in ((), (InstanceId("p0"), InstanceId("d1"))):
        stream = StreamId(f"s{len(picked)}")
        harness.handle(ev.StreamArrived(stream, 100, picked=picked))
        harness.handle(ev.PrefillDone(stream, 1, 100))
        ways.append(harness.policy.streams[stream].attempt.plan)

    assert [plan and plan.decode for plan in ways] == ["d0", "d1"]


def test_a_recovery_is_placed_as_ever() -> None:
    """The picker knew nothing of the death."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.handle(ev.StreamArrived(S, 100, picked=(InstanceId("d1"),)))
    harness.handle(ev.PrefillDone(S, 1, 100))
    harness.handle(ev.StreamResumed(S, 1))

    actions = harness.lose("d1", s=1)

    assert only(actions, act.Start).plan.decode == "d0"
