"""Which instances get new streams, by what their answers were."""

from typing import Any

import pytest

from kvrs.core import outliers
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.member import AnswerHealth, pause_s
from kvrs.core.model.streams import RefusedBy, Stream
from kvrs.core.outliers import ERROR_PAUSE_S
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, member, of, only

P0, P1, D0, B0, B1 = (InstanceId(name) for name in ("p0", "p1", "d0", "b0", "b1"))
A, B = StreamId("A"), StreamId("B")
PAIRS = ("p0", "d0", "p1", "d1", "p2", "d2")
EVERY_S = 0.05


def fail(
    harness: PolicyHarness,
    start: act.Start,
    at: InstanceId,
    kind: ev.FailureKind = ev.FailureKind.BROKEN,
    at_s: float | None = None,
    *,
    final: bool = False,
) -> list[act.Start]:
    event = ev.AttemptFailed(start.stream, start.attempt, at, "no", 0, failure=kind, final=final)
    return of(harness.handle(event, at_s), act.Start)


def complete(harness: PolicyHarness, start: act.Start) -> None:
    harness.handle(ev.PrefillDone(start.stream, start.attempt, 20))
    harness.handle(ev.StreamResumed(start.stream, start.attempt))
    harness.handle(ev.StreamEnded(start.stream, start.attempt))


def sick_starts(
    harness: PolicyHarness, sick: InstanceId, kind: ev.FailureKind, to_s: float
) -> float:
    """Streams one after the other; when those came that `sick` got, and failed in this way."""
    times: list[float] = []
    for n in range(round(to_s / EVERY_S)):
        arrived = harness.handle(ev.StreamArrived(StreamId(f"s{n}"), 20), at_s=n * EVERY_S)
        start = only(arrived, act.Start)
        if sick in (start.plan.prefill, start.plan.decode):
            times.append(n * EVERY_S)
            if sick == start.plan.decode:
                harness.handle(ev.PrefillDone(start.stream, start.attempt, 20))
            (start,) = fail(harness, start, sick, kind)
        complete(harness, start)
    return max(sum(begin <= at < begin + 10.0 for at in times) for begin in times)


# An output that differs is no fault of an instance, and has tokens before it.
@pytest.mark.parametrize(
    "kind", [each for each in ev.FailureKind if each is not ev.FailureKind.DIFFERS]
)
@pytest.mark.parametrize("sick", [P0, D0])
def test_an_instance_that_fails_everything_gets_three_streams_in_ten_seconds(
    sick: InstanceId, kind: ev.FailureKind
) -> None:
    """Whenever it begins to fail: at 20 streams/s that is below 2 % of them, and not none."""
    harness = PolicyHarness(*PAIRS)

    most = sick_starts(harness, sick, kind, to_s=60.0)

    assert most == 3


def test_a_probe_that_ends_before_it_has_come_there_makes_room_for_another() -> None:
    """A stream whose prefill is not done yet probes the decode instance of its plan."""
    harness = PolicyHarness("p0", "d0")
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    harness.handle(ev.PrefillDone(A, 1, 20))
    fail(harness, first, D0)
    harness.handle(ev.StreamEnded(A, 1))
    health = harness.policy.members[D0].answers

    harness.handle(ev.StreamArrived(B, 20), at_s=1.0)
    probes = health.probe
    harness.handle(ev.StreamEnded(B, 1))

    assert (probes, health.probe) == (B, None)


def test_an_instance_that_fails_its_probe_is_ejected() -> None:
    """A pause lies between the two failures, so that one incident is not both."""
    harness = PolicyHarness(*PAIRS)
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)

    fail(harness, first, P0)
    after_one = of(harness.actions, act.Ejected)
    probe = only(harness.handle(ev.StreamArrived(B, 20), at_s=1.0), act.Start)
    fail(harness, probe, P0)

    assert after_one == []
    assert probe.plan.prefill == P0
    assert only(harness.actions, act.Ejected).instance == P0


