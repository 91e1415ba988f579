"""An instance is left before its GPU takes it along."""

import pytest

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Halt, Recovered, Start
from kvrs.policy.cluster_view import ClusterView
from kvrs.policy.config import Degraded, Failing, GpuSettings
from kvrs.policy.events import GpuJudged, InstanceUp, StreamArrived
from kvrs.policy.routing import prefill_for
from kvrs.policy.streams import Stream
from kvrs.protocol.gpus import GpuState
from tests.policy.policy_stories import Story, instance, of, only

S = StreamId("s")


def judged(name: str, state: GpuState, **produced: int) -> GpuJudged:
    return GpuJudged(InstanceId(name), state, "xid 79", {StreamId(s): n for s, n in produced.items()})


def decoders_of(story: Story, count: int) -> set[str]:
    """Where new streams go."""
    names = [StreamId(f"new{len(story.actions)}-{n}") for n in range(count)]
    return {only(story.tell(StreamArrived(name, 10)), Start).plan.decode for name in names}


def test_streams_leave_a_failing_gpu_while_it_still_runs() -> None:
    """Each in a new attempt elsewhere, with what its client has; the old one is not lost, so nothing is fenced."""
    story = Story("p0", "d0", "p1", "d1")
    here = story.decoding("s").plan.decode
    there = "d1" if here == "d0" else "d0"

    actions = story.tell(judged(here, GpuState.FAILING, s=7))

    halt, start, recovered = only(actions, Halt), only(actions, Start), only(actions, Recovered)
    assert (halt.stream, halt.attempt) == (S, 1)
    assert (start.stream, start.attempt, start.plan.decode) == (S, 2, there)
    assert "GPU is failing: xid 79" in recovered.cause
    assert decoders_of(story, 4) == {there}


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        (GpuSettings(failing=Failing.DRAIN), GpuState.FAILING),
        (GpuSettings(degraded=Degraded.DRAIN), GpuState.DEGRADED),
    ],
)
def test_a_drained_instance_gets_nothing_new_and_keeps_what_it_has(settings: GpuSettings, state: GpuState) -> None:
    """Until its GPU is well again."""
    story = Story("p0", "d0", "p1", "d1", gpu=settings)
    here = story.decoding("s").plan.decode

    actions = story.tell(judged(here, state, s=7))
    meanwhile = decoders_of(story, 4)
    story.tell(judged(here, GpuState.HEALTHY))

    assert of(actions, Start) == []
    assert here not in meanwhile
    assert here in decoders_of(story, 4)


def test_a_degraded_gpu_is_used_unless_the_settings_say_otherwise() -> None:
    """A board that is too warm serves; to leave it would make its neighbours warm."""
    story = Story("p0", "d0", "p1", "d1")

    story.tell(judged("d0", GpuState.DEGRADED))

    assert decoders_of(story, 4) == {"d0", "d1"}


def test_who_cannot_be_replaced_serves_on() -> None:
    """A failing GPU may last for hours; no instance at all serves nobody."""
    story = Story("p0", "d0")
    story.decoding("s")

    actions = story.tell(judged("d0", GpuState.FAILING, s=7)) + story.tell(judged("p0", GpuState.FAILING))
    alone = decoders_of(story, 2)
    story.tell(InstanceUp(instance("p1")))
    story.tell(InstanceUp(instance("d1")))

    assert of(actions, Start) == []
    assert of(actions, Halt) == []
    assert (alone, decoders_of(story, 4)) == ({"d0"}, {"d1"})


def test_a_new_process_on_the_same_gpu_is_left_as_well() -> None:
    """The engine is new, the board is not."""
    story = Story("p0", "d0", "p1", "d1")
    story.tell(judged("d0", GpuState.FAILING))

    story.lose("d0")
    story.tell(InstanceUp(instance("d0", epoch=2)))
    drained = decoders_of(story, 4)
    story.tell(judged("d0", GpuState.HEALTHY))

    assert drained == {"d1"}
    assert "d0" in decoders_of(story, 6)


def test_a_history_is_not_computed_on_a_failing_gpu() -> None:
    """Where a recovery needs a prefill, one that is well does it, though the target's own neighbour would be nearer."""
    view, stream = ClusterView(1e9), Stream(S, 0, 100, 0.0, None)
    members = {name: view.add(instance(name)) for name in ("p0", "p1", "d1")}

    well = prefill_for(view, members["d1"], stream)
    view.set_ailing(members["p1"], True)

    assert (well, prefill_for(view, members["d1"], stream)) == (members["p1"], members["p0"])


def test_the_last_one_that_was_well_dies_and_the_ailing_serve_again() -> None:
    """Victims find a target all the same."""
    story = Story("p0", "d0", "p1", "d1")
    story.tell(judged("d0", GpuState.FAILING))
    story.decoding("s")

    actions = story.lose("d1", s=3)

    assert only(actions, Start).plan.decode == "d0"
