"""The victims of one event are decided together, in the order of their deadlines."""

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import Dispatch, PolicyName, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, NodeId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, load, of, only

A, B, C = (StreamId(name) for name in "ABC")
D0, D1, D2 = (InstanceId(f"d{n}") for n in range(3))
REMOTE = BackupSettings(mode=BackupMode.REMOTE)


def test_gathering_ends_a_fixed_time_after_the_first_loss() -> None:
    """A series of losses does not put off the first victims for ever."""
    harness = PolicyHarness("p0", "d0", "p1", "d1", "d2", gather_s=0.1)
    harness.decoding("A")
    harness.decoding("B")
    harness.lose("d0", at_s=1.0, A=1)

    late = harness.lose("d1", at_s=1.11, B=1)

    assert [start.stream for start in of(late, act.Start)] == [A, B]


def test_an_instance_that_comes_up_meanwhile_does_not_end_the_gathering() -> None:
    """It is one more target when the moment has come."""
    harness = PolicyHarness("p0", "d0", gather_s=0.1)
    harness.decoding("A")
    harness.lose("d0", at_s=1.0, A=1)

    up = harness.handle(instance_up("d1"), at_s=1.01)
    woken = harness.handle(ev.TimerFired(), at_s=1.1)

    assert of(up, act.Start) == []
    assert only(woken, act.Start).plan.decode == D1


def test_a_stream_that_ends_while_it_is_gathered_is_over() -> None:
    """Its client left."""
    harness = PolicyHarness("p0", "d0", "d1", gather_s=0.1)
    for name in "ABC":
        harness.decoding(name)
    victims = [
        StreamId(start.stream)
        for start in of(harness.actions, act.Start)
        if start.plan.decode == D0
    ]
    harness.lose("d0", at_s=1.0)
    harness.handle(ev.StreamEnded(victims[0], 1))

    woken = harness.handle(ev.TimerFired(), at_s=1.1)

    assert [start.stream for start in of(woken, act.Start)] == victims[1:]
    assert len(victims) > 1


def test_a_single_failed_attempt_is_decided_at_once() -> None:
    """Its instance is still up: there is nothing to gather."""
    harness = PolicyHarness("p0", "d0", "d1", gather_s=0.1)
    harness.decoding("A")

    assert only(harness.handle(ev.AttemptFailed(A, 1, D0, "reset", 1)), act.Start).plan.decode == D1


def broken_off(harness: PolicyHarness, at_s: float) -> list[StreamId]:
    """Every connection to d0 breaks, one after the other; the streams on it."""
    streams = [start.stream for start in of(harness.actions, act.Start) if start.plan.decode == D0]
    for n, stream in enumerate(streams):
        harness.handle(
            ev.AttemptFailed(stream, 1, D0, "connection lost", 7, abrupt=True), at_s=at_s + n / 1000
        )
    return streams


def test_connections_that_break_before_their_instance_is_known_to_be_lost_are_its_victims() -> None:
    """A process that dies closes its sockets one by one: all are one event, spread as one, and none
    has failed by itself.
    """
    harness = PolicyHarness("p0", "d0", gather_s=0.1, name=PolicyName.ALWAYS_MIGRATE)
    for n in range(8):
        harness.decoding(f"s{n}")
    harness.add("d1", "d2")
    broken = broken_off(harness, at_s=1.0)

    early = [action for action in of(harness.actions, act.Start) if action.attempt > 1]
    lost = harness.lose("d0", at_s=1.05)
    woken = harness.handle(ev.TimerFired(), at_s=1.1)
    back = harness.handle(instance_up("d0", epoch=2), at_s=1.2)

    assert (len(broken), early, lost, back) == (8, [], [], [])
    assert [start.stream for start in of(woken, act.Start)] == broken
    moved = [start.plan.decode for start in of(woken, act.Start)]
    assert [moved.count(D1), moved.count(D2)] == [4, 4]
    assert {(record.cause, record.option) for record in of(woken, act.Recovered)} == {
        ("killed", Option.MIGRATE)
    }


