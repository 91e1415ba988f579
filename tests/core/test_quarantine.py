"""Requests that may kill what they run on."""

import pytest

from kvrs.config.policy import PolicyName, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.gpus import GpuState
from tests.core.policy_harness import PolicyHarness, instance_up, load, of, only

A, B = StreamId("A"), StreamId("B")
D0 = InstanceId("d0")


def kept_for(harness: PolicyHarness) -> dict[str, str]:
    rows = harness.policy.snapshot()["instances"]
    return {row["id"]: row["quarantined_for"] for row in rows if row["quarantined_for"]}


NEWS_S = 0.55  # A refusal has come by then: half a second is waited for news of other deaths.


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_stream_that_was_alone_at_all_deaths_is_refused_at_the_last(deaths: int) -> None:
    """None had sent it a token; that many are allowed by the settings."""
    names = [f"d{n}" for n in range(deaths + 1)]
    harness = PolicyHarness("p0", *names, poison_deaths=deaths)
    harness.decoding("A", resumed=False)

    for _ in range(deaths):
        assert of(harness.actions, act.GiveUp) == []
        last = of(harness.actions, act.Start)[-1].plan.decode
        harness.lose(last)
        harness.look_until(harness.now_s + NEWS_S)

    given_up = only(harness.actions, act.GiveUp)
    assert (given_up.stream, given_up.reason) == (A, act.Reason.POISON)
    assert len(of(harness.actions, act.Start)) == deaths


def test_an_outage_refuses_nobody_and_its_victims_go_on_when_it_is_over() -> None:
    """A was alone at two deaths, and another instance died that nobody waited at."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", "d3", poison_deaths=2)
    first = harness.decoding("A", resumed=False).plan.decode
    second = only(harness.lose(first), act.Start).plan.decode
    third = next(name for name in ("d1", "d2", "d3") if name not in (first, second))

    harness.lose(second, at_s=0.1)
    harness.lose(third, at_s=0.2)
    during = harness.look_until(2.15)
    after = harness.look_until(2.25)

    assert of(during, act.Start) == []
    assert only(after, act.Start).stream == A
    assert of(harness.actions, act.GiveUp) == []


def test_a_stream_that_waits_for_news_of_deaths_waits_no_longer_than_its_deadline() -> None:
    slo = SloSettings(abort=True, ttft_s=0.3)
    harness = PolicyHarness("p0", "d0", "d1", "d2", slo=slo)
    first = harness.decoding("A", resumed=False).plan.decode
    second = only(harness.lose(first), act.Start).plan.decode
    harness.lose(second, at_s=0.1)

    given_up = only(harness.look_until(0.4), act.GiveUp)

    assert given_up.reason is act.Reason.SLO


def test_a_token_in_between_clears_a_stream() -> None:
    """Deaths count that follow each other."""
    harness = PolicyHarness("p0", "d0", "d1", "d2")
    first = harness.decoding("A", resumed=False).plan.decode
    second = only(harness.lose(first), act.Start)
    harness.handle(ev.StreamResumed(A, 2))

    third = only(harness.lose(second.plan.decode, A=1), act.Start)

    assert third.attempt == 3
    assert kept_for(harness) == {}


def test_streams_that_flowed_are_not_suspected() -> None:
    """They go on side by side; the one without a token waits until it can run apart."""
    harness = PolicyHarness("p0", "d0")
    for name in ("s0", "s1"):
        harness.decoding(name)
    harness.decoding("A", resumed=False)
    for name in ("p1", "d1", "p2", "d2"):
        harness.handle(instance_up(name))

    starts = of(harness.lose("d0", s0=1, s1=1), act.Start)

    assert {start.stream for start in starts} == {"s0", "s1"}
    assert set(kept_for(harness).values()) == {A}
    for start in starts:
        harness.handle(ev.StreamResumed(start.stream, start.attempt))
    apart = only(harness.handle(ev.TimerFired(), at_s=0.05), act.Start)
    assert apart.stream == A
    assert kept_for(harness)[apart.plan.decode] == A


def test_nothing_else_goes_where_a_suspected_stream_runs() -> None:
    """Until it has a token."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", "p2", "d2")
    first = harness.decoding("A", resumed=False).plan.decode
    apart = only(harness.lose(first), act.Start)

    others = [harness.decoding(f"s{n}").plan.decode for n in range(4)]
    harness.handle(ev.StreamResumed(A, 2))
    later = [harness.decoding(f"t{n}").plan.decode for n in range(4)]

    assert apart.plan.decode not in others
    assert apart.plan.decode in later


