"""Requests that end what they run on."""

from typing import Any

import pytest

from kvrs.config.policy import Handoff, PolicySettings, RecoverySettings, SloSettings
from kvrs.core.books.poison import PoisonCounter
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.streams import Stream
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import GpuState
from tests.core.policy_harness import PolicyHarness, instance_up, load, member, of, only

A, B = StreamId("A"), StreamId("B")


def broken(harness: PolicyHarness, start: act.Start) -> list[act.Action]:
    """The connection of the attempt breaks at its decode instance, before any token."""
    decode = start.plan.decode
    failed = ev.AttemptFailed(start.stream, start.attempt, decode, "reset", 0, abrupt=True)
    return harness.handle(failed)


def first_death(harness: PolicyHarness) -> tuple[InstanceId, InstanceId]:
    """A waits at an instance that dies; that, and where A waits then."""
    first = harness.decoding("A", resumed=False).plan.decode
    return first, only(harness.lose(first), act.Start).plan.decode


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_stream_is_refused_at_as_many_deaths_as_are_set(deaths: int) -> None:
    """None had sent it a token."""
    names = [f"d{n}" for n in range(deaths + 1)]
    harness = PolicyHarness("p0", *names, poison_deaths=deaths)
    harness.decoding("A", resumed=False)

    for _ in range(deaths):
        assert of(harness.actions, act.GiveUp) == []
        harness.lose(of(harness.actions, act.Start)[-1].plan.decode)

    given_up = only(harness.actions, act.GiveUp)
    assert (given_up.stream, given_up.reason) == (A, act.Reason.POISON)
    assert len(of(harness.actions, act.Start)) == deaths


def test_settings_that_are_loaded_again_hold_for_open_streams() -> None:
    harness = PolicyHarness("p0", "d0", "d1", "d2")
    _, second = first_death(harness)
    policy = PolicySettings(recovery=RecoverySettings(poison_deaths=2, gather_s=0.0))
    harness.handle(ev.SettingsReloaded(policy, SloSettings()))

    assert only(harness.lose(second), act.GiveUp).reason is act.Reason.POISON


def test_a_token_in_between_clears_a_stream() -> None:
    """Deaths count that follow each other."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    _, second = first_death(harness)
    harness.handle(ev.StreamResumed(A, 2))

    third = only(harness.lose(second, A=1), act.Start)

    assert third.attempt == 3


def test_a_stream_that_had_its_first_token_there_is_not_charged() -> None:
    """The instance could serve it."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    first = harness.decoding("A").plan.decode
    second = only(harness.lose(first, A=1), act.Start).plan.decode
    third = only(harness.lose(second, A=1), act.Start).plan.decode

    refused = harness.lose(third, A=1)

    assert only(refused, act.GiveUp).reason is act.Reason.POISON


def beside(harness: PolicyHarness, *names: str) -> list[act.Action]:
    """Streams wait at d0 as it dies; the actions once d1 is up."""
    for name in names:
        harness.decoding(name, resumed=False)
    harness.lose("d0")
    return harness.handle(instance_up("d1"))


def test_two_streams_of_which_one_would_be_refused_for_the_other_wait_apart() -> None:
    """The death of the instance where one waits alone refuses that one only."""
    harness = PolicyHarness("p0", "d0", poison_deaths=2)

    alone = only(beside(harness, "A", "B"), act.Start)
    refused = harness.lose("d1")
    goes_on = only(harness.handle(instance_up("d2")), act.Start)

    assert alone.stream == A
    assert [(each.stream, each.reason) for each in of(refused, act.GiveUp)] == [
        (A, act.Reason.POISON)
    ]
    assert goes_on.stream == B


def test_streams_that_wait_apart_follow_each_other() -> None:
    """A token clears the first one, and the next one starts."""
    harness = PolicyHarness("p0", "d0", poison_deaths=2)
    alone = only(beside(harness, "A", "B"), act.Start)
    before = harness.look_until(1.0)

    harness.handle(ev.StreamResumed(A, alone.attempt))

    assert of(before, act.Start) == []
    assert only(harness.look_until(1.3), act.Start).stream == B


