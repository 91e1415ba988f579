"""Incidents as they are read from an event log."""

import json
from pathlib import Path

import pytest

from kvrs.cli.incidents import Loss, RecordedDecision, incidents, show_incidents
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.core.event_log import LogEntry, event_line, header_line, read
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, StreamId
from tests.core.recorded_incident import BACKUP, A, B, incident

HEADER = header_line(PolicySettings(), SloSettings(), BACKUP)


def happened(lines: list[str]) -> list[Loss | RecordedDecision]:
    return incidents(record for record in read(lines) if isinstance(record, LogEntry))


def test_losses_and_decisions_come_in_their_order() -> None:
    """Instance, attempt and agent; each stream as often as it was decided."""
    found = happened(incident())

    losses = [(each.instance, each.stream) for each in found if isinstance(each, Loss)]
    assert losses == [("d0", None), ("d1", A), ("p1", None), ("agent-n1", None)]
    decided = [
        (each.action.stream, each.settled is not None)
        for each in found
        if isinstance(each, RecordedDecision)
    ]
    assert decided == [(A, True), (B, True), (A, False)]
    assert [each.line for each in found] == sorted(each.line for each in found)


def test_a_decision_is_shown_with_its_way_and_the_others() -> None:
    """Source, pages and target; raw costs, and the other options, the cheapest first."""
    first = next(each for each in happened(incident()) if isinstance(each, RecordedDecision))
    assert isinstance(first.action, act.Recovered)

    chosen, options = first.chosen, first.options

    assert chosen is not None
    assert (chosen.option, chosen.total_s) == (first.action.option, first.action.predicted_s)
    assert options[first.option] <= first.action.predicted_s
    assert list(options.values()) == sorted(options.values())
    assert Option.RECOMPUTE in options
    assert first.way == f"{first.option} to d1 from agent-n1 [{chosen.first_page}, 62)"


def test_a_stream_that_was_given_up_is_a_decision_too() -> None:
    """With its reason, and nothing to settle."""
    gone = act.GiveUp(A, act.Reason.NO_INSTANCE, "no instance came up within 30 s", 30.0)
    lines = [
        HEADER,
        event_line(0.0, ev.StreamArrived(A, 10), []),
        event_line(30.0, ev.TimerFired(), [gone]),
    ]

    (found,) = happened(lines)

    assert isinstance(found, RecordedDecision)
    assert (found.action, found.line, found.chosen, found.options, found.way) == (
        gone,
        3,
        None,
        {},
        "abort",
    )


def refused(stream: StreamId, attempt: int, at: str, kind: ev.FailureKind) -> ev.AttemptFailed:
    return ev.AttemptFailed(stream, attempt, InstanceId(at), "HTTP 400", 0, failure=kind)


def recovered(stream: StreamId, attempt: int) -> act.Recovered:
    return act.Recovered(stream, attempt, Option.START, 0.1, (), "HTTP 400", InstanceId("p0"))


@pytest.mark.parametrize(
    ("first", "last", "found"),
    [
        (ev.FailureKind.REFUSED, act.Reason.REFUSED, []),
        # Nobody knows whose fault the first one was.
        (ev.FailureKind.REFUSED, act.Reason.RETRIES, ["p0", "recovered", "p1", "given up"]),
        # The instance failed, and the request was at fault as well.
        (ev.FailureKind.BROKEN, act.Reason.REFUSED, ["p0", "recovered"]),
        # The instances do not take the proxy's key.
        (ev.FailureKind.DENIED, act.Reason.DENIED, ["p0", "recovered", "p1", "given up"]),
    ],
)
def test_requests_that_were_at_fault_are_no_incidents(
    first: ev.FailureKind, last: act.Reason, found: list[str]
) -> None:
    """Nor is what was done only to learn that they are; failures of other streams beside them
    are.
    """
    kind = first if first is ev.FailureKind.DENIED else ev.FailureKind.REFUSED
    lines = [
        HEADER,
        event_line(0.0, ev.StreamArrived(A, 10), []),
        event_line(1.0, refused(A, 1, "p0", first), [recovered(A, 2)]),
        event_line(1.1, refused(B, 1, "p2", ev.FailureKind.BROKEN), []),
        event_line(1.2, refused(A, 2, "p1", kind), [act.GiveUp(A, last, "no", 1.0)]),
    ]

    names = [
        each.instance
        if isinstance(each, Loss)
        else "given up"
        if isinstance(each.action, act.GiveUp)
        else "recovered"
        for each in happened(lines)
    ]

    assert sorted(names) == sorted([*found, "p2"])


def test_placements_by_prefix_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts that went past the shortest queue, with what both instances had of them."""
    p0, p1 = InstanceId("p0"), InstanceId("p1")
    plan = act.Plan(InstanceId("d0"), p1)
    lines = [
        HEADER,
        event_line(0.0, ev.StreamArrived(A, 1000), [act.Start(A, 1, plan, {p0: 0, p1: 900})]),
        event_line(1.0, ev.StreamArrived(B, 1000), [act.Start(B, 1, plan, {p1: 512})]),
        event_line(2.0, ev.StreamArrived(StreamId("C"), 9), [act.Start(StreamId("C"), 1, plan)]),
    ]
    log = tmp_path / "events.jsonl"
    log.write_text("\n".join(lines) + "\n")

    show_incidents(log, as_json=True)

    shown = json.loads(capsys.readouterr().out)
    assert shown["began_cached"] == 2
    assert shown["placed_by_prefix"] == [
        {
            "line": 2,
            "stream": A,
            "instance": p1,
            "cached_tokens": 900,
            "shortest_queue": p0,
            "cached_there": 0,
        }
    ]
