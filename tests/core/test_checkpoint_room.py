"""How much room a stream's checkpoint is promised."""

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import GEOMETRY, PolicyHarness, instance_up, of, only


@pytest.mark.parametrize(("most_tokens", "pages"), [(None, 30), (160, 10), (9000, 30)])
def test_no_stream_comes_to_more_than_its_model_can(most_tokens: int | None, pages: int) -> None:
    """Without a limit of its own a stream may grow to the model's; also one that arrived before any
    instance had reported that.
    """
    harness = PolicyHarness("p0", backup=BackupSettings(mode=BackupMode.REMOTE))
    harness.agents("n1")
    waits = harness.handle(ev.StreamArrived(StreamId("A"), 100, most_tokens=most_tokens))

    start = only(harness.handle(instance_up("d0", max_model_len=480)), act.Start)

    assert of(waits, act.Start) == []
    assert start.plan.places == (act.Place(InstanceId("agent-n1"), pages * GEOMETRY.page_bytes),)


def test_the_one_agent_with_room_is_found_in_a_large_cluster() -> None:
    """A stream weighs some of the agents, and all where none of those has room."""
    harness = PolicyHarness("p0", "d0", backup=BackupSettings(mode=BackupMode.REMOTE))
    harness.agents(*(f"n{number}" for number in range(1, 200) if number != 150), capacity_bytes=1)
    harness.agents("n150")

    starts = [
        only(harness.handle(ev.StreamArrived(StreamId(name), 100, most_tokens=160)), act.Start)
        for name in "ABCD"
    ]

    assert {place.holder for start in starts for place in start.plan.places} == {
        InstanceId("agent-n150")
    }
    assert all(start.plan.places for start in starts)


def test_a_new_process_of_an_agent_has_all_of_its_room() -> None:
    """Bookings at an agent, and its reports, end with its process."""
    harness = PolicyHarness("p0", "d0", backup=BackupSettings(mode=BackupMode.REMOTE))
    room = 10 * GEOMETRY.page_bytes
    harness.agents("n1", capacity_bytes=room)
    agent = InstanceId("agent-n1")
    first = only(harness.handle(ev.StreamArrived(StreamId("A"), 100, most_tokens=160)), act.Start)
    harness.handle(ev.CheckpointsReported(agent, 1, room, 1, {StreamId("A"): 1}))

    harness.agents("n1", epoch=2, capacity_bytes=room)

    again = only(harness.handle(ev.StreamArrived(StreamId("B"), 100, most_tokens=160)), act.Start)
    assert first.plan.places == again.plan.places == (act.Place(agent, room),)
