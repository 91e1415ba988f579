"""Which load reports the policy is told of: fewer lines of the event log, and no other decision."""

import pytest

from kvrs.core.model.member import Member
from kvrs.core.model.reports import changes_decision
from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport
from tests.core.policy_harness import PolicyHarness, instance_up, load, member


def report(delay_s: float, epoch: int = 1) -> LoadReport:
    return LoadReport(epoch, 0, 0, 0, delay_s, [])


def is_told(
    there: Member, reported: LoadReport, *, has_peers: bool = False, waiting: bool = False
) -> bool:
    """The policy is told of the report, and knows it from then on."""
    is_news = changes_decision(there, reported, 0.0, has_peers=has_peers, waiting=waiting)
    there.told = reported if is_news else there.told
    return is_news


def test_what_the_policy_knows_is_told_once() -> None:
    """An idle cluster reports several times a second that nothing has changed."""
    there = member("d0")

    told = [is_told(there, report(delay_s)) for delay_s in (0.0, 0.0, 0.0)]

    assert told == [True, False, False]
    assert is_told(member("d1"), report(0.0))


def test_small_steps_add_up() -> None:
    """Each is compared with what was told, not with the report before."""
    there = member("d0")
    assert is_told(there, report(1.0))

    told = [is_told(there, report(1.0 + n * 0.03)) for n in range(1, 8)]

    assert told == [False, False, False, True, False, False, False]


def test_an_empty_queue_is_always_news() -> None:
    """The least queue decides between idle instances."""
    there = member("d0")
    assert is_told(there, report(0.004))

    assert is_told(there, report(0.0))


def test_another_number_of_streams_is_news() -> None:
    """It is how a proxy knows of the streams of its peers, by which victims are spread."""
    counts = ((0, 0), (0, 3), (1, 2), (1, 3), (0, 0))
    reports = [LoadReport(1, queued, running, 0, 0.0, []) for queued, running in counts]

    told = {}
    for has_peers in (True, False):
        there = member("d0")
        told[has_peers] = [is_told(there, each, has_peers=has_peers) for each in reports]

    assert told == {
        True: [True, True, False, True, True],
        False: [True, False, False, False, False],
    }


def test_while_streams_wait_every_report_is_told() -> None:
    """It is a sign of life, after which a stream may be tried again."""
    there = member("d0")

    assert all(is_told(there, report(0.0), waiting=True) for _ in range(3))


@pytest.mark.parametrize("same_process", [True, False])
def test_an_instance_that_is_up_again_is_told_anew(same_process: bool) -> None:
    """In another epoch nothing that it said before counts, also where the process is the same."""
    harness = PolicyHarness("d0")
    harness.handle(load("d0", 1.0))
    before = changes(harness, report(1.0))

    harness.handle(instance_up("d0", epoch=2, lives_on=same_process))

    assert (before, changes(harness, report(1.0, epoch=2))) == (False, True)


def changes(harness: PolicyHarness, reported: LoadReport) -> bool:
    return is_told(harness.policy.members[InstanceId("d0")], reported)


@pytest.mark.parametrize(("step_s", "is_news"), [(0.004, False), (0.006, True)])
def test_a_short_queue_that_grows_by_5_ms_is_no_news(step_s: float, *, is_news: bool) -> None:
    """A tenth of it would be less than reports are exact to."""
    there = member("d0")
    assert is_told(there, report(0.001))

    assert is_told(there, report(0.001 + step_s)) is is_news