def test_a_stream_takes_a_busier_instance_where_no_other_waits_that_may_be_the_cause() -> None:
    """It starts there at once, or within two tenths of a second."""
    harness = PolicyHarness("p0", "d0", poison_deaths=2)
    for name in "AB":
        harness.decoding(name, resumed=False)
    harness.handle(instance_up("d1"))
    harness.handle(instance_up("d2"))
    harness.handle(load("d2", streams=9))

    lost = harness.lose("d0")
    starts = of([*lost, *harness.look_until(0.3)], act.Start)

    assert [(start.stream, start.plan.decode) for start in starts] == [(A, "d1"), (B, "d2")]


def test_prompts_of_which_one_would_be_refused_for_the_other_are_computed_apart() -> None:
    """One that was never prefilled takes a longer queue for that."""
    harness = PolicyHarness("p0", "d0", poison_deaths=2)
    for stream in (A, B):
        harness.handle(ev.StreamArrived(stream, 100))
    for name in ("p1", "d1", "p2", "d2"):
        harness.handle(instance_up(name))
    harness.handle(load("p2", queue_s=5.0))

    starts = of(harness.lose("p0"), act.Start)

    assert {start.stream: start.plan.prefill for start in starts} == {A: "p1", B: "p2"}


def test_a_hand_off_is_not_redirected_to_where_another_waits_that_may_be_the_cause() -> None:
    """That one came after the attempt had begun."""
    harness = PolicyHarness("p0", "d0", poison_deaths=2, handoff=Handoff.AUTO)
    for stream in (A, B):
        harness.handle(ev.StreamArrived(stream, 100))
    for name in ("p1", "d1"):
        harness.handle(instance_up(name))
    first = only(harness.lose("p0"), act.Start)
    for name in ("p2", "d2"):
        harness.handle(instance_up(name))
    harness.look_until(0.3)
    second = of(harness.actions, act.Start)[-1]
    for name, queue_s in (("d1", 9.0), ("d2", 1.0)):
        harness.handle(load(name, queue_s=queue_s))

    redirect = only(harness.handle(ev.PrefillDone(A, first.attempt, 100)), act.Redirect)

    assert (first.plan.decode, second.plan.decode) == ("d1", "d0")
    assert redirect.plan.decode == "d2"


def test_a_stream_that_has_ended_is_not_kept() -> None:
    harness = PolicyHarness("p0", "d0", "d1")
    first_death(harness)

    harness.handle(ev.StreamEnded(A, 2))

    policy: Any = harness.policy
    assert policy.state.poison.counted == {}


def test_streams_whose_deaths_together_refuse_none_wait_together() -> None:
    harness = PolicyHarness("p0", "d0", poison_deaths=3)

    starts = of(beside(harness, "A", "B"), act.Start)

    assert {start.stream for start in starts} == {A, B}


def test_a_connection_that_broke_keeps_streams_apart_as_long_as_no_more_is_known() -> None:
    """The instance may have died."""
    harness = PolicyHarness("p0", "d0", poison_deaths=2)
    attempts = [harness.decoding(name, resumed=False) for name in "AB"]
    harness.handle(instance_up("d1"))

    starts = [of(broken(harness, attempt), act.Start) for attempt in attempts]
    before, after = harness.look_until(1.9), harness.look_until(2.2)

    assert [start.stream for each in starts for start in each] == [A]
    assert of(before, act.Start) == []
    assert only(after, act.Start).stream == B


def test_a_stream_waits_beside_others_rather_than_not_at_all() -> None:
    """After `recovery.wait_s` it would be given up; it is refused with a poisoned one then."""
    harness = PolicyHarness("p0", "d0", wait_s=10.0, poison_deaths=2)
    beside(harness, "A", "B")
    before, after = harness.look_until(9.9), harness.look_until(10.0)

    refused = harness.lose("d1")

    assert of(before, act.Start) == []
    assert only(after, act.Start).stream == B
    assert {each.stream for each in of(refused, act.GiveUp)} == {A, B}