def test_an_answered_probe_readmits_its_instance() -> None:
    """Its next failure is one of an instance that was well."""
    harness = PolicyHarness(*PAIRS)
    health = harness.policy.members[P0].answers
    for at_s, stream in ((0.0, A), (1.0, B)):
        fail(harness, only(harness.handle(ev.StreamArrived(stream, 20), at_s), act.Start), P0)
    was_ejected = health.is_ejected

    probe = only(harness.handle(ev.StreamArrived(StreamId("C"), 20), at_s=10.0), act.Start)
    harness.handle(ev.PrefillDone(probe.stream, probe.attempt, 20))

    assert (probe.plan.prefill, was_ejected) == (P0, True)
    assert only(harness.actions, act.Readmitted).instance == P0
    assert (health.is_ejected, health.until_s, health.pauses) == (False, None, 0)


def failures_until(harness: PolicyHarness, sick: InstanceId, start: act.Start, at_s: float) -> int:
    """How often the stream fails at the instance, as soon as it is tried there."""
    failures, waiting = 0, [start]
    while harness.now_s < at_s:
        for each in waiting:
            failures += 1
            fail(harness, each, sick)
        waiting = of(harness.look_until(harness.now_s + 0.05), act.Start)
    return failures


@pytest.mark.parametrize("others_return", [True, False])
def test_answers_of_an_ejected_instance_use_up_no_attempt(*, others_return: bool) -> None:
    """It is tried for want of others. Attempts are left when these are back; where they are not,
    the stream is refused once it has waited for `recovery.wait_s`.
    """
    harness = PolicyHarness("b0", "b1", max_attempts=3)
    outliers._eject(harness.policy.state, harness.policy.state.view.members[B0], "HTTP 500")
    start = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    assert start.plan.decode == B1
    (again,) = of(harness.lose("b1", A=0), act.Start)

    failures = failures_until(harness, B0, again, at_s=20.0 if others_return else 60.0)
    up = harness.handle(instance_up("b1", epoch=2))

    assert failures > 3
    refused = [each.reason for each in of(harness.actions, act.GiveUp)]
    if others_return:
        assert (only(up, act.Start).plan.decode, refused) == (B1, [])
    else:
        assert refused == [act.Reason.RETRIES]


def test_a_probe_that_the_client_made_impossible_ejects_no_instance() -> None:
    """A refusal in which a second instance agrees is the fault of neither."""
    harness = PolicyHarness(*PAIRS)
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    fail(harness, first, P0)
    probe = only(harness.handle(ev.StreamArrived(B, 20), at_s=1.0), act.Start)

    (second,) = fail(harness, probe, P0, ev.FailureKind.REFUSED)
    assert second.plan.prefill is not None
    fail(harness, second, second.plan.prefill, ev.FailureKind.REFUSED)

    assert probe.plan.prefill == P0
    assert [each.stream for each in of(harness.actions, act.GiveUp)] == [B]
    assert of(harness.actions, act.Ejected) == []


@pytest.mark.parametrize("known", [True, False])
def test_the_last_instance_decides_a_refusal_unless_it_refuses_what_others_accept(
    *, known: bool
) -> None:
    """One that fails every call refuses no client for good while its peers are away."""
    harness = PolicyHarness("b0")
    if known:
        first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
        harness.handle(instance_up("b1"))
        (second,) = fail(harness, first, B0, ev.FailureKind.REFUSED)
        complete(harness, second)
        harness.lose("b1", at_s=1.0)
    alone = only(harness.handle(ev.StreamArrived(B, 20), at_s=2.0), act.Start)

    fail(harness, alone, B0, ev.FailureKind.REFUSED)
    up = of(harness.handle(instance_up("b1", epoch=2)), act.Start)

    assert [each.reason for each in of(harness.actions, act.GiveUp)] == [act.Reason.REFUSED] * (
        not known
    )
    assert [each.plan.decode for each in up] == [B1] * known


