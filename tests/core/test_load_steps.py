"""Which load reports the policy is told of: fewer lines of the event log, and no other decision."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvrs.core.model import events as ev
from kvrs.core.model.member import Member
from kvrs.core.model.reports import changes_decision
from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport
from tests.core.policy_harness import TABLE, PolicyHarness, instance_up, load, member


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


def steps(step_s: float, slowness: float | None = None) -> LoadReport:
    return LoadReport(1, 0, 0, 0, 0.0, [], step_s=step_s, slowness=slowness)


@pytest.mark.parametrize(
    ("later", "is_news"),
    [
        (steps(0.0218), False),
        (steps(0.0182, 2.0), False),
        (steps(0.0225, 2.0), True),
        (steps(0.0, 2.0), True),
        (steps(0.02, 2.15), False),
        (steps(0.02, 1.7), True),
        (steps(0.02, None), False),
    ],
)
def test_times_of_steps_are_news_if_they_moved_by_a_tenth(
    later: LoadReport, *, is_news: bool
) -> None:
    """Each step takes another time, which is no reason for a line of the event log."""
    harness = PolicyHarness("d0")
    harness.handle(load("d0", step_s=0.02, slowness=2.0))

    assert changes(harness, later) is is_news


def test_a_slow_drift_of_the_times_is_not_missed() -> None:
    """They are compared with what counts, also where other news brought later ones."""
    harness = PolicyHarness("d0")

    for slowness in (1.0, 1.04, 1.08):
        harness.handle(load("d0", slowness=slowness))

    assert not changes(harness, steps(0.0, 1.08))
    assert changes(harness, steps(0.0, 1.12))


def test_a_table_is_scaled_by_the_times_of_steps() -> None:
    """And by what the present ranks take, which an instance does not count as slowness."""
    harness = PolicyHarness("d0")
    there = harness.policy.members[InstanceId("d0")]

    harness.handle(load("d0", slowness=2.0))
    before = there.times.table.seconds_for(200)
    there.times.set_pace(1.0, 3.0, 0.0)

    assert (before, there.times.table.seconds_for(200)) == pytest.approx((0.4, 1.2))
    assert there.times.full_table == TABLE


def test_a_table_is_made_anew_only_if_the_times_of_steps_moved() -> None:
    """Not at each report."""
    harness = PolicyHarness("d0")
    there = harness.policy.members[InstanceId("d0")]
    harness.handle(load("d0", slowness=2.0))
    made = there.times.table

    harness.handle(load("d0", 0.5, slowness=2.1))

    assert there.times.table is made
    assert there.times.slowness == 2.0


@pytest.mark.parametrize("table", [{"label": "another"}, {"is_guess": True}])
def test_the_slowness_of_a_declared_table_scales_no_other_one(table: dict[str, Any]) -> None:
    """A table that the settings name is not what the instance compares with, and a guess is scaled
    by what the proxy sees.
    """
    harness = PolicyHarness()
    harness.handle(instance_up("d0", prefill=replace(TABLE, **table)))
    there = harness.policy.members[InstanceId("d0")]

    harness.handle(load("d0", slowness=2.0))

    assert there.times.table.seconds_for(200) == TABLE.seconds_for(200)
    assert not changes(harness, steps(0.0, 4.0))


def test_a_decode_step_takes_what_is_reported() -> None:
    """Until then the overhead of a step by the table, which is scaled, too."""
    harness = PolicyHarness()
    table = replace(TABLE, seconds=[0.01, 0.1])
    harness.handle(instance_up("d0", prefill=table))
    there = harness.policy.members[InstanceId("d0")]

    known = [there.times.step_s]
    for reported in (steps(0.0, 3.0), steps(0.05)):
        harness.handle(ev.LoadReported(there.id, reported))
        known.append(there.times.step_s)

    assert known == pytest.approx([0.01, 0.03, 0.05])


def test_an_older_instance_reports_no_times_of_steps() -> None:
    """The fields are left out on the wire, and the policy keeps what it has."""
    harness = PolicyHarness("d0")
    there = harness.policy.members[InstanceId("d0")]
    found = msgspec.json.decode(
        b'{"epoch":1,"queued":0,"running":0,"free_pages":9,"queue_delay_s":0,"links":[]}',
        type=LoadReport,
    )

    harness.handle(ev.LoadReported(InstanceId("d0"), found))

    assert (found.step_s, found.slowness, there.times.slowness) == (0.0, None, 1.0)
    assert there.times.table is there.times.full_table


def test_an_instance_that_has_computed_no_prompt_is_as_slow_as_its_like() -> None:
    """Those with the same table; its own report then counts, and theirs no more."""
    harness = PolicyHarness()
    for name in ("d0", "d1", "p0"):
        harness.handle(instance_up(name, prefill=None))
    harness.handle(load("p0", slowness=2.0))
    members = harness.policy.members

    assert [members[InstanceId(name)].times.slowness for name in ("p0", "d0", "d1")] == [
        2.0,
        2.0,
        2.0,
    ]

    harness.handle(load("d0", slowness=1.0))
    harness.handle(load("p0", slowness=3.0))
    harness.handle(instance_up("d3", prefill=None))

    found = {name: members[InstanceId(name)].times.slowness for name in ("p0", "d0", "d1", "d3")}
    assert found == {"p0": 3.0, "d0": 1.0, "d1": 2.0, "d3": 2.0}


@pytest.mark.parametrize(
    "absurd",
    [{"slowness": 1e-320}, {"slowness": 1e308}, {"step_s": 1e308}, {"step_s": -0.1}],
)
def test_a_report_of_absurd_times_is_refused(absurd: dict[str, float]) -> None:
    """A table by such a factor predicts nothing, also for the instances that share it."""
    sent = msgspec.to_builtins(report(0.0)) | absurd

    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(sent), type=LoadReport)
