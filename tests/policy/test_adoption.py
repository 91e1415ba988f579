"""A stream that comes from another proxy."""

import pytest

from kvrs.agent.config import BackupMode, BackupSettings
from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import GiveUp, Recovered, Start
from kvrs.policy.config import PolicyName, SloSettings
from kvrs.policy.costs import Option
from kvrs.policy.events import Deadlines, InstanceUp, Kept, PrefillDone, StreamAdopted, StreamEnded, StreamResumed
from tests.policy.policy_stories import Story, instance, of, only

A = StreamId("a")
P0, AGENT = InstanceId("p0"), InstanceId("agent-n1")


def adopted(*kept: Kept, produced: int = 20) -> StreamAdopted:
    return StreamAdopted(A, 400, produced, kept=kept)


@pytest.mark.parametrize(
    ("kept", "option"),
    [
        ((), Option.RECOMPUTE),
        ((Kept(P0, 1, 25),), Option.MIGRATE),
        ((Kept(AGENT, 3, 26),), Option.RESTORE),
        ((Kept(P0, 2, 25),), Option.RECOMPUTE),
        ((Kept(AGENT, 2, 26),), Option.RECOMPUTE),
        ((Kept(InstanceId("p9"), 1, 25),), Option.RECOMPUTE),
    ],
)
def test_what_the_proxy_before_knew_of_its_kv_is_used_where_it_still_holds(kept: tuple[Kept, ...], option: Option) -> None:
    """Weighed as any recovery; an epoch that is over holds nothing."""
    story = Story("p0", "d0", "p1", "d1", backup=BackupSettings(mode=BackupMode.REMOTE))
    story.agents("n0", "n1", epoch=3)

    actions = story.tell(adopted(*kept))

    start, recovered = only(actions, Start), only(actions, Recovered)
    assert (start.attempt, recovered.option) == (1, option)
    assert bool(start.plan.runs) == (option is not Option.RECOMPUTE)


def test_it_waits_for_an_instance_as_others_do() -> None:
    """A proxy that has just come up knows of no instance yet."""
    story = Story()
    assert of(story.tell(adopted()), Start) == []

    story.tell(InstanceUp(instance("p0")), 0.1)
    actions = story.tell(InstanceUp(instance("d0")), 0.2)

    assert only(actions, Start).attempt == 1


def test_its_time_has_run_since_its_client_asked() -> None:
    """The end-to-end promise is the client's, not the proxy's."""
    story = Story("p0", "d0", slo=SloSettings(abort=True))

    actions = story.tell(StreamAdopted(A, 400, 20, deadlines=Deadlines(end_to_end_s=10.0), age_s=9.99))

    assert only(actions, GiveUp).stream == A


def test_the_proxy_after_it_learns_who_keeps_what() -> None:
    """What is handed on is what the policy believes."""
    story = Story("p0", "d0", name=PolicyName.ALWAYS_RECOMPUTE)
    story.decoding("a", prompt_tokens=100)

    assert story.policy.kept(A) == (Kept(P0, 1, 100 // 16),)
    story.tell(StreamEnded(A, 1))
    assert story.policy.kept(A) == ()


def test_it_is_adopted_once_and_lives_on_as_any_other() -> None:
    """A second word of it changes nothing; its next loss is decided like any."""
    story = Story("p0", "d0", "p1", "d1")
    first = only(story.tell(adopted(Kept(P0, 1, 25))), Start)

    assert of(story.tell(adopted()), Start) == []
    if first.plan.prefill is not None:
        story.tell(PrefillDone(A, 1, 420))
    story.tell(StreamResumed(A, 1))
    actions = story.lose(first.plan.decode, a=30)

    assert only(actions, Start).attempt == 2
