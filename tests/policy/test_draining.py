"""An instance that was told to end is left before it does."""

import pytest

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Halt, Recovered, Start
from kvrs.policy.costs import Option
from kvrs.policy.events import DrainReported, InstanceUp, PrefillDone, StreamArrived, StreamResumed
from kvrs.protocol.gpus import GpuState
from tests.policy.policy_stories import Story, instance, of, only
from tests.policy.test_gpu_treatment import decoders_of, judged

S = StreamId("s")


def draining(name: str, epoch: int = 1, **produced: int) -> DrainReported:
    return DrainReported(InstanceId(name), epoch, {StreamId(s): n for s, n in produced.items()})


def test_streams_leave_an_instance_that_is_about_to_end() -> None:
    """Each in a new attempt elsewhere, and nothing new comes."""
    story = Story("p0", "d0", "p1", "d1")
    here = story.decoding("s").plan.decode
    there = "d1" if here == "d0" else "d0"

    actions = story.tell(draining(here, s=7))

    halt, start, recovered = only(actions, Halt), only(actions, Start), only(actions, Recovered)
    assert (halt.stream, halt.attempt) == (S, 1)
    assert (start.stream, start.attempt, start.plan.decode) == (S, 2, there)
    assert recovered.cause == "moved: its instance is about to end"
    assert decoders_of(story, 4) == {there}


def test_what_it_has_computed_is_fetched_from_itself() -> None:
    """It has KV of everything that the client has; prefill has only that of the prompt."""
    story = Story("p0", "d0", "p1", "d1")
    here = story.decoding("s", prompt_tokens=400).plan.decode

    actions = story.tell(draining(here, s=400))

    (run,) = only(actions, Start).plan.runs
    assert (run.holder, run.first_page, run.pages) == (here, 0, 799 // 16)
    assert only(actions, Recovered).option in (Option.MIGRATE, Option.SPLIT)


def test_who_cannot_be_replaced_serves_until_somebody_comes() -> None:
    """Then its streams go there; better twice moved than cut off when its time is over."""
    story = Story("p0", "d0", "p1")
    story.decoding("s")

    alone = story.tell(draining("d0", s=7))
    new = decoders_of(story, 2)
    story.tell(InstanceUp(instance("d1")))
    actions = story.tell(draining("d0", s=9))

    assert (of(alone, Start), of(alone, Halt), new) == ([], [], {"d0"})
    assert [halt.stream for halt in of(actions, Halt)] == [S]
    assert next(start for start in of(actions, Start) if start.stream == S).plan.decode == "d1"


def test_its_successor_is_used_like_any_other() -> None:
    """The process was about to end, not the instance."""
    story = Story("p0", "d0", "p1", "d1")
    story.tell(draining("d0"))

    story.tell(InstanceUp(instance("d0", epoch=2)))
    story.tell(draining("d0"))  # Late news of the process before.

    assert decoders_of(story, 4) == {"d0", "d1"}


def test_a_gpu_that_is_well_again_does_not_stay_a_process_that_ends() -> None:
    """Two reasons to leave it; only one of them is gone."""
    story = Story("p0", "d0", "p1", "d1")
    story.tell(judged("d0", GpuState.FAILING))
    story.tell(draining("d0"))

    story.tell(judged("d0", GpuState.HEALTHY))

    assert decoders_of(story, 4) == {"d1"}


@pytest.mark.parametrize("others", [True, False])
def test_a_prefill_is_handed_off_to_it_only_where_there_is_nobody_else(others: bool) -> None:
    """The plan is from before it said so."""
    story = Story("p0", "d0", *(["p1", "d1"] if others else []))
    planned = only(story.tell(StreamArrived(S, 100)), Start).plan.decode
    story.tell(draining(planned))

    actions = story.tell(PrefillDone(S, 1, 100))

    assert [start.plan.decode != planned for start in of(actions, Start)] == ([True] if others else [])


def test_to_be_moved_is_not_to_fail() -> None:
    """A long stream outlives any number of rolling restarts; `max_attempts` is for requests that break what they run on."""
    story = Story("p0", "d0", "p1", "d1")
    here = story.decoding("s").plan.decode

    for move in range(2, 40):
        start = only(story.tell(draining(here, epoch=move // 2, s=7)), Start)
        story.tell(StreamResumed(S, start.attempt))
        story.tell(InstanceUp(instance(here, epoch=move // 2 + 1)))
        here = start.plan.decode

    assert start.attempt == 39