def test_suspected_streams_run_one_at_a_time_and_the_killer_is_refused() -> None:
    """Both waited at the first death; each next death has one suspect."""
    harness = PolicyHarness("p0", "d0", wait_s=30.0, poison_deaths=2)
    for name in ("A", "B"):
        harness.decoding(name, resumed=False)
    for name in ("p1", "d1", "p2", "d2"):
        harness.handle(instance_up(name))

    started = only(harness.lose("d0"), act.Start)
    harness.lose(started.plan.decode, at_s=0.01)
    other = only(harness.look_until(0.06), act.Start)
    given_up = only(harness.look_until(0.6), act.GiveUp)

    assert (given_up.stream, given_up.reason) == (started.stream, act.Reason.POISON)
    assert {started.stream, other.stream} == {A, B}


def test_a_suspected_stream_waits_5_s_at_most_for_the_first_time() -> None:
    """Most instances die of other causes: the others do not wait for all before them."""
    harness = PolicyHarness("p0", "d0")
    for name in ("A", "B"):
        harness.decoding(name, resumed=False)
    harness.handle(instance_up("d1"))

    first = only(harness.lose("d0"), act.Start)
    starts: list[act.Start] = []
    while not starts:
        starts = of(harness.handle(ev.TimerFired(), harness.now_s + 0.05), act.Start)

    assert [start.stream for start in starts] == [B if first.stream == A else A]
    assert 4.95 <= harness.now_s <= 5.1


def test_a_connection_that_breaks_before_the_death_is_known_counts() -> None:
    """The stream has gone on elsewhere by the time the instance is found dead."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    first = harness.decoding("A", resumed=False).plan.decode
    failed = ev.AttemptFailed(A, 1, first, "reset", 0, abrupt=True)
    second = only(harness.handle(failed), act.Start).plan.decode
    harness.lose(first, at_s=0.1)
    harness.lose(second, at_s=0.2)

    assert only(harness.look_until(0.2 + NEWS_S), act.GiveUp).reason is act.Reason.POISON


def test_a_death_counts_although_a_late_report_came_before_it() -> None:
    """The report was under way for longer than it took the connection to break."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    first = harness.decoding("A", resumed=False).plan.decode
    failed = ev.AttemptFailed(A, 1, first, "reset", 0, abrupt=True)
    second = only(harness.handle(failed), act.Start).plan.decode
    harness.handle(load(first, 0.0), at_s=0.5)
    harness.lose(first, at_s=0.6)
    harness.lose(second, at_s=0.7)

    assert only(harness.look_until(0.7 + NEWS_S), act.GiveUp).reason is act.Reason.POISON


def test_a_stream_waits_to_learn_of_the_first_death_when_the_second_is_known_before_it() -> None:
    """It would end a third instance meanwhile. At the first one another stream waited as well; it
    was alone at the second, which broke last.
    """
    harness = PolicyHarness("p0", "d0", poison_deaths=2)
    for name in ("A", "B"):
        harness.decoding(name, resumed=False)
    for name in ("p1", "d1", "p2", "d2"):
        harness.handle(instance_up(name))
    d0 = InstanceId("d0")
    second = only(harness.handle(ev.AttemptFailed(A, 1, d0, "reset", 0, abrupt=True)), act.Start)

    actions = harness.lose(second.plan.decode, at_s=0.1)
    assert of(actions, act.Start) == []
    actions = harness.lose(d0, at_s=0.2)
    actions += harness.look_until(0.2 + NEWS_S)

    assert (only(actions, act.GiveUp).stream, only(actions, act.GiveUp).reason) == (
        A,
        act.Reason.POISON,
    )
    assert only(actions, act.Start).stream == B


def test_a_stream_goes_on_when_the_first_instance_turns_out_to_live() -> None:
    """A connection broke there, and nothing else."""
    harness = PolicyHarness("p0", "d0", "d1", "d2")
    first = harness.decoding("A", resumed=False).plan.decode
    failed = ev.AttemptFailed(A, 1, first, "reset", 0, abrupt=True)
    second = only(harness.handle(failed), act.Start).plan.decode
    harness.lose(second, at_s=0.1)

    assert only(harness.handle(load(first, 0.0), at_s=0.5), act.Start).stream == A