def test_a_recovery_that_breaks_off_with_its_target_has_not_shown_its_way_to_be_bad() -> None:
    """Neither the option nor the number of failures is held against it; and it is not put off again
    by the loss.
    """
    harness = PolicyHarness("p0", "d0", "d1", "d2", gather_s=0.1, name=PolicyName.ALWAYS_MIGRATE)
    harness.decoding("A")
    harness.lose("d0", at_s=1.0, A=1)
    harness.handle(ev.TimerFired(), at_s=1.1)
    harness.handle(ev.AttemptFailed(A, 2, D1, "connection lost", 1, abrupt=True), at_s=1.2)
    harness.lose("d1", at_s=1.25)

    woken = harness.handle(ev.TimerFired(), at_s=1.3)

    assert only(woken, act.Start).plan.decode == D2
    assert only(woken, act.Recovered).option is Option.MIGRATE


def test_a_connection_that_breaks_alone_is_a_failure_when_the_gathering_is_over() -> None:
    """Its instance has not died of it: another one is next, and another way."""
    harness = PolicyHarness("p0", "d0", "d1", "d2", gather_s=0.1, name=PolicyName.ALWAYS_MIGRATE)
    harness.decoding("A")
    harness.lose("d0", at_s=1.0, A=1)
    harness.handle(ev.TimerFired(), at_s=1.1)

    broke = harness.handle(ev.AttemptFailed(A, 2, D1, "connection lost", 1, abrupt=True), at_s=1.2)
    woken = harness.handle(ev.TimerFired(), at_s=1.3)

    assert broke == [act.WakeAt(1.3)]
    assert only(woken, act.Start).plan == act.Plan(D2)
    assert only(woken, act.Recovered).cause == "connection lost"


def test_a_connection_that_breaks_alone_at_the_only_instance_is_tried_again_after_a_pause() -> None:
    """The pause begins when it is known to be alone."""
    harness = PolicyHarness("p0", "d0", gather_s=0.1)
    harness.decoding("A")
    harness.handle(ev.AttemptFailed(A, 1, D0, "connection lost", 3, abrupt=True), at_s=1.0)

    gathered, again = (
        harness.handle(ev.TimerFired(), at_s=1.1),
        harness.handle(ev.TimerFired(), at_s=1.15),
    )

    assert of(gathered, act.Start) == []
    assert only(again, act.Start).plan.decode == D0


def victims_of_d0(
    dispatch: Dispatch, name: PolicyName = PolicyName.ALWAYS_RESTORE
) -> dict[StreamId, InstanceId]:
    """Four streams on d0, all kept by agent-n1; to d2 the way is long. Where each goes when d0
    dies.
    """
    harness = PolicyHarness("p0", "d0", name=name, dispatch=dispatch, backup=REMOTE)
    harness.agents("n1")
    for stream in "ABCE":
        harness.decoding(stream, 400)
    harness.kept("agent-n1", A=9, B=3, C=7, E=12)
    harness.handle(instance_up("d1"))
    harness.handle(instance_up("d2"))
    harness.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n2"), 1e5))
    harness.handle(ev.LinkMeasured(NodeId("n1"), NodeId("n2"), 1e5))
    return {start.stream: start.plan.decode for start in of(harness.lose("d0"), act.Start)}


def test_victims_go_to_their_holders_and_the_smallest_leave_when_these_are_too_many() -> None:
    """Seed LUMEN 4.3, as the settings have it."""
    assert victims_of_d0(Dispatch.HOLDERS) == {"A": D1, "B": D1, "C": D1, "E": D1}
    assert victims_of_d0(Dispatch.REBALANCE) == {"A": D1, "B": D2, "C": D2, "E": D1}


@pytest.mark.parametrize("name", [PolicyName.AUTO, PolicyName.ALWAYS_RECOMPUTE])
def test_no_target_gets_more_than_its_share(name: PolicyName) -> None:
    """`auto` chooses among the targets below the ceiling of the mean, however good the others may
    be.
    """
    where = list(victims_of_d0(Dispatch.REBALANCE, name).values())

    assert (where.count(D1), where.count(D2)) == (2, 2)


