"""Incidents as the live page and `kvrs incidents` describe them."""

from collections.abc import Sequence
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvrs.cli.incidents import incidents, shown_options
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.core.event_log import LogEntry, event_line, header_line, read
from kvrs.core.incidents import (
    MOST_STREAMS,
    TOGETHER_S,
    Fate,
    Incident,
    Incidents,
    Moment,
    RecordedDecision,
    brief,
    compared,
    off_words,
    sentence,
)
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Estimate, Option
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.proxy.streams.recoveries import least_estimates
from tests.core.policy_harness import instance_up, load
from tests.core.recorded_incident import BACKUP, A, B, incident

HEADER = header_line(PolicySettings(), SloSettings(), BACKUP)
D0, D1, P0 = InstanceId("d0"), InstanceId("d1"), InstanceId("p0")
AGENT = InstanceId("agent-n0")
AT = Moment(0.0, None)
WALL_S = 1_795_237_595.0  # 2026-11-21 05:06:35 UTC
Told = tuple[float, ev.Event, Sequence[act.Action]]


def recovered(
    stream: StreamId, attempt: int = 2, cause: str = "killed", failed: InstanceId | None = D0
) -> act.Recovered:
    return act.Recovered(stream, attempt, Option.RECOMPUTE, 0.1, (), cause, failed)


def back(
    stream: StreamId, gap_s: float | None, attempt: int = 2
) -> tuple[ev.Event, list[act.Action]]:
    settled = act.Settled(stream, attempt, Option.RECOMPUTE, 0.1, 0.1, 0.05, 0.2)
    return ev.StreamResumed(stream, attempt, gap_s=gap_s), [settled]


def failed(
    stream: StreamId, attempt: int, at: InstanceId, kind: ev.FailureKind = ev.FailureKind.BROKEN
) -> ev.AttemptFailed:
    return ev.AttemptFailed(stream, attempt, at, f"HTTP {kind}", 0, failure=kind)


def told(*events: Told, most: int | None = 100) -> Incidents:
    found = Incidents(most)
    for at_s, event, actions in events:
        found.note(at_s, WALL_S + at_s, event, actions)
    return found


def lost(*streams: StreamId, at_s: float = 0.0, name: InstanceId = D0) -> Told:
    return at_s, ev.InstanceLost(name, 1, "killed", dict.fromkeys(streams, 3)), []


def test_a_death_is_one_incident_with_its_streams() -> None:
    """Recoveries belong to the death, with the longest pause that a client saw; the sentence says
    when the instance was up again.
    """
    found = told(
        lost(A, B),
        (0.1, ev.TimerFired(), [recovered(A), recovered(B)]),
        (1.0, *back(A, 1.28)),
        (1.1, *back(B, 0.4)),
        (3.0, instance_up("d0", 2), []),
    )

    (only,) = found.entries
    assert str(only.at) == "2026-11-21 05:06:35 UTC"
    assert sentence(only) == (
        "d0 died: killed; 2 streams, all back; longest pause 1.28 s; up again 05:06:38"
    )
    assert [len(each.decisions) for each in only.victims.values()] == [1, 1]
    assert (found.fates[Fate.BACK], found.running, only.is_over) == (2, 0, True)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([lost()], ["d0 died: killed; no streams affected; still down"]),
        (
            [
                (0.0, ev.HolderLost(AGENT, 1, "gone"), []),
                (1.0, ev.HolderUp(AGENT, NodeId("n0"), 2, 1, 1.0), []),
            ],
            ["agent-n0 died: gone; up again 05:06:36"],
        ),
        # How it ended, whether its supervisor reports it before or after the loss.
        (
            [lost(), (0.1, ev.InstanceExited(D0, 1, "signal 9", True), [])],
            ["d0 died: killed (signal 9); no streams affected; still down"],
        ),
        (
            [(0.0, ev.InstanceExited(D0, 1, "signal 9", True), []), lost(at_s=0.1)],
            ["d0 died: killed (signal 9); no streams affected; still down"],
        ),
        # Of its former process.
        (
            [(0.0, ev.InstanceExited(D0, 0, "signal 9", True), []), lost(at_s=0.1)],
            ["d0 died: killed; no streams affected; still down"],
        ),
        # Announced by an order, or by the instance.
        (
            [(0.0, ev.DrainOrdered(D0, True, {}), []), lost(at_s=60.0)],
            ["d0 shut down as announced: killed; no streams affected; still down"],
        ),
        (
            [(0.0, load("d0", draining=True), []), lost(at_s=60.0)],
            ["d0 shut down as announced: killed; no streams affected; still down"],
        ),
        # One stream's connection breaks first.
        (
            [(0.0, failed(A, 1, D0), [recovered(A)]), lost(B, at_s=0.01)],
            ["d0 died: killed; 2 streams, all recovering; still down"],
        ),
        (
            [(0.0, failed(A, 1, D0), [recovered(A)]), lost(B, at_s=TOGETHER_S)],
            [
                "d0 failed 1 attempt: HTTP broken; 1 stream, recovering",
                "d0 died: killed; 1 stream, recovering; still down",
            ],
        ),
        # A stream that could go nowhere for a while belongs to the death.
        (
            [lost(), (60.0, ev.TimerFired(), [recovered(A)])],
            ["d0 died: killed; 1 stream, recovering; still down"],
        ),
        # Two deaths are two incidents.
        (
            [lost(), (1.0, instance_up("d0", 2), []), lost(at_s=2.0)],
            [
                "d0 died: killed; no streams affected; up again 05:06:36",
                "d0 died: killed; no streams affected; still down",
            ],
        ),
        (
            [(0.0, ev.TimerFired(), [recovered(A, cause="moved: its instance is drained")])],
            ["d0: its instance is drained; 1 stream, recovering"],
        ),
        (
            [(0.0, ev.TimerFired(), [recovered(A, cause="rank 1 of d0 lost: reshard")])],
            ["rank 1 of d0 lost: reshard; 1 stream, recovering"],
        ),
        # Requests that nothing could serve.
        (
            [
                (0.0, ev.TimerFired(), [act.GiveUp(stream, act.Reason.NO_INSTANCE, "none", 1.0)])
                for stream in (A, B)
            ],
            ["none; 2 requests given up"],
        ),
    ],
)
def test_sentences(events: list[Told], said: list[str]) -> None:
    assert [sentence(each) for each in told(*events).entries] == said