def test_a_prompt_that_kills_prefill_instances_is_refused() -> None:
    """The stage does not matter."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", "p2", "d2", poison_deaths=2)
    first = only(harness.handle(ev.StreamArrived(A, 100)), act.Start).plan.prefill
    assert first is not None

    second = only(harness.lose(first), act.Start).plan.prefill
    assert second not in (None, first)

    assert only(harness.lose(str(second)), act.GiveUp).reason is act.Reason.POISON


def test_a_prefill_that_is_done_is_not_charged() -> None:
    """It has answered: the death of its instance is not its stream's."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", poison_deaths=2)
    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)
    harness.handle(ev.PrefillDone(A, 1, 100))
    assert start.plan.prefill is not None

    harness.lose(start.plan.prefill)
    harness.lose(start.plan.decode)

    assert of(harness.actions, act.GiveUp) == []


def test_instances_of_one_server_are_one_death() -> None:
    """Both are lost with its process, one after the other."""
    stream = Stream(A)
    prefill, decode = member("p0"), member("d0", own_prefill=InstanceId("p0"))
    counter = PoisonCounter({A: stream})
    for each in (prefill, decode):
        each.answers.awaited[A] = 0.0, 0.0

    counter.lost(prefill, 1.0)
    counter.lost(decode, 1.1)

    assert [each.instance for each in stream.recovery.deaths] == [prefill.id]


def test_an_instance_to_which_a_connection_broke_is_avoided() -> None:
    """It may be dead; the stream would be charged with a death that it had no part in."""
    harness = PolicyHarness("p0", "d0", poison_deaths=2)
    alone = only(beside(harness, "A", "B"), act.Start)

    broken(harness, alone)

    assert of(harness.look_until(1.9), act.Start) == []


@pytest.mark.parametrize(("known_s", "counts"), [(1.9, True), (2.1, False)])
def test_a_connection_that_breaks_shortly_before_the_death_is_known_counts(
    known_s: float, *, counts: bool
) -> None:
    """The stream has gone on elsewhere by the time the instance is found dead."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    start = harness.decoding("A", resumed=False)
    second = only(broken(harness, start), act.Start).plan.decode
    harness.lose(start.plan.decode, at_s=known_s)

    refused = of(harness.lose(second, at_s=known_s + 0.1), act.GiveUp)

    assert [each.reason for each in refused] == [act.Reason.POISON] * counts


def test_a_stream_waits_to_learn_of_the_first_death_when_the_second_is_known_before_it() -> None:
    """It would end a third instance meanwhile."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    start = harness.decoding("A", resumed=False)
    second = only(broken(harness, start), act.Start).plan.decode

    waits = harness.lose(second, at_s=0.1) + harness.look_until(0.5)
    refused = harness.lose(start.plan.decode, at_s=0.5)

    assert of(waits, act.Start) == []
    assert only(refused, act.GiveUp).reason is act.Reason.POISON


def test_connections_that_break_to_one_process_are_one_death() -> None:
    """It refused the second one, as it would if it were dead."""
    stream, instance = Stream(A), member("d0")
    counter = PoisonCounter({A: stream})

    counter.broke(stream, instance, 1.0)
    counter.broke(stream, instance, 1.1)

    assert len(stream.recovery.broken) == 1