def test_a_prompt_that_kills_prefill_instances_is_refused() -> None:
    """The stage does not matter."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", "p2", "d2", poison_deaths=2)
    first = only(harness.handle(ev.StreamArrived(A, 100)), act.Start).plan.prefill
    assert first is not None

    second = only(harness.lose(first), act.Start).plan.prefill
    assert second not in (None, first)
    harness.lose(InstanceId(str(second)))

    assert only(harness.look_until(NEWS_S), act.GiveUp).reason is act.Reason.POISON


def test_a_prefill_that_is_done_is_no_suspect() -> None:
    """It has answered: the death of its instance is not its stream's."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)
    harness.handle(ev.PrefillDone(A, 1, 100))
    assert start.plan.prefill is not None

    harness.lose(start.plan.prefill)
    harness.lose(start.plan.decode)

    assert of(harness.actions, act.GiveUp) == []


def test_gathered_streams_whose_instance_lives_are_started_once() -> None:
    """The first of them has the others placed with it."""
    harness = PolicyHarness("p0", "d0", gather_s=0.2)
    for stream in (A, B):
        harness.decoding(stream, resumed=False)
        harness.handle(ev.AttemptFailed(stream, 1, D0, "reset", 0, abrupt=True))
    for name in ("d1", "d2", "d3", "d4"):
        harness.handle(instance_up(name))
    while len(seconds := [s for s in of(harness.actions, act.Start) if s.attempt == 2]) < 2:
        harness.handle(ev.TimerFired(), harness.now_s + 0.05)
    for second in seconds:
        harness.handle(load(second.plan.decode, draining=True), at_s=0.5)

    actions = harness.handle(load(D0, 0.0))

    assert sorted((start.stream, start.attempt) for start in of(actions, act.Start)) == [
        (A, 3),
        (B, 3),
    ]


def test_new_streams_wait_while_a_suspected_one_runs_apart_on_the_last_instance() -> None:
    """One that came along would be a second suspect, so that neither would be refused."""
    harness = PolicyHarness("p0", "d0", "d1", poison_deaths=2)
    first = harness.decoding("A", resumed=False).plan.decode
    apart = only(harness.lose(first), act.Start)

    newcomer = harness.handle(ev.StreamArrived(B, 100))
    harness.lose(apart.plan.decode)
    given_up = only(harness.look_until(NEWS_S), act.GiveUp)

    assert of(newcomer, act.Start) == []
    assert (given_up.stream, given_up.reason) == (A, act.Reason.POISON)
    started = only(harness.handle(instance_up("d2")), act.Start)
    assert started.stream == B


def test_a_new_stream_starts_soon_after_the_suspected_one_has_a_token() -> None:
    """And 5 s after the death at the latest, however long that one computes."""
    for token_s, latest_s in ((0.1, 0.35), (None, 5.25)):
        harness = PolicyHarness("p0", "d0", "d1")
        harness.lose(harness.decoding("A", resumed=False).plan.decode)
        harness.handle(ev.StreamArrived(B, 100))
        started: list[act.Start] = []
        while not started:
            if token_s is not None and harness.now_s >= token_s:
                harness.handle(ev.StreamResumed(A, 2))
            started = of(harness.handle(ev.TimerFired(), harness.now_s + 0.05), act.Start)

        assert [start.stream for start in started] == [B]
        assert (token_s or 5.0) <= harness.now_s < latest_s


def test_a_stream_behind_its_prefill_waits_for_a_suspected_one_too() -> None:
    """Its prefill was begun before; its pages are kept meanwhile."""
    harness = PolicyHarness("p0", "p1", "d0", "d1")
    first = harness.decoding("A", resumed=False).plan.decode
    harness.handle(ev.StreamArrived(B, 100))
    harness.lose(first)

    actions = harness.handle(ev.PrefillDone(B, 1, 100))
    harness.handle(ev.StreamResumed(A, 2))
    while not (started := of(harness.handle(ev.TimerFired(), harness.now_s + 0.05), act.Start)):
        assert harness.now_s < 1.0

    assert [type(action) for action in actions if not isinstance(action, act.WakeAt)] == [act.Halt]
    assert [(start.stream, start.attempt) for start in started] == [(B, 2)]


def test_a_stream_that_flowed_does_not_wait_for_a_suspected_one() -> None:
    """It goes on where that one runs, if nothing else is left."""
    harness = PolicyHarness("p0", "d1", "d2", "d3")
    flows = harness.decoding("B").plan.decode
    first = harness.decoding("A", resumed=False).plan.decode
    assert first != flows
    harness.lose(first)

    actions = harness.lose(flows, B=1)

    assert only(actions, act.Start).stream == B