def test_a_stream_of_which_all_instances_deny_the_key_is_no_fault_of_the_request() -> None:
    """Another instance is asked first; the reason names the last one."""
    harness = PolicyHarness("b0", "b1")
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)

    (second,) = fail(harness, first, first.plan.decode, ev.FailureKind.DENIED)
    assert fail(harness, second, second.plan.decode, ev.FailureKind.DENIED) == []

    given_up = only(harness.actions, act.GiveUp)
    assert second.plan.decode != first.plan.decode
    assert given_up.reason is act.Reason.DENIED
    assert given_up.message == f"{second.plan.decode}: no"


def test_an_instance_that_denies_the_key_is_charged_when_another_one_takes_it() -> None:
    harness = PolicyHarness("b0", "b1")
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)

    (second,) = fail(harness, first, first.plan.decode, ev.FailureKind.DENIED)
    complete(harness, second)
    after = [only(harness.handle(ev.StreamArrived(B, 20)), act.Start).plan.decode]

    assert after == [second.plan.decode]
    assert of(harness.actions, act.GiveUp) == []


def test_a_refusal_that_names_the_request_s_fault_is_final() -> None:
    """No other instance is asked, and the one that was asked is not to blame."""
    harness = PolicyHarness(*PAIRS)
    for n in range(20):
        start = only(
            harness.handle(ev.StreamArrived(StreamId(f"s{n}"), 20), at_s=n * 0.01), act.Start
        )
        where = start.plan.prefill or start.plan.decode

        assert fail(harness, start, where, ev.FailureKind.REFUSED, final=True) == []

    assert [each.reason for each in of(harness.actions, act.GiveUp)] == [act.Reason.REFUSED] * 20
    assert of(harness.actions, act.Ejected) == []
    assert only(harness.handle(ev.StreamArrived(A, 20), at_s=1.0), act.Start).plan.prefill == P0


def test_a_final_refusal_of_an_instance_that_refuses_what_others_accept_is_not_believed() -> None:
    """It gets a probe now and then, whose client must not pay for it."""
    harness = PolicyHarness("b0")
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    harness.handle(instance_up("b1"))
    (second,) = fail(harness, first, B0, ev.FailureKind.REFUSED)
    complete(harness, second)
    probe = only(harness.handle(ev.StreamArrived(B, 20), at_s=2.0), act.Start)
    assert probe.plan.decode == B0

    (again,) = fail(harness, probe, B0, ev.FailureKind.REFUSED, final=True)

    assert again.plan.decode == B1


def test_no_busy_instance_is_a_target_and_one_that_fails_is_where_no_other_is() -> None:
    """A pause that an instance has asked for itself holds in any case."""
    view = ClusterView(1e9)
    busy, failing, well = [view.add(member(name)) for name in ("d0", "d1", "d2")]
    busy.answers.note_busy(busy.id, A, 1.0, view.now_s)
    failing.answers.close("HTTP 500", view.now_s, 1.0)

    with_one = view.targets()
    view.remove(well)

    assert (with_one, view.targets()) == ([well], [failing])


def test_a_second_refusal_of_an_instance_takes_the_place_of_its_first() -> None:
    """Else one that others contradict would count twice."""
    stream = Stream(A, 0, 20, 0.0)
    for instance, epoch in ((B0, 1), (B1, 1), (B0, 2)):
        stream.note_refusal(RefusedBy(instance, epoch, is_probe=False))

    assert [(each.instance, each.epoch) for each in stream.refusals] == [(B1, 1), (B0, 2)]


def test_a_final_refusal_of_what_has_begun_is_a_failure() -> None:
    """Another instance had accepted the request."""
    harness = PolicyHarness("b0", "b1")
    begun = harness.decoding("A")
    event = ev.AttemptFailed(
        A, 1, begun.plan.decode, "no", 5, failure=ev.FailureKind.REFUSED, final=True
    )

    again = of(harness.handle(event), act.Start)

    assert [each.attempt for each in again] == [2]