def test_streams_that_do_not_come_back_are_counted_by_their_fate() -> None:
    """Given up, or impossible to continue, is lost; a client that leaves is neither."""
    c = StreamId("C")
    found = told(
        # Ended by the proxy, which the loss of the instance follows.
        (0.0, ev.StreamEnded(c, 1, "cannot be continued exactly", D0), []),
        lost(A, B, at_s=0.01),
        (0.1, ev.TimerFired(), [act.GiveUp(A, act.Reason.RETRIES, "failed 3 times", 1.0)]),
        (0.1, ev.StreamEnded(A, 1), []),
        (0.2, ev.StreamEnded(B, 1), []),
    )

    (only,) = found.entries
    assert sentence(only) == "d0 died: killed; 3 streams: 2 lost, 1 cancelled; still down"
    assert (found.fates[Fate.BACK], found.fates[Fate.LOST], found.fates[Fate.LEFT]) == (0, 2, 1)
    assert found.running == 0


def test_attempts_that_fail_on_the_way_belong_to_the_same_incident() -> None:
    """The stream is tried again, and has come back once."""
    found = told(
        lost(A),
        (0.1, ev.TimerFired(), [recovered(A)]),
        (0.2, failed(A, 2, D1), [recovered(A, 3, "HTTP broken", D1)]),
        (0.4, *back(A, 0.5, attempt=3)),
    )

    (only,) = found.entries
    (victim,) = only.victims.values()
    assert [each.outcome(victim) for each in victim.decisions] == ["tried again", "back"]
    assert victim.decisions[0].retried_for == "HTTP broken"
    assert sentence(only) == "d0 died: killed; 1 stream, back; pause 0.50 s; still down"
    assert found.fates[Fate.BACK] == 1


def test_a_second_death_on_the_way_hits_the_stream_again() -> None:
    """Both incidents have it; it is saved once."""
    found = told(
        lost(A),
        (0.1, ev.TimerFired(), [recovered(A)]),
        lost(A, at_s=0.2, name=D1),
        (0.3, ev.TimerFired(), [recovered(A, 3, failed=D1)]),
        (0.4, *back(A, 0.5, attempt=3)),
    )

    assert [each.fates[Fate.BACK] for each in found.entries] == [1, 1]
    assert found.fates[Fate.BACK] == 1


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (ev.FailureKind.REFUSED, act.Reason.REFUSED, None),
        # Nobody knows whose fault the first one was.
        (ev.FailureKind.REFUSED, act.Reason.RETRIES, "HTTP refused; 1 stream, lost"),
        # The instance failed, and the request was at fault as well.
        (ev.FailureKind.BROKEN, act.Reason.REFUSED, "HTTP broken; 1 stream, cancelled"),
        # The instances do not take the proxy's key.
        (ev.FailureKind.DENIED, act.Reason.DENIED, "HTTP denied; 1 stream, lost"),
    ],
)
def test_requests_that_were_at_fault_are_no_incidents(
    first: ev.FailureKind, last: act.Reason, said: str | None
) -> None:
    """Nor is what was done only to learn that they are; failures of other streams beside them
    are.
    """
    kind = first if first is ev.FailureKind.DENIED else ev.FailureKind.REFUSED
    found = told(
        (1.0, failed(A, 1, P0, first), [recovered(A, failed=P0)]),
        (1.1, failed(B, 1, D1), []),
        (1.2, failed(A, 2, D0, kind), [act.GiveUp(A, last, "no", 1.0)]),
    )

    others = "d1 failed 1 attempt: HTTP broken; 1 stream, recovering"
    assert [sentence(each) for each in found.entries] == [
        *([f"p0 failed 1 attempt: {said}"] if said else []),
        others,
    ]


