"""Engines that fetch no pages: the use of a prefix cache, and servers whose two stages are one
call.
"""

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import Handoff, PolicyName
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Estimate, Option
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Capability
from tests.core.policy_harness import GEOMETRY, PolicyHarness, instance_up, load, of, only

A, B = StreamId("A"), StreamId("B")
P0, P1, D0, D1 = (InstanceId(name) for name in ("p0", "p1", "d0", "d1"))
N0, N1 = NodeId("n0"), NodeId("n1")
CACHES = frozenset({Capability.PREFIX_CACHE})
NONE: frozenset[Capability] = frozenset()


def plain(*names: str, **settings: object) -> PolicyHarness:
    """Instances like vLLM's: prefill ones cache, decode ones do nothing of their own accord."""
    harness = PolicyHarness(**settings)  # type: ignore[arg-type]
    for name in names:
        harness.handle(instance_up(name, capabilities=CACHES if name[0] == "p" else NONE))
    return harness


def migrate_of(actions: list[object]) -> Estimate | None:
    record = only(actions, act.Recovered)  # type: ignore[arg-type]
    return next(
        (estimate for estimate in record.estimates if estimate.option is Option.MIGRATE), None
    )


def test_the_prefix_cache_of_a_prefill_instance_is_migrated_from() -> None:
    """Its queue, what it does not have (6 of 101 tokens' pages are full, 1 ms a token), hand-shake,
    and the bytes of all pages, the last one whole.
    """
    harness = plain("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_MIGRATE)
    harness.handle(ev.LinkMeasured(N0, N1, 1e7))
    harness.decoding("A")
    harness.handle(load(P0, 0.25))

    actions = harness.lose("d0", A=1)

    estimate = migrate_of(list(actions))
    assert only(actions, act.Start).plan == act.Plan(D1, P0)
    assert estimate is not None
    assert (estimate.source, estimate.by_prefill) == (P0, True)
    assert estimate.queue_s == 0.25
    assert estimate.compute_s == pytest.approx(0.101 - 0.096)
    assert estimate.transfer_s == pytest.approx(0.002 + 112 * GEOMETRY.bytes_per_token / 1e7)
    assert estimate.total_s == pytest.approx(
        estimate.queue_s + estimate.compute_s + estimate.transfer_s
    )


def test_it_takes_no_slot_and_its_hand_off_is_the_ordinary_one() -> None:
    """Slots are for what a target fetches by itself; with one slot two streams migrate at once."""
    harness = plain("p0", "d0", name=PolicyName.ALWAYS_MIGRATE, slots_max=1)
    harness.decoding("A")
    harness.decoding("B")
    harness.handle(instance_up("d1", capabilities=NONE))

    actions = harness.lose("d0", A=1, B=1)

    assert [start.plan for start in of(actions, act.Start)] == [act.Plan(D1, P0)] * 2
    assert harness.policy.snapshot()["slots"] == {}
    harness.handle(ev.PrefillDone(A, 2, 101))
    assert harness.policy.snapshot()["streams"] == {
        "waiting": 0,
        "queued": 0,
        "prefill": 1,
        "decode": 1,
    }


@pytest.mark.parametrize("name", [PolicyName.ALWAYS_RECOMPUTE, PolicyName.ROM, PolicyName.AUTO])
def test_recompute_never_goes_to_the_cache_holder(name: PolicyName) -> None:
    """Where the only prefill instance is the one that has it cached, to recompute is the target's
    own work, though it is busy.
    """
    harness = plain("p0", "d0", "d1", name=name)
    harness.decoding("A")
    harness.handle(load(D1, 9.0))

    actions = harness.lose("d0", A=1)

    assert {(e.option, e.source) for e in only(actions, act.Recovered).estimates} == {
        (Option.MIGRATE, P0),
        (Option.RECOMPUTE, None),
    }
    if name is PolicyName.ALWAYS_RECOMPUTE:
        assert only(actions, act.Start).plan == act.Plan(D1)


def test_another_prefill_instance_may_recompute() -> None:
    """It has nothing of the history, so that this is no migration."""
    harness = plain("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_RECOMPUTE)
    harness.decoding("A")
    harness.handle(load(D1, 1.0))

    assert only(harness.lose("d0", A=1), act.Start).plan == act.Plan(D1, P1)


@pytest.mark.parametrize("name", [PolicyName.ROM, PolicyName.AUTO])
def test_over_a_fast_link_a_cached_prompt_is_cheaper(name: PolicyName) -> None:
    """By the seed's rule too."""
    harness = plain("p0", "d0", "d1", name=name)
    harness.handle(ev.LinkMeasured(N0, N1, 1e12))
    harness.decoding("A")

    actions = harness.lose("d0", A=1)

    assert only(actions, act.Recovered).option is Option.MIGRATE
    assert only(actions, act.Start).plan == act.Plan(D1, P0)


def test_an_instance_that_only_caches_is_never_fetched_from() -> None:
    """A cache may forget at any moment, and gives nothing under a lease: what it has is handed off
    by a prefill there, also to a target that fetches from others.
    """
    harness = PolicyHarness(name=PolicyName.ALWAYS_MIGRATE)
    for name in ("p0", "d0", "p1", "d1"):
        every = frozenset(Capability)
        harness.handle(
            instance_up(name, capabilities=every - {Capability.RETAIN} if name == "p0" else every)
        )
    harness.decoding("A")

    actions = harness.lose("d0", A=1)

    record = only(actions, act.Recovered)
    assert {each.option: each.by_prefill for each in record.estimates} == {
        Option.MIGRATE: True,
        Option.RECOMPUTE: False,
    }
    assert only(actions, act.Start).plan == act.Plan(D1, P0)


def test_a_cache_that_failed_the_stream_is_not_tried_again() -> None:
    """Decode could not pull from it: that is put down to prefill, and prefill is barred for the
    stream.
    """
    harness = plain("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_MIGRATE)
    harness.decoding("A")
    harness.lose("d0", A=1)
    harness.handle(ev.PrefillDone(A, 2, 101))

    actions = harness.handle(ev.AttemptFailed(A, 2, P0, "could not be pulled from", 1))

    assert migrate_of(list(actions)) is None
    assert only(actions, act.Start).plan.prefill != P0


def test_a_cache_is_lost_with_its_instance() -> None:
    """Its next epoch has computed nothing."""
    harness = plain("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_MIGRATE)
    harness.decoding("A")
    harness.handle(ev.InstanceLost(P0, 1, "killed", {}))
    harness.handle(instance_up("p0", epoch=2, capabilities=CACHES))

    assert migrate_of(list(harness.lose("d0", A=1))) is None


# Servers: prefill and decode instance are one process.


def server(harness: PolicyHarness, n: int, *, pulls: bool = False, epoch: int = 1) -> None:
    """`p<n>` and `d<n>`, which is the decode instance of the same server."""
    can = frozenset({Capability.FENCE, Capability.EXACT_RESUME}) | (
        {Capability.PULL_PAGES, Capability.RETAIN} if pulls else NONE
    )
    harness.handle(instance_up(f"p{n}", epoch, capabilities=can))
    harness.handle(instance_up(f"d{n}", epoch, capabilities=can, own_prefill=InstanceId(f"p{n}")))


@pytest.mark.parametrize("handoff", list(Handoff))
def test_what_is_one_call_is_not_redirected(handoff: Handoff) -> None:
    """Its hand-off has been made by the time it is heard of, however long the queue there."""
    harness = PolicyHarness(handoff=handoff)
    for n in (0, 1):
        server(harness, n, pulls=True)
    harness.handle(ev.StreamArrived(A, 100))
    harness.handle(load(D0, 9.0))

    assert of(harness.handle(ev.PrefillDone(A, 1, 100)), act.Redirect) == []
    assert harness.handle(ev.StreamResumed(A, 1)) == []
    assert {row["id"]: row["decode_streams"] for row in harness.policy.snapshot()["instances"]}[
        D0
    ] == 1


@pytest.mark.parametrize("handoff", list(Handoff))
def test_a_server_behind_a_queue_hands_off_to_another_one(handoff: Handoff) -> None:
    """It is chosen at the start, because one call cannot be redirected; then it is two calls, of
    which the second is chosen again when prefill is done.
    """
    harness = PolicyHarness(handoff=handoff)
    for n in (0, 1):
        server(harness, n, pulls=True)
    harness.handle(load(P1, 5.0))
    harness.handle(load(D0, 9.0))

    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    if handoff is Handoff.OWN_PAIR:
        assert start.plan == act.Plan(D0, P0)
        return
    assert start.plan == act.Plan(D1, P0)
    harness.handle(load(D0, 0.0))
    harness.handle(load(D1, 9.0))
    assert only(harness.handle(ev.PrefillDone(A, 1, 100)), act.Redirect).plan == act.Plan(D0, P0)


def test_a_server_that_retains_nothing_is_one_call_behind_any_queue() -> None:
    """Another one, which does fetch, would find nothing there."""
    harness = PolicyHarness(handoff=Handoff.AUTO)
    server(harness, 0)
    server(harness, 1, pulls=True)
    harness.handle(load(P1, 5.0))
    harness.handle(load(D0, 9.0))

    assert only(harness.handle(ev.StreamArrived(A, 100)), act.Start).plan == act.Plan(D0, P0)


def test_nor_is_its_plan_redirected_otherwise() -> None:
    """A guess at the prompt's length booked room for its checkpoint; the call has been made with
    that.
    """
    harness = PolicyHarness(backup=BackupSettings(mode=BackupMode.REMOTE))
    every = frozenset(Capability)
    for name, own in (("p0", None), ("d0", P0)):
        harness.handle(instance_up(name, capabilities=every, own_prefill=own))
    harness.agents("n1")
    start = only(harness.handle(ev.StreamArrived(A, 1, 20)), act.Start)

    assert start.plan.places != ()
    assert harness.handle(ev.PrefillDone(A, 1, 1000)) == []


def test_a_hand_off_to_the_server_of_its_prefill_is_redirected_like_any_other() -> None:
    """It was planned for another one, in two calls: that it would have been one call does not
    matter any more.
    """
    harness = PolicyHarness(handoff=Handoff.AUTO)
    harness.handle(instance_up("p0"))
    harness.handle(instance_up("d1"))
    harness.handle(ev.StreamArrived(A, 100))
    harness.handle(instance_up("d0", own_prefill=P0))
    harness.handle(load(D1, 9.0))

    assert only(harness.handle(ev.PrefillDone(A, 1, 100)), act.Redirect).plan == act.Plan(D0, P0)


@pytest.mark.parametrize("lost", [P0, D0])
def test_one_call_is_lost_with_either_stage(lost: InstanceId) -> None:
    """Its victims are decided with the loss, without waiting for a prefill whose connection is
    gone.
    """
    harness = PolicyHarness()
    for n in (0, 1):
        server(harness, n)
    harness.handle(ev.StreamArrived(A, 100))

    actions = harness.handle(ev.InstanceLost(lost, 1, "killed", {A: 0}))

    assert only(actions, act.Start) == act.Start(A, 2, act.Plan(D1, P1))
    running = {row["id"]: row["running"] for row in harness.policy.snapshot()["instances"]}
    assert (
        running == {P0: 0, D0: 0, P1: 1, D1: 1} | {lost: 0}
        if lost in running
        else running == {name: int(name in (P1, D1)) for name in (P0, P1, D0, D1) if name != lost}
    )


def test_one_call_past_its_first_token_survives_its_prefill() -> None:
    """From then on only the decode stage works on it."""
    harness = PolicyHarness()
    server(harness, 0)
    harness.decoding("A")

    assert harness.handle(ev.InstanceLost(P0, 1, "killed", {})) == []
    assert harness.policy.snapshot()["streams"]["decode"] == 1


def test_a_server_that_pulls_nothing_has_only_its_own_prefill() -> None:
    """The other server's prefill has less work, and no way to hand it over."""
    harness = PolicyHarness()
    for n in (0, 1):
        server(harness, n)
    harness.handle(ev.InstanceLost(D0, 1, "killed", {}))
    harness.handle(load(P1, 5.0))

    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    assert start.plan == act.Plan(D1, P1)


def test_a_server_that_pulls_takes_the_hand_off_of_another() -> None:
    """Which is then two calls."""
    harness = PolicyHarness()
    for n in (0, 1):
        server(harness, n, pulls=True)
    harness.handle(ev.InstanceLost(D0, 1, "killed", {}))
    harness.handle(load(P1, 5.0))

    assert only(harness.handle(ev.StreamArrived(A, 100)), act.Start).plan == act.Plan(D1, P0)


def test_a_history_is_recomputed_by_the_targets_own_prefill() -> None:
    """Though another server's would be idle: without pulls it cannot hand off."""
    harness = PolicyHarness()
    for n in (0, 1, 2):
        server(harness, n)
    harness.decoding("A")
    harness.handle(load(P1, 0.01))

    record = only(harness.lose("d0", A=1), act.Recovered)

    assert {(each.target, each.source) for each in record.estimates} == {
        (D1, P1),
        (InstanceId("d2"), InstanceId("p2")),
    }


def test_the_own_prefill_is_the_servers_not_the_nodes() -> None:
    """Another server of the same node would have less work."""
    harness = PolicyHarness()
    for n in (0, 1):
        server(harness, n)
    harness.handle(instance_up("p1x", capabilities=NONE))
    harness.decoding("A")
    harness.handle(load(P1, 0.5))

    record = only(harness.lose("d0", A=1), act.Recovered)

    assert {(each.target, each.source) for each in record.estimates} == {(D1, P1)}


def test_without_a_server_that_is_whole_a_stream_waits() -> None:
    """A decode instance that cannot pull, of a server without prefill, is of no use to a new
    stream.
    """
    harness = PolicyHarness()
    for n in (0, 1):
        server(harness, n)
    harness.handle(ev.InstanceLost(P0, 1, "killed", {}))
    harness.handle(ev.InstanceLost(D1, 1, "killed", {}))

    assert of(harness.handle(ev.StreamArrived(A, 100)), act.Start) == []
    assert only(
        harness.handle(instance_up("p0", 2, capabilities=NONE)), act.Start
    ).plan == act.Plan(D0, P0)


def test_a_server_that_pulls_nothing_and_has_no_prefill_gets_no_victims() -> None:
    """Its decode instance computes nothing itself, so that they would wait there while another
    server could go on with them.
    """
    harness = PolicyHarness()
    for n in (0, 1, 2):
        server(harness, n)
    harness.decoding("A")
    harness.handle(ev.InstanceLost(P1, 1, "killed", {}))

    actions = harness.lose("d0", A=1)

    assert only(actions, act.Start).plan == act.Plan(InstanceId("d2"), InstanceId("p2"))
    assert {each.target for each in only(actions, act.Recovered).estimates} == {InstanceId("d2")}


def test_without_a_server_that_is_whole_a_victim_waits() -> None:
    harness = PolicyHarness()
    for n in (0, 1):
        server(harness, n)
    harness.decoding("A")
    harness.handle(ev.InstanceLost(P1, 1, "killed", {}))

    assert of(harness.lose("d0", A=1), act.Start) == []
    up = harness.handle(instance_up("p1", 2, capabilities=NONE))
    assert only(up, act.Start).plan == act.Plan(D1, P1)


def test_a_whole_server_that_failed_is_tried_again_before_one_that_is_not() -> None:
    harness = PolicyHarness()
    for n in (0, 1):
        server(harness, n)
    harness.decoding("A")
    harness.handle(ev.InstanceLost(P1, 1, "killed", {}))

    assert of(harness.handle(ev.AttemptFailed(A, 1, D0, "reset", 1)), act.Start) == []
    assert only(
        harness.handle(ev.TimerFired(), at_s=harness.now_s + 0.06), act.Start
    ).plan == act.Plan(D0, P0)
