"""Streams of an instance that borrows the host of a stage: they stay, by an option of its own."""

from typing import Any

import pytest

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.reports import changes_ranks
from kvrs.ids import InstanceId
from kvrs_engine.elastic.ways import Way
from tests.core.policy_harness import PolicyHarness, instance_up, load, only
from tests.core.test_staying import S, options_of, reformed, reforming, ring, two_pairs

WAIT, SUBSTITUTE = Way.WAIT.value, Way.SUBSTITUTE.value


def waiting(ready_in_s: float, **changes: Any) -> ev.LoadReported:
    return reforming("d0", ready_in_s, way=WAIT, degree=2, **changes)


def substituting(ready_in_s: float, **changes: Any) -> ev.LoadReported:
    return reforming("d0", ready_in_s, way=SUBSTITUTE, degree=2, **changes)


@pytest.mark.parametrize("way", Way)
def test_only_the_way_substitute_is_an_option_of_its_own(way: Way) -> None:
    harness = two_pairs("s")

    recovered = only(harness.handle(reforming("d0", 0.02, way=way.value), 1.0), act.Recovered)

    expected = Option.SUBSTITUTE if way is Way.SUBSTITUTE else Option.IN_PLACE
    assert recovered.option is expected
    assert {each for each in options_of(recovered) if each.stays} == {expected}
    assert recovered.cause == f"rank 1 of d0 lost: {way.value}"


def test_a_substitution_costs_what_the_report_says() -> None:
    """Until the session stands, then the lost cells; and each stream is free to leave."""
    cells: dict[str, Any] = {"missing_pages": {S: 10}, "page_s": 0.005}
    quick, slow = two_pairs("s"), two_pairs("s")

    stays = only(quick.handle(substituting(0.02, **cells), at_s=1.0), act.Recovered)
    leaves = only(slow.handle(substituting(20.0, **cells), at_s=1.0), act.Recovered)

    assert (stays.option, stays.attempt) == (Option.SUBSTITUTE, 1)
    assert stays.predicted_s == pytest.approx(0.02 + 0.05)
    assert not leaves.option.stays
    assert options_of(leaves)[Option.SUBSTITUTE] == pytest.approx(20.0 + 0.05)


@pytest.mark.parametrize("number", [1, 2])
def test_a_donor_that_is_found_while_the_own_host_is_waited_for_is_decided_anew(
    number: int,
) -> None:
    """In the same re-forming or in a next one: the way is another, and so is the prediction."""
    harness = two_pairs("s")
    harness.handle(load("d1", 60.0), at_s=0.5)
    harness.handle(load("p1", 60.0), at_s=0.5)
    harness.handle(load("p0", 60.0), at_s=0.5)
    only(harness.handle(waiting(8.0), at_s=1.0), act.Stay)

    actions = harness.handle(substituting(0.1, number=number), at_s=1.5)
    harness.handle(reformed("d0"), at_s=1.59)
    settled = only(harness.handle(ev.StreamResumed(S, 1), at_s=1.6), act.Settled)

    assert only(actions, act.Recovered).option is Option.SUBSTITUTE
    assert 1.6 < only(actions, act.Stay).until_s < 2.0
    assert settled.option is Option.SUBSTITUTE
    assert [settled.predicted_s, settled.real_s] == pytest.approx([0.1, 0.1])


def test_a_way_that_changes_alone_is_news() -> None:
    """Nothing else of the prediction has to."""
    harness = two_pairs("s")
    harness.handle(waiting(5.0), at_s=1.0)
    member = harness.policy.members[InstanceId("d0")]

    same = changes_ranks(member, waiting(4.5).report, 1.5)
    other = changes_ranks(member, substituting(4.5).report, 1.5)

    assert (same, other) == (False, True)


def test_a_stream_whose_wait_was_too_long_may_still_stay_by_a_substitution() -> None:
    """A missed deadline rules out the option that missed it, no other."""
    harness = PolicyHarness("p0", "d0")
    harness.decoding("s")
    stay = only(harness.handle(waiting(0.5), at_s=1.0), act.Stay)
    late = ring(harness, stay.until_s)

    found = harness.handle(substituting(0.1), at_s=stay.until_s + 0.1)
    until_s = only(found, act.Stay).until_s
    harness.handle(instance_up("d1"), at_s=until_s - 0.01)
    leaves = ring(harness, until_s)

    assert only(late, act.Stay).attempt == 1
    assert only(found, act.Recovered).option is Option.SUBSTITUTE
    assert only(leaves, act.Recovered).option is not Option.SUBSTITUTE
    assert "was to go on" in only(leaves, act.Recovered).cause