def test_a_proxy_keeps_a_bounded_part() -> None:
    """All streams are counted, some are kept; each option has one estimate."""
    streams = [StreamId(f"s{number}") for number in range(MOST_STREAMS + 5)]
    estimates = tuple(
        Estimate(Option.RECOMPUTE, InstanceId(f"d{number}"), 0.1 + number) for number in range(9)
    )
    decided = [msgspec.structs.replace(recovered(each), estimates=estimates) for each in streams]

    found = told(lost(*streams), (0.1, ev.TimerFired(), decided))
    kept = told(
        *(lost(at_s=float(number), name=InstanceId(f"d{number}")) for number in range(9)), most=3
    )

    (only,) = found.entries
    assert len(only.victims) == MOST_STREAMS
    assert only.fates.total() == MOST_STREAMS + 5
    (decision,) = only.victims[streams[0]].decisions
    assert isinstance(decision.action, act.Recovered)
    assert len(decision.action.estimates) == 1
    assert [each.subject for each in kept.entries] == ["d6", "d7", "d8"]


NUMBERS = st.integers(0, 3).map(float)
ESTIMATES = st.builds(
    Estimate,
    st.sampled_from([Option.MIGRATE, Option.RESTORE, Option.RECOMPUTE]),
    st.sampled_from([D0, D1]),
    NUMBERS,
    at_target_s=NUMBERS,
)


@given(st.lists(ESTIMATES, min_size=1), st.integers(0, 9), NUMBERS)
def test_what_is_kept_of_a_decision_shows_the_same(
    estimates: list[Estimate], chosen: int, others: float
) -> None:
    """In the state, and on the page, which counts the wait of other victims."""
    taken = estimates[chosen % len(estimates)]
    action = act.Recovered(
        A, 2, taken.option, taken.next_token_s, tuple(estimates), "killed", D0, others
    )

    kept = brief(action)

    assert len(kept.estimates) <= 5
    assert least_estimates(kept) == least_estimates(action)
    whole, of_kept = (
        {each.option: id(each) for each in compared(one, RecordedDecision(0, AT, one, None).chosen)}
        for one in (action, kept)
    )
    assert of_kept == whole


def happened(lines: list[str]) -> list[Incident]:
    return incidents(record for record in read(lines) if isinstance(record, LogEntry))


def test_a_recorded_incident_is_read_from_its_log() -> None:
    """Instances, an attempt and an agent, in their order."""
    assert [sentence(each) for each in happened(incident())] == [
        "d0 died: killed; 2 streams, all back; still down",
        "d1 failed 1 attempt: reset [by peer]; 1 stream, cancelled",
        "p1 died: gone; no streams affected; still down",
        "agent-n1 died: gone; still down",
    ]


def test_a_choice_never_contradicts_the_costs_beside_it() -> None:
    """The chosen option costs what was predicted, and no other that was possible costs less, with
    the wait of other victims.
    """
    decisions = [
        decision
        for each in happened(incident())
        for victim in each.victims.values()
        for decision in victim.decisions
    ]
    last = decisions[-1]
    assert isinstance(last.action, act.Recovered)
    best = last.costs[0].option
    excluded = msgspec.structs.replace(last.action, excluded={best: "it has just failed"})

    for decision in decisions:
        assert isinstance(decision.action, act.Recovered)
        first = decision.costs[0]
        assert (first.is_chosen, first.option) == (True, decision.action.option)
        assert first.predicted_s == decision.action.predicted_s
        assert Option.RECOMPUTE in {each.option for each in decision.costs}
    shown = RecordedDecision(0, last.at, excluded, last.new_plan).costs
    assert [each.excluded for each in shown if each.option is best] == ["it has just failed"]