def test_victims_are_spread_by_the_load_of_all_proxies() -> None:
    """LUMEN 4.3: the load of a target is what it runs and queues, of whichever proxy."""
    harness = PolicyHarness("p0", "d0", dispatch=Dispatch.REBALANCE)
    for name in "ABCE":
        harness.decoding(name)
    for name in ("p1", "d1", "d2"):
        harness.handle(instance_up(name))
    harness.handle(load(D1, 0.0, 12))

    where = [start.plan.decode for start in of(harness.lose("d0"), act.Start)]

    assert where == [D2] * 4


def test_a_slow_instance_moves_nothing() -> None:
    """Slow is not dead: reports, however bad, lead to no action, and so to no flapping."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.decoding("A")

    told = [harness.handle(load(D0, queue_s), at_s=float(queue_s)) for queue_s in (100, 1, 1000)]

    assert told == [[], [], []]


def test_the_tightest_deadline_is_first() -> None:
    """One slot: the stream with the least time left gets it."""
    harness = PolicyHarness("p0", "d0", name=PolicyName.ALWAYS_MIGRATE, slots_max=1)
    for stream, gap_s in ((A, None), (B, 5.0), (C, 2.0)):
        harness.handle(ev.StreamArrived(stream, 100, deadlines=ev.Deadlines(recovery_gap_s=gap_s)))
        harness.handle(ev.PrefillDone(stream, 1, 100))
        harness.handle(ev.StreamResumed(stream, 1))
    harness.handle(instance_up("d1"))
    harness.lose("d0")

    served = [harness.handle(ev.StreamResumed(StreamId(name), 2)) for name in "CB"]

    assert [start.stream for start in of(harness.actions, act.Start) if start.attempt == 2] == [
        C,
        B,
        A,
    ]
    assert all(of(each, act.Start) for each in served)


def test_a_tenant_that_names_tight_deadlines_overtakes_itself_only() -> None:
    """Two tenants that arrived by turns are served by turns, each in the order of its deadlines."""
    harness = PolicyHarness("p0", "d0", name=PolicyName.ALWAYS_MIGRATE, slots_max=1)
    asked = (("a0", None), ("b0", 0.1), ("a1", 5.0), ("b1", 0.01), ("a2", 2.0), ("b2", 0.001))
    for name, gap_s in asked:
        limits = ev.Deadlines(recovery_gap_s=gap_s, end_to_end_s=gap_s)
        stream = StreamId(name)
        harness.handle(ev.StreamArrived(stream, 100, deadlines=limits, tenant=name[0]))
        harness.handle(ev.PrefillDone(stream, 1, 100))
        harness.handle(ev.StreamResumed(stream, 1))
    harness.handle(instance_up("d1"))
    harness.lose("d0")

    for name in ("a2", "b2", "a1", "b1", "a0"):
        harness.handle(ev.StreamResumed(StreamId(name), 2))

    served = [start.stream for start in of(harness.actions, act.Start) if start.attempt == 2]
    assert served == ["a2", "b2", "a1", "b1", "a0", "b0"]


def test_the_operator_s_deadlines_order_tenants() -> None:
    """The stream that is due first by section `slo` is first, whatever clients ask for."""
    slo = SloSettings(recovery_gap_s=1.0, deadline_s=100.0)
    harness = PolicyHarness("p0", "d0", name=PolicyName.ALWAYS_MIGRATE, slots_max=1, slo=slo)
    for at_s, name, limit_s in ((0.0, "a", None), (10.0, "b", 1.0)):
        limits = ev.Deadlines(end_to_end_s=limit_s)
        stream = StreamId(name)
        harness.handle(ev.StreamArrived(stream, 100, deadlines=limits, tenant=name), at_s)
        harness.handle(ev.PrefillDone(stream, 1, 100))
        harness.handle(ev.StreamResumed(stream, 1))
    harness.handle(instance_up("d1"))
    harness.lose("d0")

    harness.handle(ev.StreamResumed(StreamId("a"), 2))

    served = [start.stream for start in of(harness.actions, act.Start) if start.attempt == 2]
    assert served == ["a", "b"]


ABORT = SloSettings(abort=True, recovery_gap_s=1.0)


def test_before_the_first_token_only_ttft_counts() -> None:
    """The gap between tokens begins with the first."""
    harness = PolicyHarness("p0", "d0", "d1", slo=ABORT)
    harness.decoding("A", 400, resumed=False)
    harness.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 1.0))
    harness.handle(load(D1, 5.0))

    assert only(harness.lose("d0"), act.Start).attempt == 2


@pytest.mark.parametrize(("ttft_s", "given_up"), [(None, 0), (0.5, 0), (0.1, 1)])
def test_a_new_stream_that_cannot_start_in_time_is_given_up(
    ttft_s: float | None, given_up: int
) -> None:
    """Before it uses any capacity."""
    harness = PolicyHarness("p0", "d0", slo=ABORT)

    actions = harness.handle(ev.StreamArrived(A, 300, deadlines=ev.Deadlines(ttft_s=ttft_s)))

    assert [action.reason for action in of(actions, act.GiveUp)] == [act.Reason.SLO] * given_up


@pytest.mark.parametrize(
    ("deadlines", "option"),
    [
        (ev.Deadlines(), Option.ABORT),
        (ev.Deadlines(recovery_gap_s=9.0), Option.RECOMPUTE),
        (ev.Deadlines(recovery_gap_s=9.0, end_to_end_s=4.0), Option.ABORT),
        (ev.Deadlines(recovery_gap_s=9.0, end_to_end_s=40.0), Option.RECOMPUTE),
    ],
)
def test_the_limits_of_the_client_override_those_of_the_operator(
    deadlines: ev.Deadlines, option: Option
) -> None:
    """Five seconds of work 3 s after the arrival: the gap allows 1 s, unless the client allows
    more; the end counts, too.
    """
    harness = PolicyHarness("p0", "d0", "d1", slo=ABORT)
    harness.handle(ev.StreamArrived(A, 100, deadlines=deadlines))
    harness.handle(ev.PrefillDone(A, 1, 100))
    harness.handle(ev.StreamResumed(A, 1))
    harness.lose("p0")
    harness.handle(load(D1, 5.0))

    actions = harness.lose("d0", at_s=3.0, A=1)

    assert [record.option for record in of(actions, act.Recovered)] == (
        [] if option is Option.ABORT else [option]
    )
    assert [action.reason for action in of(actions, act.GiveUp)] == (
        [act.Reason.SLO] if option is Option.ABORT else []
    )


def test_a_prefill_instance_lost_after_the_hand_off_takes_only_its_pages() -> None:
    """The stream runs on; what was retained is no source any more."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.decoding("A")

    lost = harness.handle(ev.InstanceLost(InstanceId("p0"), 1, "killed", {}))

    assert lost == []
    assert only(harness.lose("d0", A=1), act.Start).plan.runs == ()


@pytest.mark.parametrize("name", [PolicyName.AUTO, PolicyName.ALWAYS_MIGRATE])
def test_a_single_victim_is_charged_for_waiting_streams_only_by_a_policy_that_spares_them(
    name: PolicyName,
) -> None:
    """A decision shows as its charge what has been in it."""
    harness = PolicyHarness("p0", "d0", name=name)
    harness.decoding("A", 1000)
    harness.add("d1")
    for each in ("X", "Y"):  # The one that begins at d1 has no token yet.
        if harness.decoding(each, 1000, resumed=False).plan.decode != "d1":
            harness.handle(ev.StreamEnded(StreamId(each), 1))

    recovered = of(harness.lose("d0", A=1), act.Recovered)[0]

    assert recovered.others == 0.0
    charged_s = [each.wait_of_others_s(recovered.others) for each in recovered.estimates]
    assert any(charged_s) is (name is PolicyName.AUTO)
