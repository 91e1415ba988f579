"""The agents that store a stream's checkpoint: choice, duration, and the reason where there is
none.
"""

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import Handoff
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import MEMORY, Capability
from tests.core.policy_harness import GEOMETRY, PolicyHarness, instance_up, load, of, only

A, B, C = (StreamId(name) for name in "ABC")
D0, D1 = InstanceId("d0"), InstanceId("d1")
AGENTS = [InstanceId(f"agent-n{n}") for n in range(3)]
PAGE_BYTES = GEOMETRY.page_bytes


def cluster(
    mode: BackupMode, *nodes: str, capacity_bytes: int = 1 << 30, **settings: object
) -> PolicyHarness:
    harness = PolicyHarness("p0", "d0", "p1", "d1", backup=BackupSettings(mode=mode), **settings)  # type: ignore[arg-type]
    harness.agents(*(nodes or ("n0", "n1", "n2")), capacity_bytes=capacity_bytes)
    return harness


def agent(harness: PolicyHarness, name: InstanceId) -> dict[str, object]:
    (row,) = (row for row in harness.policy.snapshot()["agents"] if row["id"] == name)
    assert isinstance(row, dict)
    return row


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (BackupMode.OFF, []),
        (BackupMode.LOCAL, [AGENTS[0]]),
        (BackupMode.REMOTE, [AGENTS[1]]),
        (BackupMode.BOTH, [AGENTS[0], AGENTS[1]]),
    ],
)
def test_the_mode_decides_which_agents_store_it(
    mode: BackupMode, expected: list[InstanceId]
) -> None:
    """The own node's agent, another node's, both; room is reserved for all that the stream may come
    to.
    """
    harness = cluster(mode)

    start = only(harness.handle(ev.StreamArrived(A, 100, most_tokens=330)), act.Start)

    assert start.plan.places == tuple(act.Place(name, 20 * PAGE_BYTES) for name in expected)


def test_restore_pressure_counts_with_the_measured_rate_of_memory() -> None:
    """LUMEN Eq. 1 divides by it; `host_to_device_bytes_per_s` is what is assumed before."""
    harness = cluster(BackupMode.REMOTE)
    node = NodeId("n1")
    harness.handle(ev.LinkMeasured(MEMORY, node, 1.0))

    start = only(harness.handle(ev.StreamArrived(A, 100, most_tokens=330)), act.Start)

    assert [place.holder for place in start.plan.places] == [AGENTS[2]]


def test_what_is_reserved_counts_at_once_and_until_the_stream_ends() -> None:
    """The load table counts a place before any agent has reported it."""
    harness = cluster(BackupMode.REMOTE, "n1", "n2")

    places = [
        only(harness.handle(ev.StreamArrived(name, 100, most_tokens=n)), act.Start).plan.places
        for name, n in ((A, 330), (B, 100))
    ]
    harness.handle(ev.StreamEnded(A, 1))

    assert places[0][0].holder == AGENTS[1]
    assert agent(harness, AGENTS[1])["booked_bytes"] == 0


def test_reports_correct_the_own_bookings() -> None:
    """Other proxies' checkpoints are known from reports only; a report of an earlier epoch is
    ignored.
    """
    harness = cluster(BackupMode.REMOTE, "n1", "n2", capacity_bytes=100 * PAGE_BYTES)
    harness.handle(ev.CheckpointsReported(AGENTS[1], 0, 0, 0, {}))
    harness.handle(ev.CheckpointsReported(AGENTS[1], 1, 95 * PAGE_BYTES, 5, {}))

    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    assert start.plan.places == (act.Place(AGENTS[2], 6 * PAGE_BYTES),)


def test_queues_count_against_a_holder() -> None:
    """LUMEN Eq. 1: a stream that is restored there would wait there."""
    harness = cluster(BackupMode.REMOTE)
    harness.handle(load(D1, 3.0))

    assert (
        only(harness.handle(ev.StreamArrived(A, 100)), act.Start).plan.places[0].holder == AGENTS[2]
    )


@pytest.mark.parametrize(
    ("mode", "nodes", "capacity_bytes", "why"),
    [
        (BackupMode.LOCAL, ["n1"], 1 << 30, "no agent is up on n0"),
        (BackupMode.LOCAL, ["n0"], 5 * PAGE_BYTES, "no room at agent-n0"),
        (BackupMode.REMOTE, ["n0"], 1 << 30, "no agent of another node is up and has room"),
        (
            BackupMode.REMOTE,
            ["n0", "n1"],
            5 * PAGE_BYTES,
            "no agent of another node is up and has room",
        ),
    ],
)
def test_the_reason_of_a_missing_checkpoint_is_shown(
    mode: BackupMode, nodes: list[str], capacity_bytes: int, why: str
) -> None:
    """It runs all the same."""
    harness = cluster(mode, *nodes, capacity_bytes=capacity_bytes)

    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    assert start.plan.places == ()
    assert harness.policy.snapshot()["unprotected"] == {"A": why}


@pytest.mark.parametrize(("names", "placed"), [("d0", True), ("p0", True), ("p0 d0", False)])
def test_an_instance_that_sends_no_checkpoints_takes_no_room(names: str, placed: bool) -> None:
    """A plain engine: what is booked for it would be missing to streams that have something to
    send.
    """
    harness = cluster(BackupMode.BOTH)
    for name in names.split():
        harness.handle(
            instance_up(name, epoch=2, capabilities=frozenset(Capability) - {Capability.CHECKPOINT})
        )

    start = only(harness.handle(ev.StreamArrived(A, 100)), act.Start)

    assert (start.plan.prefill, start.plan.decode) == ("p0", "d0")
    assert bool(start.plan.places) is placed
    assert harness.policy.snapshot()["unprotected"] == (
        {} if placed else {"A": "no agent keeps KV of d0"}
    )
    assert any(agent(harness, name)["booked_bytes"] for name in AGENTS) is placed