def test_a_decision_without_restore_names_the_agents_that_were_down() -> None:
    """Not those that are up again, and none where restore was weighed."""
    other = InstanceId("agent-n1")
    weighed = msgspec.structs.replace(
        recovered(B),
        estimates=(Estimate(Option.RESTORE, D1, 0.1, 0.0, 0.1, 0.0, False),),
    )

    found = told(
        (0.0, ev.HolderLost(AGENT, 1, "killed"), []),
        (0.1, ev.HolderLost(other, 1, "killed"), []),
        (0.2, ev.HolderUp(other, NodeId("n1"), 2, 1, 1.0), []),
        (0.3, ev.InstanceLost(D0, 1, "killed", {A: 1, B: 1}), [recovered(A), weighed]),
    )

    without, with_restore = (found.entries[-1].victims[each].decisions[0] for each in (A, B))
    assert without.agents_down == (AGENT,)
    assert [*shown_options(without)] == ["restore not weighed (down: agent-n0)"]
    assert with_restore.agents_down == ()


@pytest.mark.parametrize(("others", "waiting"), [(2.0, 0), (0.0, 2)])
def test_each_option_is_shown_at_the_target_where_it_would_have_been_chosen(
    others: float, waiting: int
) -> None:
    """The least with the wait of others, for a single victim of those that wait already; the chosen
    option where it was chosen.
    """
    estimates = tuple(
        Estimate(option, target, total_s, at_target_s=at_target_s, waiting=waiting)
        for option, target, total_s, at_target_s in (
            (Option.RECOMPUTE, D1, 7.0, 1.0),
            (Option.RECOMPUTE, D0, 8.0, 1.0),
            (Option.MIGRATE, D1, 9.0, 3.0),
            (Option.MIGRATE, D0, 12.0, 0.0),
            (Option.MIGRATE, P0, 14.0, 0.0),
        )
    )
    action = act.Recovered(A, 2, Option.RECOMPUTE, 8.0, estimates, "killed", P0, others)

    costs = RecordedDecision(0, Moment(0.0, None), action, act.Plan(D0)).costs

    assert costs == RecordedDecision(0, Moment(0.0, None), brief(action), act.Plan(D0)).costs
    assert [(each.option, each.predicted_s, each.extra_s) for each in costs] == [
        (Option.RECOMPUTE, 8.0, 2.0),
        (Option.MIGRATE, 12.0, 0.0),
    ]


def test_a_decision_is_shown_with_its_way() -> None:
    """Source, pages and target."""
    (first, *_) = happened(incident())[0].victims[A].decisions

    assert first.chosen is not None
    assert first.way == f"{first.option} to d1 from agent-n1 [{first.chosen.first_page}, 62)"


def test_costs_of_options_have_the_interval_of_that_moment() -> None:
    """A log's record has the ends of the chosen plan's interval: the factor to them is that of all
    estimates then. It is not known before the first token, nor without an interval.
    """
    (first, *_) = happened(incident())[0].victims[A].decisions
    settled = first.settled
    assert settled is not None
    assert settled.high_s is not None
    unknown = [
        RecordedDecision(0, first.at, first.action, None),
        RecordedDecision(
            0, first.at, first.action, None, replace(settled, low_s=None, high_s=None)
        ),
        RecordedDecision(0, first.at, first.action, None, replace(settled, predicted_s=0.0)),
    ]

    assert first.interval(settled.predicted_s) == pytest.approx((settled.low_s, settled.high_s))
    factor = first.interval_factor
    assert factor is not None
    assert factor > 1
    shown = [*shown_options(first)]
    for cost, text in zip(first.costs, shown, strict=True):
        low_s, high_s = cost.predicted_s / factor, cost.predicted_s * factor
        assert text.startswith(f"{cost.option} {cost.predicted_s:.4g} ({low_s:.3g} - {high_s:.3g})")
    assert [each.interval(1.0) for each in unknown] == [None, None, None]


@pytest.mark.parametrize(
    ("predicted_s", "real_s", "said"),
    [
        (0.1, 0.2, "x2 longer"),
        (0.2, 0.1, "x2 shorter"),
        (0.1, 0.1, "x1"),
        (0.0002, 0.0, "x1"),
        (inf, 1.0, None),
    ],
)
def test_a_decision_says_how_far_its_prediction_is_off(
    predicted_s: float, real_s: float, said: str | None
) -> None:
    """By the prediction beside the other victims, where the stream has its token."""
    action = recovered(A)
    settled = act.Settled(A, 2, Option.MIGRATE, predicted_s, real_s)

    made = RecordedDecision(0, Moment(0.0, None), action, None, settled)
    running = RecordedDecision(0, Moment(0.0, None), action, None)

    assert (made.predicted_s, off_words(made.off)) == (predicted_s, said)
    assert (running.predicted_s, running.off) == (action.predicted_s, None)


def test_times_of_a_log_without_utc_are_its_own() -> None:
    lines = [
        HEADER,
        event_line(0.0, ev.InstanceLost(D0, 1, "killed", {}), []),
        event_line(2.5, instance_up("d0", 2), []),
    ]

    (only,) = happened(lines)

    assert str(only.at) == "at 0.000 s"
    assert sentence(only) == "d0 died: killed; no streams affected; up again after 2.5 s"