@pytest.mark.parametrize(("instances", "at"), [(["b0", "b1"], [B0, B1]), (["b0"], [B0, B0])])
@pytest.mark.parametrize("begun", [True, False])
def test_logits_that_are_no_numbers_twice_are_the_stream_s_own(
    instances: list[str], at: list[InstanceId], *, begun: bool
) -> None:
    """Elsewhere for the second time where there is another instance. Neither is to blame: each gets
    the next stream.
    """
    harness = PolicyHarness(*instances)
    if begun:
        harness.decoding("A")
    else:
        harness.handle(ev.StreamArrived(A, 20))
    ends: list[list[act.Action]] = []
    for number, instance in enumerate(at, 1):
        kind = ev.FailureKind.NOT_A_NUMBER
        event = ev.AttemptFailed(A, number, instance, "nan", 5 * begun, failure=kind)
        ends.append([*harness.handle(event), *harness.look_until(number)])

    (given_up,) = of(ends[1], act.GiveUp)
    assert [each.plan.decode for each in of(ends[0], act.Start)] == [at[1]]
    assert of(ends[0], act.GiveUp) == []
    assert of(ends[1], act.Start) == []
    assert given_up.reason is act.Reason.RETRIES
    assert given_up.message == (
        f"the stream's logits are no numbers, as {', '.join(instances)} found: nan"
    )
    assert all(each.answers.until_s is None for each in harness.policy.members.values())


def test_logits_that_are_numbers_elsewhere_are_a_failure_of_the_first_instance() -> None:
    """A token between two such failures makes each the first; an instance that computes what it did
    not before is not charged.
    """
    harness = PolicyHarness("b0", "b1")
    harness.decoding("A")
    kind = ev.FailureKind.NOT_A_NUMBER

    (second,) = of(harness.handle(ev.AttemptFailed(A, 1, B0, "nan", 5, failure=kind)), act.Start)
    before = harness.policy.members[B0].answers.until_s
    harness.handle(ev.StreamResumed(A, 2))
    after = harness.policy.members[B0].answers
    harness.handle(ev.AttemptFailed(A, 2, B1, "nan", 9, failure=kind))
    harness.look_until(1.0)

    assert second.plan.decode == B1
    assert (before, after.cause) == (None, "its logits overflow where others' do not")
    assert of(harness.actions, act.GiveUp) == []
    assert [each.attempt for each in of(harness.actions, act.Start)] == [1, 2, 3]


def test_an_instance_that_computes_what_was_no_number_before_is_not_to_blame() -> None:
    """KV that it was computed from may have come from elsewhere."""
    harness = PolicyHarness("b0")
    harness.decoding("A")
    harness.handle(ev.AttemptFailed(A, 1, B0, "nan", 5, failure=ev.FailureKind.NOT_A_NUMBER))
    harness.look_until(1.0)

    harness.handle(ev.StreamResumed(A, 2))

    assert harness.policy.members[B0].answers.until_s is None


def test_an_instance_that_has_accepted_something_since_decides_refusals_again() -> None:
    harness = PolicyHarness("b0")
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    harness.handle(instance_up("b1"))
    (second,) = fail(harness, first, B0, ev.FailureKind.REFUSED)
    complete(harness, second)
    harness.lose("b1", at_s=1.0)
    complete(
        harness, only(harness.handle(ev.StreamArrived(StreamId("C"), 20), at_s=2.0), act.Start)
    )
    alone = only(harness.handle(ev.StreamArrived(B, 20), at_s=3.0), act.Start)

    fail(harness, alone, B0, ev.FailureKind.REFUSED)

    assert only(harness.actions, act.GiveUp).reason is act.Reason.REFUSED


def test_a_busy_instance_gets_new_streams_again_when_one_has_ended_there() -> None:
    """Its pause is long for an instance that is always busy, not for one that has room again."""
    harness = PolicyHarness("b0", "b1")
    runs = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    harness.handle(ev.StreamResumed(A, 1))
    b0, b1 = runs.plan.decode, InstanceId("b1")
    for n in range(5):  # Streams at the other one, so that it has more work.
        harness.handle(ev.StreamArrived(StreamId(f"s{n}"), 20))
    harness.handle(ev.StreamArrived(B, 20))
    busy = next(s for s in of(harness.actions, act.Start) if s.stream != A and s.plan.decode == b0)
    fail(harness, busy, b0, ev.FailureKind.BUSY)

    during = only(harness.handle(ev.StreamArrived(StreamId("during"), 20), at_s=1.0), act.Start)
    harness.handle(ev.StreamEnded(A, 1))
    after = only(harness.handle(ev.StreamArrived(StreamId("after"), 20)), act.Start)

    assert during.plan.decode == b1
    assert after.plan.decode == b0


