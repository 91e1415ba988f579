"""Engines that fetch no pages themselves: what a prefix cache is worth, and servers whose two stages are one call."""

import pytest

from kvrs.agent.config import BackupMode, BackupSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.actions import Plan, Recovered, Redirect, Start
from kvrs.policy.config import Handoff, PolicyName
from kvrs.policy.costs import Estimate, Option
from kvrs.policy.events import (
    AttemptFailed,
    InstanceLost,
    InstanceUp,
    LinkMeasured,
    LoadReported,
    PrefillDone,
    StreamArrived,
    StreamResumed,
    TimerFired,
)
from kvrs.protocol.instance import Capability
from tests.policy.policy_stories import GEOMETRY, Story, instance, of, only

A, B = StreamId("A"), StreamId("B")
P0, P1, D0, D1 = (InstanceId(name) for name in ("p0", "p1", "d0", "d1"))
N0, N1 = NodeId("n0"), NodeId("n1")
CACHES = frozenset({Capability.PREFIX_CACHE})
NONE: frozenset[Capability] = frozenset()


def plain(*names: str, **settings: object) -> Story:
    """As vLLM: prefill instances cache, decode instances do nothing of their own accord."""
    story = Story(**settings)  # type: ignore[arg-type]
    for name in names:
        story.tell(InstanceUp(instance(name, capabilities=CACHES if name[0] == "p" else NONE)))
    return story


def migrate_of(actions: list[object]) -> Estimate | None:
    record = only(actions, Recovered)  # type: ignore[arg-type]
    return next((estimate for estimate in record.estimates if estimate.option is Option.MIGRATE), None)


