"""A stream that comes from another proxy."""

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicyName, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, of, only

A = StreamId("a")
P0, AGENT = InstanceId("p0"), InstanceId("agent-n1")


def adopted(*kept: ev.Kept, produced: int = 20) -> ev.StreamAdopted:
    return ev.StreamAdopted(A, 400, produced, kept=kept)


@pytest.mark.parametrize(
    ("kept", "option"),
    [
        ((), Option.RECOMPUTE),
        ((ev.Kept(P0, 1, 25),), Option.MIGRATE),
        ((ev.Kept(AGENT, 3, 26),), Option.RESTORE),
        ((ev.Kept(P0, 2, 25),), Option.RECOMPUTE),
        ((ev.Kept(AGENT, 2, 26),), Option.RECOMPUTE),
        ((ev.Kept(InstanceId("p9"), 1, 25),), Option.RECOMPUTE),
    ],
)
def test_what_the_proxy_before_knew_of_its_kv_is_used_where_it_still_holds(
    kept: tuple[ev.Kept, ...], option: Option
) -> None:
    """Weighed as any recovery; an epoch that is over holds nothing."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", backup=BackupSettings(mode=BackupMode.REMOTE))
    harness.agents("n0", "n1", epoch=3)

    actions = harness.handle(adopted(*kept))

    start, recovered = only(actions, act.Start), only(actions, act.Recovered)
    assert (start.attempt, recovered.option) == (1, option)
    assert bool(start.plan.runs) == (option is not Option.RECOMPUTE)


def test_it_waits_for_an_instance_as_others_do() -> None:
    """A proxy that has just come up has no instance in its view yet."""
    harness = PolicyHarness()
    assert of(harness.handle(adopted()), act.Start) == []

    harness.handle(instance_up("p0"), 0.1)
    actions = harness.handle(instance_up("d0"), 0.2)

    assert only(actions, act.Start).attempt == 1


def test_its_deadlines_count_from_the_arrival_of_the_request() -> None:
    """The end-to-end promise is the client's, not the proxy's."""
    harness = PolicyHarness("p0", "d0", slo=SloSettings(abort=True))

    actions = harness.handle(
        ev.StreamAdopted(A, 400, 20, deadlines=ev.Deadlines(end_to_end_s=10.0), age_s=9.99)
    )

    assert only(actions, act.GiveUp).stream == A


@pytest.mark.parametrize(("produced", "goes_on"), [(0, False), (20, True)])
def test_a_stream_with_tokens_has_had_its_first_one_at_the_proxy_before(
    produced: int, goes_on: bool
) -> None:
    """The limit to its first token is over with it, and says nothing of the next one."""
    harness = PolicyHarness("p0", "d0", slo=SloSettings(abort=True))

    actions = harness.handle(
        ev.StreamAdopted(A, 400, produced, deadlines=ev.Deadlines(ttft_s=5.0), age_s=9.0)
    )

    assert bool(of(actions, act.Start)) is goes_on
    assert bool(of(actions, act.GiveUp)) is not goes_on


def test_the_next_proxy_learns_where_its_kv_is() -> None:
    """The next proxy gets the places that the policy believes in."""
    harness = PolicyHarness("p0", "d0", name=PolicyName.ALWAYS_RECOMPUTE)
    harness.decoding("a", prompt_tokens=100)

    assert harness.policy.kept(A) == (ev.Kept(P0, 1, 100 // 16),)
    harness.handle(ev.StreamEnded(A, 1))
    assert harness.policy.kept(A) == ()


def test_it_is_adopted_once_and_recovered_like_any_other() -> None:
    """A repeated event changes nothing; its next loss is decided like any."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    first = only(harness.handle(adopted(ev.Kept(P0, 1, 25))), act.Start)

    assert of(harness.handle(adopted()), act.Start) == []
    if first.plan.prefill is not None:
        harness.handle(ev.PrefillDone(A, 1, 420))
    harness.handle(ev.StreamResumed(A, 1))
    actions = harness.lose(first.plan.decode, a=30)

    assert only(actions, act.Start).attempt == 2