@pytest.mark.parametrize("breaks_first", [True, False])
def test_a_stream_that_flowed_is_no_suspect_where_a_suspected_one_ran_apart(
    *, breaks_first: bool
) -> None:
    """It came there because nothing else was left; the other one stays the only suspect."""
    harness = PolicyHarness("p0", "d1", "d2", "d3")
    flows = harness.decoding("B").plan.decode
    first = harness.decoding("A", resumed=False).plan.decode
    apart = only(harness.lose(first), act.Start).plan.decode
    guest = only(harness.lose(flows, B=1), act.Start)
    if breaks_first:
        harness.handle(ev.AttemptFailed(B, guest.attempt, apart, "reset", 1, abrupt=True))
    harness.lose(apart, B=1)
    book = harness.policy._ledger.incidents

    assert guest.plan.decode == apart
    assert (book.is_suspect(A), book.is_suspect(B)) == (True, False)


@pytest.mark.parametrize(
    "cause", ["drain", "gpu", "node before", "node after", "exit before", "exit after"]
)
def test_a_death_with_a_cause_of_its_own_is_no_evidence(cause: str) -> None:
    """An instance that was about to end, whose GPU fails, that is lost with its node, or whose
    process was ended from outside, as its supervisor says.
    """
    harness = PolicyHarness("p0", "d1", "d2")
    harness.agents("n0", "n1", "n2")
    first = harness.decoding("A", resumed=False).plan.decode
    agent_lost = ev.HolderLost(InstanceId(f"agent-n{first[1:]}"), 1, "connection lost")
    exited = ev.InstanceExited(first, 1, "signal 9 from outside", is_external=True)
    # What has no peer keeps its streams, also when it is about to end.
    harness.lose({"d1": "d2", "d2": "d1"}[first])

    match cause:
        case "drain":
            harness.handle(load(first, draining=True))
        case "gpu":
            harness.handle(ev.GpuJudged(first, GpuState.FAILING, "xid 79", {}))
        case "node before":
            harness.handle(agent_lost)
        case "exit before":
            harness.handle(exited)
        case _:
            pass
    harness.lose(first)
    if cause == "node after":
        harness.handle(agent_lost)
    if cause == "exit after":
        harness.handle(exited)
    second = only(harness.handle(instance_up("d3")), act.Start).plan.decode
    harness.lose(second)
    third = only(harness.handle(instance_up("d4")), act.Start)

    assert third.stream == A
    assert of(harness.actions, act.GiveUp) == []


@pytest.mark.parametrize(("epoch", "is_external"), [(1, False), (0, True)])
def test_an_exit_that_a_request_may_have_caused_stays_evidence(
    epoch: int, *, is_external: bool
) -> None:
    """A segmentation fault, an exception, out of memory; that of another epoch was another one."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    first = harness.decoding("A", resumed=False).plan.decode

    second = only(harness.lose(first), act.Start).plan.decode
    harness.handle(ev.InstanceExited(first, epoch, "signal", is_external=is_external))
    harness.lose(second)
    given_up = only(harness.look_until(NEWS_S), act.GiveUp)

    assert given_up.reason is act.Reason.POISON


def test_a_stream_that_waits_for_news_goes_on_when_its_instance_was_ended_from_outside() -> None:
    """At once, and anywhere."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    first = harness.decoding("A", resumed=False).plan.decode
    second = only(harness.lose(first), act.Start).plan.decode
    waits = harness.lose(second, at_s=0.1)

    goes_on = harness.handle(ev.InstanceExited(second, 1, "signal 9", is_external=True), at_s=0.2)

    assert of(waits, act.Start) == []
    assert only(goes_on, act.Start).stream == A


def test_a_stream_whose_instance_turns_out_to_live_runs_anywhere_again() -> None:
    """Where it would not have been apart, too."""
    harness = PolicyHarness("p0", "d0")
    for stream in (A, B):
        harness.handle(ev.StreamArrived(stream, 100))
    p0 = InstanceId("p0")
    harness.handle(ev.AttemptFailed(A, 1, p0, "reset", 0, abrupt=True))

    actions = harness.handle(load(p0, 0.0), at_s=0.4)
    actions += harness.handle(ev.TimerFired(), at_s=0.9)

    assert only(actions, act.Start).stream == A


def fall_silent(harness: PolicyHarness, name: InstanceId, at_s: float) -> list[act.Action]:
    return harness.handle(ev.InstanceLost(name, 1, "silent", {}, may_live=True), at_s)