def test_a_stream_waits_two_seconds_for_news_of_a_connection_that_broke() -> None:
    """The instance lives, as far as is known."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    start = harness.decoding("A", resumed=False)
    second = only(broken(harness, start), act.Start).plan.decode
    waits = harness.lose(second, at_s=0.1) + harness.look_until(1.95)

    goes_on = harness.look_until(2.05)

    assert of(waits, act.Start) == []
    assert only(goes_on, act.Start).stream == A


@pytest.mark.parametrize(
    "cause",
    ["drain", "gpu", "removed", "node before", "node after", "exit before", "exit after", "frozen"],
)
def test_a_death_with_a_cause_from_outside_does_not_count(cause: str) -> None:
    """The instance was about to end, has a GPU that fails, was taken out of the configuration, or
    is lost with its node; its process was ended from outside, or had not ended.
    """
    harness = PolicyHarness("p0", "d1", "d2", poison_deaths=2)
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
        case "removed":
            harness.handle(ev.InstanceRemoved(first, {}))
        case "node before":
            harness.handle(agent_lost)
        case "exit before":
            harness.handle(exited)
        case _:
            pass
    harness.lose(first)
    match cause:
        case "node after":
            harness.handle(agent_lost)
        case "exit after":
            harness.handle(exited)
        case "frozen":
            harness.handle(instance_up(first, epoch=2, had_not_ended=True))
        case _:
            pass
    if cause != "frozen":
        harness.handle(instance_up("d3"))
    second = of(harness.actions, act.Start)[-1].plan.decode
    harness.lose(second, epoch=2 if cause == "frozen" else 1)
    third = only(harness.handle(instance_up("d4")), act.Start)

    assert third.stream == A
    assert of(harness.actions, act.GiveUp) == []


@pytest.mark.parametrize(("lost_s", "counts"), [(1.9, False), (2.1, True)])
def test_what_is_lost_within_two_seconds_of_its_node_is_lost_with_it(
    lost_s: float, *, counts: bool
) -> None:
    harness = PolicyHarness("p9", "d0", "d1", "d2", poison_deaths=2)
    harness.agents("n0", "n1", "n2")
    first = harness.decoding("A", resumed=False).plan.decode
    harness.handle(ev.HolderLost(InstanceId(f"agent-n{first[1:]}"), 1, "connection lost"))

    second = only(harness.lose(first, at_s=lost_s), act.Start).plan.decode
    refused = of(harness.lose(second, at_s=lost_s + 5.0), act.GiveUp)

    assert [each.reason for each in refused] == [act.Reason.POISON] * counts


@pytest.mark.parametrize(("epoch", "is_external"), [(1, False), (0, True)])
def test_an_exit_that_a_request_may_have_caused_counts(epoch: int, *, is_external: bool) -> None:
    """A segmentation fault, an exception, out of memory; that of another epoch was another one."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", poison_deaths=2)
    first, second = first_death(harness)
    harness.handle(ev.InstanceExited(first, epoch, "signal", is_external=is_external))

    assert only(harness.lose(second), act.GiveUp).reason is act.Reason.POISON


def outage(*, has_idle: bool) -> PolicyHarness:
    """All decode instances die, each twice, where A waits for its first token; the third dies, too,
    and nothing waits there. `has_idle`: it dies with them; else it is never there.
    """
    names = ("d0", "d1", "d2") if has_idle else ("d0", "d1")
    harness = PolicyHarness("p0", *names, poison_deaths=2)
    at = harness.decoding("A", resumed=False).plan.decode
    if has_idle:
        harness.lose(next(each for each in names if each != at))
    while harness.policy.streams.get(A) is not None:
        before = len(of(harness.actions, act.Start))
        harness.lose(at)
        starts = of(harness.actions, act.Start)
        if len(starts) == before:
            break
        at = starts[-1].plan.decode
    return harness


def test_a_stream_whose_instances_died_while_all_did_is_not_refused() -> None:
    """One of them died although nothing waited there, so no request is the cause."""
    harness = outage(has_idle=True)

    assert of(harness.actions, act.GiveUp) == []
    assert harness.policy.streams[A].recovery.deaths == ()
    harness.handle(instance_up("d0", epoch=2), at_s=3.0)
    harness.lose("d0", epoch=2)
    assert of(harness.actions, act.GiveUp) == []


def test_a_stream_that_waited_wherever_an_instance_died_is_refused_though_all_did() -> None:
    assert only(outage(has_idle=False).actions, act.GiveUp).reason is act.Reason.POISON


def test_an_outage_ends_after_ten_seconds() -> None:
    """A later death has another cause."""
    harness = outage(has_idle=True)
    for epoch in (2, 3):
        harness.handle(instance_up("d0", epoch=epoch), at_s=harness.now_s + 11.0)
        harness.lose("d0", epoch=epoch)

    assert only(harness.actions, act.GiveUp).reason is act.Reason.POISON