@pytest.mark.parametrize(("instances", "ejected"), [(2, 1), (3, 1), (4, 2), (5, 2)])
def test_at_most_half_of_a_role_is_ejected(instances: int, ejected: int) -> None:
    """All fail for the third time in a row, one after the other."""
    harness = PolicyHarness(*(f"b{n}" for n in range(instances)))
    for each in harness.policy.members.values():
        each.answers.consecutive = 2

    starts = of(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    for _ in range(instances):
        starts = fail(harness, starts[-1], starts[-1].plan.decode) or starts

    assert len(of(harness.actions, act.Ejected)) == ejected
    assert {start.plan.decode for start in of(harness.actions, act.Start)} == {
        f"b{n}" for n in range(instances)
    }


@pytest.mark.parametrize(("good_s", "ejections"), [(55.0, 4), (65.0, 1)])
def test_ejections_are_forgiven_after_a_minute(good_s: float, ejections: int) -> None:
    """The pauses of one that was ejected again soon go on doubling."""
    harness = PolicyHarness("b0", "b1", "b2")
    start = only(harness.handle(ev.StreamArrived(A, 20), at_s=good_s), act.Start)
    failing = harness.policy.members[start.plan.decode].answers
    failing.ejections, failing.readmitted_s, failing.consecutive = 3, 0.0, 2

    fail(harness, start, start.plan.decode)

    assert only(harness.actions, act.Ejected).instance == start.plan.decode
    assert failing.ejections == ejections


# How long.


def health_of(harness: PolicyHarness, name: InstanceId) -> dict[str, Any]:
    rows = harness.policy.snapshot()["instances"]
    (found,) = (row["health"] for row in rows if row["id"] == name)
    return dict(found)


def test_the_first_failure_pauses_an_instance_for_half_a_second() -> None:
    """Up to a quarter longer, by jitter."""
    harness = PolicyHarness(*PAIRS)

    fail(harness, only(harness.handle(ev.StreamArrived(A, 20)), act.Start), P0)

    assert 0.5 <= health_of(harness, P0)["paused_s"] <= 0.625


@pytest.mark.parametrize(("apart_s", "failures"), [(0.08, 1), (0.12, 2)])
def test_connections_that_break_within_a_tenth_of_a_second_are_one_failure(
    apart_s: float, failures: int
) -> None:
    harness = PolicyHarness("p0", "d0")
    for name in ("A", "B"):
        harness.decoding(name)

    for stream, at_s in ((A, 10.0), (B, 10.0 + apart_s)):
        harness.handle(ev.AttemptFailed(stream, 1, D0, "reset", 1, abrupt=True), at_s)

    assert health_of(harness, D0)["failures_in_a_row"] == failures


def test_a_pause_lasts_for_a_minute_at_most() -> None:
    """It doubles until then; by jitter it is up to a quarter longer."""
    pauses_s = [pause_s(B0, 4.0, count) for count in (3, 4, 10, 1000)]

    assert all(60.0 <= each <= 75.0 for each in pauses_s[1:])
    assert 32.0 <= pauses_s[0] <= 40.0


def test_pauses_are_longer_by_up_to_a_quarter() -> None:
    """Proxies do not probe all of them at the same moment."""
    pauses_s = [pause_s(InstanceId(f"b{n}"), 4.0, 0) for n in range(100)]

    assert all(4.0 <= each <= 5.0 for each in pauses_s)
    assert max(pauses_s) > 4.5


def test_a_busy_instance_is_tried_again_after_a_quarter_second_and_every_two_at_least() -> None:
    """The pauses double in between; jitter makes them up to a quarter longer."""
    health, now_s, pauses_s = AnswerHealth(), 0.0, []
    for _ in range(5):
        health.note_busy(B0, A, 0.0, now_s)
        assert health.busy_until_s is not None
        pauses_s.append(health.busy_until_s - now_s)
        now_s = health.busy_until_s

    least_s = (0.25, 0.5, 1.0, 2.0, 2.0)
    assert all(
        least <= pause <= 1.25 * least for least, pause in zip(least_s, pauses_s, strict=True)
    )


@pytest.mark.parametrize(("after_s", "is_busy"), [(0.4, True), (0.6, False)])
def test_half_a_second_is_waited_for_the_answer_to_a_try_of_a_busy_instance(
    after_s: float, *, is_busy: bool
) -> None:
    health = AnswerHealth()

    health.try_busy(A, 10.0)

    assert health.is_busy(10.0 + after_s) is is_busy


@pytest.mark.parametrize(("after_s", "is_overdue"), [(1.9, False), (2.1, True)])
def test_an_answer_is_overdue_after_two_seconds_where_none_was_predicted_to_take_long(
    after_s: float, *, is_overdue: bool
) -> None:
    health = AnswerHealth()

    health.awaited_from_s, health.awaited[A] = 10.0, (10.0, 0.0)

    assert health.is_overdue(10.0 + after_s, queue_s=0.0) is is_overdue


def test_an_answer_to_an_attempt_from_before_the_pause_does_not_end_it() -> None:
    """It says nothing of how the instance answers since."""
    harness = PolicyHarness("p0", "d0")
    harness.decoding("A")
    health = harness.policy.members[InstanceId("d0")].answers
    health.close("no", 5.0, pause=10.0)
    health.is_ejected = True

    was_readmitted = []
    for started_s in (4.0, 5.5):
        harness.policy.streams[A].attempt.started_s = started_s
        answered = harness.handle(ev.StreamResumed(A, 1), at_s=6.0)
        was_readmitted.append(bool(of(answered, act.Readmitted)))

    assert was_readmitted == [False, True]
    assert (health.until_s, health.is_ejected, health.readmitted_s) == (None, False, 6.0)


def test_streams_that_wait_for_a_busy_instance_come_to_it_within_a_fifth_of_a_second() -> None:
    """They come after its pause, and not all at once."""
    busy_until_s, first_try_s = [], []
    for n in range(40):
        harness = PolicyHarness("b0")
        start = only(harness.handle(ev.StreamArrived(StreamId(f"s{n}"), 20)), act.Start)
        fail(harness, start, B0, ev.FailureKind.BUSY)
        busy_until_s.append(health_of(harness, B0)["busy_s"])
        first_try_s.append(min(each.at_s for each in of(harness.actions, act.WakeAt)))

    late_s = [at_s - end_s for at_s, end_s in zip(first_try_s, busy_until_s, strict=True)]
    assert min(late_s) > 0.0
    assert 0.1 < max(late_s) <= 0.22


def error(
    harness: PolicyHarness,
    start: act.Start,
    at: InstanceId,
    cause: str = "HTTP 500",
    kind: ev.FailureKind = ev.FailureKind.ERROR,
    *,
    final: bool = False,
) -> list[act.Action]:
    event = ev.AttemptFailed(start.stream, start.attempt, at, cause, 0, failure=kind, final=final)
    return harness.handle(event)


def test_an_error_that_names_the_input_goes_to_the_client_from_the_second_instance() -> None:
    """It is the request's: neither instance is charged for it."""
    harness = PolicyHarness(*PAIRS)
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    second = only(error(harness, first, P0, final=True), act.Start)
    assert second.plan.prefill not in (None, P0)

    given_up = only(error(harness, second, second.plan.prefill, final=True), act.GiveUp)

    assert (given_up.reason, given_up.message) == (act.Reason.REFUSED, "HTTP 500")
    answers = [each.answers for each in harness.policy.members.values()]
    assert [(each.consecutive, each.until_s) for each in answers] == [(0, None)] * len(answers)


def test_two_equal_errors_that_name_no_input_get_one_more_try_after_a_pause() -> None:
    """A full disk, a registry or a restart behind one load balancer fail several instances alike,
    and pass. Only a third error goes to the client.
    """
    harness = PolicyHarness(*PAIRS)
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    second = only(error(harness, first, P0), act.Start)
    assert second.plan.prefill is not None

    at_once = error(harness, second, second.plan.prefill)
    early = harness.handle(ev.TimerFired(), at_s=ERROR_PAUSE_S - 0.01)
    third = only(harness.handle(ev.TimerFired(), at_s=ERROR_PAUSE_S), act.Start)
    assert third.plan.prefill is not None

    assert of([*at_once, *early], act.Start) == []
    assert of([*at_once, *early], act.GiveUp) == []
    assert only(error(harness, third, third.plan.prefill), act.GiveUp).message == "HTTP 500"


def test_two_different_errors_are_no_fault_of_the_request() -> None:
    harness = PolicyHarness(*PAIRS)
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    second = only(error(harness, first, P0, "HTTP 500"), act.Start)
    assert second.plan.prefill is not None

    actions = error(harness, second, second.plan.prefill, "HTTP 501")

    assert only(actions, act.Start).plan.prefill not in (P0, second.plan.prefill)


def test_an_error_of_an_instance_that_has_died_since_shows_nothing() -> None:
    """All that ran on it got the same."""
    harness = PolicyHarness(*PAIRS)
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    second = only(error(harness, first, P0), act.Start)
    assert second.plan.prefill is not None
    harness.handle(ev.InstanceLost(P0, 1, "killed", {}))

    actions = error(harness, second, second.plan.prefill)

    assert of(actions, act.GiveUp) == []


@pytest.mark.parametrize(
    ("cause", "kind"),
    [("HTTP 500", ev.FailureKind.ERROR), ("silent", ev.FailureKind.SILENT)],
    ids=["an error", "silence"],
)
def test_what_may_be_the_request_s_fault_counts_once_another_instance_has_served_it(
    cause: str, kind: ev.FailureKind
) -> None:
    harness = PolicyHarness(*PAIRS)
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    second = only(error(harness, first, P0, cause, kind), act.Start)
    health = harness.policy.members[P0].answers
    before = health.consecutive

    harness.handle(ev.PrefillDone(A, second.attempt, 20))

    assert (before, health.consecutive, health.cause) == (0, 1, cause)


@pytest.mark.parametrize(("final", "tries"), [(True, 2), (False, 3)])
def test_the_only_instance_of_a_role_is_asked_again(tries: int, *, final: bool) -> None:
    """Nothing else can tell whose fault an error is."""
    harness = PolicyHarness("p0", "d0")
    start = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    for number in range(tries - 1):
        error(harness, start, P0, final=final)
        start = only(harness.handle(ev.TimerFired(), at_s=5.0 * (number + 1)), act.Start)

    given_up = only(error(harness, start, P0, final=final), act.GiveUp)

    assert given_up.reason is act.Reason.REFUSED


def test_a_request_at_which_two_instances_were_silent_is_not_given_to_the_others() -> None:
    """Each would stand still for it, too; and it is cut for its silence no more."""
    harness = PolicyHarness(*PAIRS)
    first = only(harness.handle(ev.StreamArrived(A, 20)), act.Start)
    silent = ev.FailureKind.SILENT
    second = only(error(harness, first, P0, "silent for 10 s", silent), act.Start)
    assert second.plan.prefill is not None

    third = only(error(harness, second, second.plan.prefill, "silent for 20 s", silent), act.Start)

    assert third.plan.prefill in (P0, second.plan.prefill)
    stream = harness.policy.streams[A]
    assert (stream.recovery.is_slow, stream.refusals) == (True, ())
    assert not any(each.answers.is_ejected for each in harness.policy.members.values())