def test_the_prefix_cache_of_a_prefill_instance_is_migrated_from() -> None:
    """Its queue, what it does not have (6 of 101 tokens' pages are full, 1 ms a token), hand-shake, and all the bytes."""
    story = plain("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_MIGRATE)
    story.tell(LinkMeasured(N0, N1, 1e7))
    story.decoding("A")
    story.tell(LoadReported(P0, 0.25))

    actions = story.lose("d0", A=1)

    estimate = migrate_of(list(actions))
    assert only(actions, Start).plan == Plan(D1, P0)
    assert estimate is not None
    assert (estimate.source, estimate.by_prefill) == (P0, True)
    assert estimate.queue_s == 0.25
    assert estimate.compute_s == pytest.approx(0.101 - 0.096)
    assert estimate.transfer_s == pytest.approx(0.002 + 101 * GEOMETRY.bytes_per_token / 1e7)
    assert estimate.raw_s == pytest.approx(estimate.queue_s + estimate.compute_s + estimate.transfer_s)


def test_it_takes_no_slot_and_its_hand_off_is_the_ordinary_one() -> None:
    """Slots are for what a target fetches by itself; with one slot two streams migrate at once."""
    story = plain("p0", "d0", "d1", name=PolicyName.ALWAYS_MIGRATE, slots_max=1)
    story.decoding("A")
    story.decoding("B")

    actions = story.lose("d0", A=1, B=1)

    assert [start.plan for start in of(actions, Start)] == [Plan(D1, P0)] * 2
    assert story.policy.snapshot()["slots"] == {}
    story.tell(PrefillDone(A, 2, 101))
    assert story.policy.snapshot()["streams"] == {"waiting": 0, "queued": 0, "prefill": 1, "decode": 1}


@pytest.mark.parametrize("name", [PolicyName.ALWAYS_RECOMPUTE, PolicyName.ROM, PolicyName.AUTO])
def test_recompute_is_not_another_word_for_it(name: PolicyName) -> None:
    """Where the only prefill instance is the one that has it cached, to recompute is the target's own work, though it is busy."""
    story = plain("p0", "d0", "d1", name=name)
    story.decoding("A")
    story.tell(LoadReported(D1, 9.0))

    actions = story.lose("d0", A=1)

    assert {(e.option, e.source) for e in only(actions, Recovered).estimates} == {(Option.MIGRATE, P0), (Option.RECOMPUTE, None)}
    if name is PolicyName.ALWAYS_RECOMPUTE:
        assert only(actions, Start).plan == Plan(D1)


def test_another_prefill_instance_may_recompute() -> None:
    """It has nothing of the history, so that this is no migration."""
    story = plain("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_RECOMPUTE)
    story.decoding("A")
    story.tell(LoadReported(D1, 1.0))

    assert only(story.lose("d0", A=1), Start).plan == Plan(D1, P1)


@pytest.mark.parametrize("name", [PolicyName.ROM, PolicyName.AUTO])
def test_over_a_fast_link_a_cached_prompt_is_cheaper(name: PolicyName) -> None:
    """By the seed's rule too."""
    story = plain("p0", "d0", "d1", name=name)
    story.tell(LinkMeasured(N0, N1, 1e12))
    story.decoding("A")

    actions = story.lose("d0", A=1)

    assert only(actions, Recovered).option is Option.MIGRATE
    assert only(actions, Start).plan == Plan(D1, P0)


def test_who_only_caches_is_never_fetched_from() -> None:
    """A cache may forget at any moment, and gives nothing under a lease; a target that pulls has other ways."""
    story = Story(name=PolicyName.ALWAYS_MIGRATE)
    for name in ("p0", "d0", "p1", "d1"):
        every = frozenset(Capability)
        story.tell(InstanceUp(instance(name, capabilities=every - {Capability.RETAIN} if name == "p0" else every)))
    story.decoding("A")

    record = only(story.lose("d0", A=1), Recovered)

    assert [estimate.option for estimate in record.estimates] == [Option.RECOMPUTE]


def test_a_cache_that_failed_the_stream_is_not_tried_again() -> None:
    """Decode could not pull from it: that is put down to prefill, and prefill is barred for the stream."""
    story = plain("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_MIGRATE)
    story.decoding("A")
    story.lose("d0", A=1)
    story.tell(PrefillDone(A, 2, 101))

    actions = story.tell(AttemptFailed(A, 2, P0, "could not be pulled from", 1))

    assert migrate_of(list(actions)) is None
    assert only(actions, Start).plan.prefill != P0


def test_a_cache_dies_with_its_instance() -> None:
    """A new life of it has computed nothing."""
    story = plain("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_MIGRATE)
    story.decoding("A")
    story.tell(InstanceLost(P0, 1, "killed", {}))
    story.tell(InstanceUp(instance("p0", epoch=2, capabilities=CACHES)))

    assert migrate_of(list(story.lose("d0", A=1))) is None


# Servers whose prefill and decode instance are one process.


def server(story: Story, n: int, *, pulls: bool = False, epoch: int = 1) -> None:
    """`p<n>` and `d<n>`, which is the decode instance of the same server."""
    can = frozenset({Capability.FENCE, Capability.EXACT_RESUME}) | ({Capability.PULL_PAGES, Capability.RETAIN} if pulls else NONE)
    story.tell(InstanceUp(instance(f"p{n}", epoch, capabilities=can)))
    story.tell(InstanceUp(instance(f"d{n}", epoch, capabilities=can, own_prefill=InstanceId(f"p{n}"))))


@pytest.mark.parametrize("handoff", list(Handoff))
def test_what_is_one_call_is_not_redirected(handoff: Handoff) -> None:
    """Its hand-off has been made by the time it is heard of, however long the queue there."""
    story = Story(handoff=handoff)
    for n in (0, 1):
        server(story, n, pulls=True)
    story.tell(StreamArrived(A, 100))
    story.tell(LoadReported(D0, 9.0))

    assert of(story.tell(PrefillDone(A, 1, 100)), Redirect) == []
    assert story.tell(StreamResumed(A, 1)) == []
    assert {row["id"]: row["decode_streams"] for row in story.policy.snapshot()["instances"]}[D0] == 1


def test_nor_is_anything_else_of_it_said_again() -> None:
    """A guess at the prompt's length booked room for its checkpoint; the engine has been told already."""
    story = Story(backup=BackupSettings(mode=BackupMode.REMOTE))
    every = frozenset(Capability)
    for name, own in (("p0", None), ("d0", P0)):
        story.tell(InstanceUp(instance(name, capabilities=every, own_prefill=own)))
    story.agents("n1")
    start = only(story.tell(StreamArrived(A, 1, 20)), Start)

    assert start.plan.places != ()
    assert story.tell(PrefillDone(A, 1, 1000)) == []


def test_a_hand_off_to_the_server_of_its_prefill_is_told_like_any_other() -> None:
    """It was planned for another one, in two calls: that it would have been one call does not matter any more."""
    story = Story(handoff=Handoff.AUTO)
    story.tell(InstanceUp(instance("p0")))
    story.tell(InstanceUp(instance("d1")))
    story.tell(StreamArrived(A, 100))
    story.tell(InstanceUp(instance("d0", own_prefill=P0)))
    story.tell(LoadReported(D1, 9.0))

    assert only(story.tell(PrefillDone(A, 1, 100)), Redirect).plan == Plan(D0, P0)


@pytest.mark.parametrize("lost", [P0, D0])
def test_one_call_is_lost_with_either_stage(lost: InstanceId) -> None:
    """Its victims are decided with the loss; nobody waits for a prefill whose connection is gone."""
    story = Story()
    for n in (0, 1):
        server(story, n)
    story.tell(StreamArrived(A, 100))

    actions = story.tell(InstanceLost(lost, 1, "killed", {A: 0}))

    assert only(actions, Start) == Start(A, 2, Plan(D1, P1))
    running = {row["id"]: row["running"] for row in story.policy.snapshot()["instances"]}
    assert (
        running == {P0: 0, D0: 0, P1: 1, D1: 1} | {lost: 0}
        if lost in running
        else running == {name: int(name in (P1, D1)) for name in (P0, P1, D0, D1) if name != lost}
    )


def test_one_call_past_its_first_token_survives_its_prefill() -> None:
    """From then on only the decode stage works on it."""
    story = Story()
    server(story, 0)
    story.decoding("A")

    assert story.tell(InstanceLost(P0, 1, "killed", {})) == []
    assert story.policy.snapshot()["streams"]["decode"] == 1


def test_a_server_that_pulls_nothing_has_only_its_own_prefill() -> None:
    """The other server's prefill has less work, and no way to hand it over."""
    story = Story()
    for n in (0, 1):
        server(story, n)
    story.tell(InstanceLost(D0, 1, "killed", {}))
    story.tell(LoadReported(P1, 5.0))

    start = only(story.tell(StreamArrived(A, 100)), Start)

    assert start.plan == Plan(D1, P1)


def test_a_server_that_pulls_takes_the_hand_off_of_another() -> None:
    """Which is then two calls."""
    story = Story()
    for n in (0, 1):
        server(story, n, pulls=True)
    story.tell(InstanceLost(D0, 1, "killed", {}))
    story.tell(LoadReported(P1, 5.0))

    assert only(story.tell(StreamArrived(A, 100)), Start).plan == Plan(D1, P0)


def test_a_history_is_recomputed_by_the_targets_own_prefill() -> None:
    """Though another server's would be idle, and nobody pulls."""
    story = Story()
    for n in (0, 1, 2):
        server(story, n)
    story.decoding("A")
    story.tell(LoadReported(P1, 0.01))

    record = only(story.lose("d0", A=1), Recovered)

    assert {(each.target, each.source) for each in record.estimates} == {(D1, P1), (InstanceId("d2"), InstanceId("p2"))}


def test_the_own_prefill_is_the_servers_not_the_nodes() -> None:
    """Another server of the same node would have less work."""
    story = Story()
    for n in (0, 1):
        server(story, n)
    story.tell(InstanceUp(instance("p1x", capabilities=NONE)))
    story.decoding("A")
    story.tell(LoadReported(P1, 0.5))

    record = only(story.lose("d0", A=1), Recovered)

    assert {(each.target, each.source) for each in record.estimates} == {(D1, P1)}


def test_without_a_server_that_is_whole_a_stream_waits() -> None:
    """A decode instance that cannot pull, of a server without prefill, is of no use to a new stream."""
    story = Story()
    for n in (0, 1):
        server(story, n)
    story.tell(InstanceLost(P0, 1, "killed", {}))
    story.tell(InstanceLost(D1, 1, "killed", {}))

    assert of(story.tell(StreamArrived(A, 100)), Start) == []
    assert only(story.tell(InstanceUp(instance("p0", 2, capabilities=NONE))), Start).plan == Plan(D0, P0)


def test_a_server_that_pulls_nothing_and_has_no_prefill_gets_no_victims() -> None:
    """Its decode instance computes nothing itself, so that they would wait there while another server could go on with them."""
    story = Story()
    for n in (0, 1, 2):
        server(story, n)
    story.decoding("A")
    story.tell(InstanceLost(P1, 1, "killed", {}))

    actions = story.lose("d0", A=1)

    assert only(actions, Start).plan == Plan(InstanceId("d2"), InstanceId("p2"))
    assert {each.target for each in only(actions, Recovered).estimates} == {InstanceId("d2")}


def test_without_a_server_that_is_whole_a_victim_waits() -> None:
    story = Story()
    for n in (0, 1):
        server(story, n)
    story.decoding("A")
    story.tell(InstanceLost(P1, 1, "killed", {}))

    assert of(story.lose("d0", A=1), Start) == []
    up = story.tell(InstanceUp(instance("p1", 2, capabilities=NONE)))
    assert only(up, Start).plan == Plan(D1, P1)


def test_a_whole_server_that_failed_is_tried_again_before_one_that_is_not() -> None:
    story = Story()
    for n in (0, 1):
        server(story, n)
    story.decoding("A")
    story.tell(InstanceLost(P1, 1, "killed", {}))

    assert of(story.tell(AttemptFailed(A, 1, D0, "reset", 1)), Start) == []
    assert only(story.tell(TimerFired(), at_s=story.now_s + 0.06), Start).plan == Plan(D0, P0)