def alone_at_two_silent_instances() -> tuple[PolicyHarness, InstanceId, InstanceId]:
    """A policy, and the two silent instances at which A waited for its first token."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", wait_s=30.0, poison_deaths=2)
    first = harness.decoding("A", resumed=False).plan.decode
    second = only(fall_silent(harness, first, 2.0), act.Start).plan.decode
    assert of(fall_silent(harness, second, 4.0), act.Start) == []
    return harness, first, second


@pytest.mark.parametrize("which", [0, 1])
def test_an_instance_whose_process_had_not_ended_is_no_death(which: int) -> None:
    """It was frozen or cut off: whichever of the two comes back, the stream goes on."""
    harness, *silent = alone_at_two_silent_instances()

    back = instance_up(silent[which], epoch=2, had_not_ended=True)
    actions = harness.handle(back, at_s=12.0)

    assert only(actions, act.Start).stream == A
    assert of(harness.actions, act.GiveUp) == []


def test_a_stream_whose_silent_instances_have_ended_is_refused() -> None:
    """Other processes run in their place."""
    harness, first, second = alone_at_two_silent_instances()

    waits = harness.handle(instance_up(first, epoch=2), at_s=5.0)
    refused = harness.handle(instance_up(second, epoch=2), at_s=6.0)

    assert not of(waits, act.Start)
    assert not of(waits, act.GiveUp)
    assert only(refused, act.GiveUp).reason is act.Reason.POISON


def test_a_stream_whose_silent_instances_stay_silent_is_refused_and_ends_no_third_one() -> None:
    """After half of `recovery.wait_s`: a request may hang what it runs on."""
    harness, *_ = alone_at_two_silent_instances()

    before = harness.handle(ev.TimerFired(), at_s=18.9)
    refused = harness.handle(ev.TimerFired(), at_s=19.1)

    assert not of(before, act.Start)
    assert not of(before, act.GiveUp)
    assert not of(refused, act.Start)
    assert only(refused, act.GiveUp).reason is act.Reason.POISON


def test_a_stream_waits_for_news_of_silent_instances_no_longer_than_its_deadline() -> None:
    """And is not called poison then."""
    slo = SloSettings(abort=True, ttft_s=6.0)
    harness = PolicyHarness("p0", "d0", "d1", "d2", wait_s=30.0, slo=slo)
    first = harness.decoding("A", resumed=False).plan.decode
    second = only(fall_silent(harness, first, 2.0), act.Start).plan.decode
    fall_silent(harness, second, 4.0)

    assert only(harness.handle(ev.TimerFired(), at_s=6.1), act.GiveUp).reason is act.Reason.SLO


def test_two_streams_at_a_silent_instance_do_not_clear_each_other_at_the_next_death() -> None:
    """B was there when the first instance fell silent, and lives on; at the second A was alone, so
    that the first one counts if it has ended.
    """
    harness = PolicyHarness("p0", "d0", wait_s=30.0, poison_deaths=2)
    for name in ("A", "B"):
        harness.decoding(name, resumed=False)
    for name in ("p1", "d1", "p2", "d2"):
        harness.handle(instance_up(name))
    started = only(fall_silent(harness, D0, 2.0), act.Start)

    actions = harness.lose(started.plan.decode, at_s=2.1)
    actions += harness.handle(instance_up("d0", epoch=2), at_s=2.2)
    actions += harness.look_until(2.1 + NEWS_S)

    assert (only(actions, act.GiveUp).stream, only(actions, act.GiveUp).reason) == (
        started.stream,
        act.Reason.POISON,
    )


@pytest.mark.parametrize(("tokens", "is_refused"), [(0, False), (1, True)])
def test_a_prefill_that_was_done_before_ends_no_instance(tokens: int, *, is_refused: bool) -> None:
    """With a token behind it, it is another prefill, which no instance has survived."""
    slow = PrefillTable("slow", "made up", 100, [0.0, 10.0, 20.0])
    harness = PolicyHarness("p0", "p1", "p2", name=PolicyName.ALWAYS_RECOMPUTE, poison_deaths=2)
    for name in ("d0", "d1"):
        harness.handle(instance_up(name, prefill=slow))
    decode = harness.decoding("A", resumed=tokens > 0).plan.decode

    recovered = only(harness.lose(decode, A=tokens), act.Start)
    for _ in range(2):
        assert recovered.plan.prefill is not None
        starts = of(harness.lose(recovered.plan.prefill), act.Start)
        recovered = starts[0] if starts else recovered
    harness.look_until(NEWS_S)

    assert bool(of(harness.actions, act.GiveUp)) == is_refused
