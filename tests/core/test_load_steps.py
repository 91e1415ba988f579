"""Which load reports the policy is told of: fewer lines of the event log, and no other decision."""

import pytest

from kvrs.core.fleet.reports import LoadSteps
from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport

D0, D1 = InstanceId("d0"), InstanceId("d1")


def report(delay_s: float, epoch: int = 1) -> LoadReport:
    return LoadReport(epoch, 0, 0, 0, delay_s, [])


def test_what_the_policy_knows_is_told_once() -> None:
    """An idle cluster reports several times a second that nothing has changed."""
    steps = LoadSteps(has_peers=False)

    told = [
        steps.changes_decision(D0, report(delay_s), waiting=False) for delay_s in (0.0, 0.0, 0.0)
    ]

    assert told == [True, False, False]
    assert steps.changes_decision(D1, report(0.0), waiting=False)


def test_small_steps_add_up() -> None:
    """Each is compared with what was told, not with the report before."""
    steps = LoadSteps(has_peers=False)
    assert steps.changes_decision(D0, report(1.0), waiting=False)

    told = [steps.changes_decision(D0, report(1.0 + n * 0.03), waiting=False) for n in range(1, 8)]

    assert told == [False, False, False, True, False, False, False]


def test_an_empty_queue_is_always_news() -> None:
    """The least queue decides between idle instances."""
    steps = LoadSteps(has_peers=False)
    assert steps.changes_decision(D0, report(0.004), waiting=False)

    assert steps.changes_decision(D0, report(0.0), waiting=False)


def test_another_number_of_streams_is_news() -> None:
    """It is how a proxy knows of the streams of its peers, by which victims are spread."""
    counts = ((0, 0), (0, 3), (1, 2), (1, 3), (0, 0))
    reports = [LoadReport(1, queued, running, 0, 0.0, []) for queued, running in counts]

    told = {}
    for has_peers in (True, False):
        steps = LoadSteps(has_peers=has_peers)
        told[has_peers] = [steps.changes_decision(D0, report, waiting=False) for report in reports]

    assert told == {
        True: [True, True, False, True, True],
        False: [True, False, False, False, False],
    }


def test_while_streams_wait_every_report_is_told() -> None:
    """It is a sign of life, after which a stream may be tried again."""
    steps = LoadSteps(has_peers=False)

    assert all(steps.changes_decision(D0, report(0.0), waiting=True) for _ in range(3))


def test_an_instance_that_is_up_again_is_told_anew() -> None:
    """The policy has forgotten what it was told of the one before, also where the epoch stays."""
    steps = LoadSteps(has_peers=False)
    assert steps.changes_decision(D0, report(1.0), waiting=False)
    assert steps.changes_decision(D0, report(1.0, epoch=2), waiting=False)

    steps.forget(D0)

    assert steps.changes_decision(D0, report(1.0, epoch=2), waiting=False)


@pytest.mark.parametrize(("step_s", "is_told"), [(0.004, False), (0.006, True)])
def test_a_short_queue_that_grows_by_5_ms_is_no_news(step_s: float, *, is_told: bool) -> None:
    """A tenth of it would be less than reports are exact to."""
    steps = LoadSteps(has_peers=False)
    assert steps.changes_decision(D0, report(0.001), waiting=False)

    assert steps.changes_decision(D0, report(0.001 + step_s), waiting=False) is is_told
