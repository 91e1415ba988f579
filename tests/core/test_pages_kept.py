"""Memory that outlives a process: the instance that is started again has what its streams had."""

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, of, only

A, D0 = StreamId("A"), InstanceId("d0")


def kept(epoch: int = 2, **pages: int) -> ev.PagesKept:
    return ev.PagesKept(D0, epoch, {StreamId(name): count for name, count in pages.items()})


def test_a_victim_reuses_what_its_instance_has_kept() -> None:
    """It waits, since no other instance decodes, and goes back without fetching anything."""
    harness = PolicyHarness("p0", "d0")
    harness.decoding("A", 100)
    assert of(harness.lose("d0", A=60), act.Start) == []

    harness.handle(kept(A=9))
    actions = harness.handle(instance_up("d0", epoch=2))

    start = only(actions, act.Start)
    assert (start.stream, start.plan.decode, start.plan.prefill, start.plan.runs) == (
        *(A, "d0", None),
        (),
    )
    assert only(actions, act.Recovered).option is Option.REUSE


def test_pages_of_another_epoch_do_not_count() -> None:
    """A process that was replaced before it came up has kept nothing for its successor."""
    harness = PolicyHarness("p0", "d0")
    harness.decoding("A", 100)
    harness.lose("d0", A=60)

    harness.handle(kept(epoch=2, A=9))
    actions = harness.handle(instance_up("d0", epoch=3))

    assert all(each.option is not Option.REUSE for each in only(actions, act.Recovered).estimates)


def test_a_second_death_takes_the_kept_pages_along() -> None:
    """Until the process after it says what it has kept."""
    harness = PolicyHarness("p0", "d0")
    harness.decoding("A", 100)
    harness.lose("d0", A=60)
    harness.handle(kept(A=9))
    harness.handle(instance_up("d0", epoch=2))
    harness.lose("d0", epoch=2, A=60)

    actions = harness.handle(instance_up("d0", epoch=3), at_s=20.0)

    recovered = only(actions, act.Recovered)
    assert all(each.option is not Option.REUSE for each in recovered.estimates)


def test_streams_that_are_not_open_are_ignored() -> None:
    harness = PolicyHarness("p0", "d0")
    harness.lose("d0")

    harness.handle(kept(B=3))

    assert harness.handle(instance_up("d0", epoch=2)) == []