def test_a_checkpoint_of_a_stream_that_moves_to_a_plain_engine_is_a_source_and_then_let_go() -> (
    None
):
    """Its agent is not written to any more, as when another one takes over."""
    harness = cluster(BackupMode.REMOTE, "n2")
    harness.decoding("A", 400)
    harness.kept("agent-n2", A=20)
    harness.lose("p0")
    harness.handle(
        instance_up("d1", epoch=2, capabilities=frozenset(Capability) - {Capability.CHECKPOINT})
    )

    start = only(harness.lose("d0", A=1), act.Start)
    kept = agent(harness, AGENTS[2])["own_streams"]
    harness.handle(ev.StreamResumed(A, 2))

    assert ([run.holder for run in start.plan.runs], start.plan.places, kept) == (
        [AGENTS[2]],
        (),
        1,
    )
    assert agent(harness, AGENTS[2])["own_streams"] == 0


def test_a_denied_stream_is_unprotected() -> None:
    """The agent found no room for it after all: other proxies were there before."""
    harness = cluster(BackupMode.REMOTE)
    harness.decoding("A")

    harness.handle(ev.RetentionLost(AGENTS[1], (A,)))

    assert harness.policy.snapshot()["unprotected"] == {"A": "agent-n1 keeps no KV of it any more"}
    assert agent(harness, AGENTS[1])["booked_bytes"] == 0


def test_a_place_is_kept_while_it_serves() -> None:
    """Pages that are there already need not be sent again."""
    harness = cluster(BackupMode.REMOTE)
    harness.handle(load(D1, 3.0))
    harness.decoding("A")
    harness.handle(load(D1, 0.0))
    harness.handle(ev.CheckpointsReported(AGENTS[2], 1, 1 << 29, 1, {}))

    start = only(harness.lose("d0", A=1), act.Start)

    assert start.plan.decode == D1
    assert start.plan.places == (act.Place(AGENTS[2], 6 * PAGE_BYTES),)


def test_a_place_is_chosen_again_when_its_holder_is_lost_or_is_where_the_stream_runs() -> None:
    """Both copies in one place are one copy."""
    lost, moved = cluster(BackupMode.REMOTE), cluster(BackupMode.REMOTE)
    for harness in (lost, moved):
        harness.decoding("A")
        assert list(harness.policy.snapshot()["checkpoints"]["A"]["pages"]) == [AGENTS[1]]
    lost.handle(ev.HolderLost(AGENTS[1], 1, "killed"))

    starts = [only(harness.lose("d0", A=1), act.Start) for harness in (lost, moved)]

    assert [start.plan.places[0].holder for start in starts] == [AGENTS[2], AGENTS[2]]


def test_local_checkpoints_follow_their_stream() -> None:
    """`both`: what was the own node's is now another node's, and it has everything."""
    harness = cluster(BackupMode.BOTH, "n0", "n1")
    harness.decoding("A")
    harness.kept("agent-n0", A=6)

    start = only(harness.lose("d0", A=1), act.Start)

    assert [place.holder for place in start.plan.places] == [AGENTS[1], AGENTS[0]]


def test_a_holder_that_is_lost_during_prefill_is_replaced_at_the_hand_off() -> None:
    """Decode has not begun, so the plan can still change."""
    harness = cluster(BackupMode.REMOTE)
    harness.handle(ev.StreamArrived(A, 100))
    harness.handle(ev.HolderLost(AGENTS[1], 1, "killed"))

    redirect = only(harness.handle(ev.PrefillDone(A, 1, 100)), act.Redirect)

    assert redirect.plan.decode == D0
    assert redirect.plan.places == (act.Place(AGENTS[2], 6 * PAGE_BYTES),)


def test_a_hand_off_to_the_holders_node_has_another_holder_chosen() -> None:
    """The place was chosen for the decode instance of the plan."""
    harness = cluster(BackupMode.REMOTE, handoff=Handoff.AUTO)
    harness.handle(ev.StreamArrived(A, 100))
    harness.handle(load(D0, 9.0))

    redirect = only(harness.handle(ev.PrefillDone(A, 1, 100)), act.Redirect)

    assert (redirect.plan.decode, redirect.plan.places[0].holder) == (D1, AGENTS[2])


def test_room_grows_with_a_prompt_that_was_longer_than_guessed() -> None:
    """It came as text; prefill has counted it."""
    harness = cluster(BackupMode.REMOTE)
    harness.handle(ev.StreamArrived(A, 10, most_tokens=60))

    redirect = only(harness.handle(ev.PrefillDone(A, 1, 170)), act.Redirect)

    assert redirect.plan.places == (act.Place(AGENTS[1], (60 + 160) // 16 * PAGE_BYTES),)


def test_an_unchanged_plan_is_not_redirected() -> None:
    """The healthy path: one start, and no more."""
    harness = cluster(BackupMode.BOTH)
    harness.decoding("A")

    assert of(harness.actions, act.Redirect) == []
    assert len(of(harness.actions, act.Start)) == 1


def test_an_ended_stream_leaves_no_place_behind() -> None:
    """Also when it ends while it is recovered."""
    harness = cluster(BackupMode.BOTH)
    harness.decoding("A")
    harness.lose("d0", A=1)
    harness.handle(ev.StreamResumed(A, 2))
    harness.kept("agent-n0", A=3)

    harness.handle(ev.StreamEnded(A, 2))
    harness.kept("agent-n1", A=3)

    assert {agent(harness, name)["booked_bytes"] for name in AGENTS} == {0}
    assert {agent(harness, name)["own_streams"] for name in AGENTS} == {0}
