"""Every source of KV is weighed: instances that retain it, agents that keep checkpoints, the target
itself; and splits.
"""

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicyName, RestoredAt
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import HANDSHAKE_S, Option
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import MEMORY, Capability
from tests.core.policy_harness import GEOMETRY, PolicyHarness, instance_up, load, of, only

A = StreamId("A")
P0, D1, B0, B1 = (InstanceId(name) for name in ("p0", "d1", "b0", "b1"))
AGENT_1, AGENT_2 = InstanceId("agent-n1"), InstanceId("agent-n2")
N0, N1 = NodeId("n0"), NodeId("n1")
REMOTE, LOCAL = BackupSettings(mode=BackupMode.REMOTE), BackupSettings(mode=BackupMode.LOCAL)
PAGE_BYTES = GEOMETRY.page_bytes
NO_SPLIT = frozenset(Capability) - {Capability.SPLIT}


def checkpointed(
    *names: str, backup: BackupSettings = REMOTE, prompt_tokens: int = 100, **settings: object
) -> PolicyHarness:
    """A stream decodes on d0; `agent-n1` (or, local, `agent-n0`) stores its checkpoint. No instance
    splits.
    """
    harness = PolicyHarness(backup=backup, **settings)  # type: ignore[arg-type]
    for name in names:
        harness.handle(instance_up(name, capabilities=NO_SPLIT))
    harness.agents("n0", "n1")
    harness.decoding("A", prompt_tokens)
    return harness


def test_a_victim_is_restored_on_the_node_that_keeps_its_checkpoint() -> None:
    """All full pages of the history are requested: the agent may have more than it has reported."""
    harness = checkpointed("p0", "d0", "p1", "d1")
    harness.kept("agent-n1", A=8)

    actions = harness.lose("d0", A=60)

    assert only(actions, act.Start).plan.runs == (act.PageRange(AGENT_1, 0, 9, 1),)
    record = only(actions, act.Recovered)
    restore = next(estimate for estimate in record.estimates if estimate.option is Option.RESTORE)
    assert record.option is Option.RESTORE
    assert restore.transfer_s == pytest.approx(0.002 + 8 * PAGE_BYTES / 26e9)
    assert restore.compute_s == pytest.approx(0.160 - 0.128)


@pytest.mark.parametrize(
    ("restored_at", "target", "option"),
    [
        (RestoredAt.ANYWHERE, "d2", Option.RESTORE),
        (RestoredAt.HOLDER, "d2", Option.RECOMPUTE),
        (RestoredAt.HOLDER, "d1", Option.RESTORE),
    ],
)
def test_a_victim_that_is_sent_elsewhere_is_computed_again_where_the_setting_says_so(
    restored_at: RestoredAt, target: str, option: Option
) -> None:
    """LUMEN restores at the holder of the checkpoint alone."""
    harness = checkpointed(
        "p0", "d0", target, name=PolicyName.ALWAYS_RESTORE, restored_at=restored_at
    )
    harness.kept("agent-n1", A=8)

    assert only(harness.lose("d0", A=60), act.Recovered).option is option


def test_within_a_node_a_measured_link_replaces_the_setting() -> None:
    """`host_to_device_bytes_per_s` is what is assumed until something was fetched."""
    harness = checkpointed("p0", "d0", "p1", "d1")
    harness.kept("agent-n1", A=8)
    harness.handle(ev.LinkMeasured(N1, N1, 1e6))

    restore = next(
        e
        for e in only(harness.lose("d0", A=60), act.Recovered).estimates
        if e.option is Option.RESTORE
    )

    assert restore.transfer_s == pytest.approx(0.002 + 8 * PAGE_BYTES / 1e6)


def test_memory_of_the_own_node_is_a_link_of_its_own() -> None:
    """It counts before what hand-offs within the node have measured, and for that node only; what
    is fetched there is booked on it.
    """
    harness = checkpointed("p0", "d0", "p1", "d1", "p2", "d2")
    harness.kept("agent-n1", A=8)
    harness.handle(ev.LinkMeasured(N1, N1, 1e6))
    harness.handle(ev.LinkMeasured(N1, NodeId("n2"), 1e9))
    harness.handle(ev.LinkMeasured(MEMORY, N0, 1e6))
    harness.handle(ev.LinkMeasured(MEMORY, N1, 8e9))

    restores = {
        e.target: e.transfer_s
        for e in only(harness.lose("d0", A=60), act.Recovered).estimates
        if e.option is Option.RESTORE
    }

    assert restores[D1] == pytest.approx(0.002 + 8 * PAGE_BYTES / 8e9)
    assert restores[InstanceId("d2")] == pytest.approx(0.002 + 8 * PAGE_BYTES / 1e9)
    links = {(row["source"], row["target"]): row for row in harness.policy.snapshot()["links"]}
    assert links[MEMORY, N1]["in_flight_bytes"] == 9 * PAGE_BYTES
    assert links[N1, N1]["in_flight_bytes"] == 0


def test_the_prompt_comes_from_prefill_and_what_was_generated_from_an_agent() -> None:
    """Where the agent is far and prefill is near, each gives what it gives best."""
    harness = checkpointed("p0", "d0", "d1")
    harness.kept("agent-n1", A=5)
    harness.kept("agent-n1", A=11)
    harness.handle(ev.LinkMeasured(N1, N1, 4e6))
    harness.handle(ev.LinkMeasured(N0, N1, 1e9))

    actions = harness.lose("d0", A=90)

    assert only(actions, act.Start).plan.runs == (
        act.PageRange(P0, 0, 6, 1),
        act.PageRange(AGENT_1, 6, 5, 1),
    )
    assert only(actions, act.Recovered).option is Option.MIGRATE


def test_behind_logits_that_are_no_numbers_nothing_is_loaded() -> None:
    """Pages that an agent stores and p0 retains may be what spoilt them: the second verdict is to
    be about the request.
    """
    harness = checkpointed("p0", "d0", "d1")
    harness.kept("agent-n1", A=8)
    kind = ev.FailureKind.NOT_A_NUMBER
    before = {each.holder for each in harness.policy.kept(A) if each.pages}
    harness.handle(load("d1", 9.0))  # It is as quick to compute elsewhere meanwhile.

    failed = ev.AttemptFailed(A, 1, InstanceId("d0"), "nan", 60, failure=kind)
    actions = harness.handle(failed)

    assert before >= {AGENT_1, P0}
    assert [each for each in harness.policy.kept(A) if each.pages] == []
    start, record = only(actions, act.Start), only(actions, act.Recovered)
    assert start.plan.runs == ()
    assert (start.plan.prefill, start.plan.decode) == (P0, D1)
    assert {each.option for each in record.estimates} == {Option.RECOMPUTE}


def test_a_checkpoint_that_lags_is_extended_by_the_instance_that_has_more() -> None:
    """Runs follow each other: only the reported pages are requested from the agent."""
    harness = checkpointed("p0", "d0", "d1", name=PolicyName.ALWAYS_RESTORE)
    harness.kept("agent-n1", A=4)

    assert only(harness.lose("d0", A=1), act.Start).plan.runs == (
        act.PageRange(AGENT_1, 0, 4, 1),
        act.PageRange(P0, 4, 2, 1),
    )


def test_an_extension_that_is_sooner_computed_is_not_fetched() -> None:
    """Every run has its hand-shake."""
    harness = checkpointed("p0", "d0", "d1", name=PolicyName.ALWAYS_RESTORE)
    harness.kept("agent-n1", A=4)
    harness.handle(ev.LinkMeasured(N0, N1, 1e5))

    assert only(harness.lose("d0", A=1), act.Start).plan.runs == (act.PageRange(AGENT_1, 0, 6, 1),)


def test_generated_pages_are_requested_from_an_agent_that_has_the_prompt() -> None:
    """Its report lags behind what was sent to it: what it does not have costs no more than
    asking.
    """
    harness = checkpointed("p0", "d0", "d1", name=PolicyName.ALWAYS_MIGRATE)
    harness.kept("agent-n1", A=6)

    assert only(harness.lose("d0", A=60), act.Start).plan.runs == (
        act.PageRange(P0, 0, 6, 1),
        act.PageRange(AGENT_1, 6, 3, 1),
    )


@pytest.mark.parametrize(
    "how", ["agent lost", "agent replaced", "retention lost", "nothing reported"]
)
def test_what_an_agent_no_longer_has_is_never_a_source(how: str) -> None:
    """A new epoch of an agent counts only by its own reports."""
    harness = checkpointed("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_RESTORE)
    if how != "nothing reported":
        harness.kept("agent-n1", A=6)
    match how:
        case "agent lost":
            harness.handle(ev.HolderLost(AGENT_1, 1, "killed"))
        case "agent replaced":
            harness.agents("n1", epoch=2)
        case "retention lost":
            harness.handle(ev.RetentionLost(AGENT_1, (A,)))
        case _:
            pass

    start = only(harness.lose("d0", A=1), act.Start)

    assert AGENT_1 not in {run.holder for run in start.plan.runs}


def test_a_restarted_agent_counts_again_by_its_own_reports() -> None:
    """It adopts its segments, and the instances find their way back to it."""
    harness = checkpointed("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_RESTORE)
    harness.handle(ev.HolderLost(AGENT_1, 1, "killed"))
    unprotected = harness.policy.snapshot()["unprotected"]
    harness.agents("n1", epoch=2)
    harness.kept("agent-n1", epoch=1, A=99)
    harness.kept("agent-n1", epoch=2, A=6)

    start = only(harness.lose("d0", A=1), act.Start)

    assert unprotected == {"A": "agent-n1 was lost: killed"}
    assert start.plan.runs == (act.PageRange(AGENT_1, 0, 6, 2),)


def test_what_the_target_has_itself_is_reused_and_extended() -> None:
    """An instance of both roles that prefilled the stream, and failed it once, is as good a place
    as any to go on.
    """
    harness = PolicyHarness("b0", backup=REMOTE)
    harness.agents("n0", "n1")
    harness.handle(ev.StreamArrived(A, 100))
    harness.handle(ev.PrefillDone(A, 1, 100))
    harness.handle(ev.StreamResumed(A, 1))
    harness.kept("agent-n1", A=9)
    harness.handle(ev.LinkMeasured(N1, N0, 1e8))
    harness.handle(ev.AttemptFailed(A, 1, B0, "error event", 60), at_s=1.0)

    actions = harness.handle(ev.TimerFired(), at_s=1.05)

    assert only(actions, act.Recovered).option is Option.REUSE
    assert only(actions, act.Start).plan.runs == (act.PageRange(AGENT_1, 6, 3, 1),)


def test_reuse_without_more_takes_no_slot() -> None:
    """There is no transfer."""
    harness = PolicyHarness("b0", slots_max=1)
    harness.handle(ev.StreamArrived(A, 100))
    harness.handle(ev.PrefillDone(A, 1, 100))
    harness.handle(ev.AttemptFailed(A, 1, B0, "error event", 60), at_s=1.0)

    actions = harness.handle(ev.TimerFired(), at_s=1.05)

    assert only(actions, act.Start).plan == act.Plan(decode=B0)
    assert only(actions, act.Recovered).option is Option.REUSE
    assert harness.policy.snapshot()["slots"] == {}


def test_a_split_fetches_the_back_while_the_front_is_computed() -> None:
    """Near the crossover neither way alone is good: half of each takes half the time."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.handle(
        ev.LinkMeasured(N0, N1, 2_048_000.0)
    )  # 1 ms per token, as long as computing it takes.
    harness.decoding("A", 321)

    actions = harness.lose("d0")

    (run,) = only(actions, act.Start).plan.runs
    record = only(actions, act.Recovered)
    assert record.option is Option.SPLIT
    assert (run.holder, run.first_page, run.first_page + run.pages) == (P0, 10, 20)
    best_other = min(e.total_s for e in record.estimates if e.option is not Option.SPLIT)
    assert best_other / record.predicted_s > 1.9


def test_only_an_engine_with_the_capability_splits() -> None:
    """Capability `split`; and static policies do not split."""
    harness = PolicyHarness("p0", "d0", "p1")
    harness.handle(instance_up("d1", capabilities=NO_SPLIT))
    harness.handle(ev.LinkMeasured(N0, N1, 2_048_000.0))
    harness.decoding("A", 321)

    assert Option.SPLIT not in {
        estimate.option for estimate in only(harness.lose("d0"), act.Recovered).estimates
    }


def test_a_recovery_is_settled_and_widens_the_next_interval() -> None:
    """`Settled` at the first token: predicted and real cost, and the interval, which widens."""
    harness = PolicyHarness("p0", "d0", "d1", name=PolicyName.ALWAYS_MIGRATE)
    harness.decoding("A")
    record = only(harness.lose("d0", at_s=10.0, A=1), act.Recovered)

    settled = only(harness.handle(ev.StreamResumed(A, 2), at_s=11.0), act.Settled)
    harness.handle(instance_up("d0", epoch=2))
    again = only(harness.lose("d1", at_s=12.0, A=2), act.Recovered)
    then = only(harness.handle(ev.StreamResumed(A, 3), at_s=12.1), act.Settled)

    first, second = (
        next(e for e in each.estimates if e.option is Option.MIGRATE) for each in (record, again)
    )
    assert settled.low_s is not None
    assert settled == act.Settled(
        A, 2, Option.MIGRATE, settled.predicted_s, 1.0, settled.low_s, settled.high_s
    )
    assert settled.predicted_s == pytest.approx(first.total_s + HANDSHAKE_S, rel=0.2)
    assert settled.low_s < settled.predicted_s < 1.0
    assert then.low_s is not None
    assert then.predicted_s / then.low_s > settled.predicted_s / settled.low_s
    assert second.total_s < 1.5 * first.total_s  # It is not corrected.


def test_rom_predicts_no_interval_and_learns_none() -> None:
    """Its costs leave out queues and steps."""
    harness = PolicyHarness("p0", "d0", "d1", name=PolicyName.ROM)
    before = harness.policy.snapshot()["spread"]
    harness.decoding("A")
    harness.lose("d0", at_s=10.0, A=1)

    settled = only(harness.handle(ev.StreamResumed(A, 2), at_s=99.0), act.Settled)

    assert (settled.low_s, settled.high_s) == (None, None)
    assert harness.policy.snapshot()["spread"] == before


def test_a_first_start_is_no_recovery_to_settle() -> None:
    """Only what was on record as a recovery is settled."""
    harness = PolicyHarness("p0", "d0")
    harness.decoding("A")

    assert of(harness.actions, act.Settled) == []


def test_the_old_checkpoint_is_a_source_until_the_stream_flows_elsewhere() -> None:
    """The holder is where the stream now runs, so another one is chosen; what the first has is
    still wanted if that fails.
    """
    harness = checkpointed("p0", "d0", "d1", "d2", name=PolicyName.ALWAYS_RESTORE)
    harness.agents("n2")
    harness.kept("agent-n1", A=6)
    first = only(harness.lose("d0", A=1), act.Start)

    second = only(harness.lose("d1", A=1), act.Start)
    harness.handle(ev.StreamResumed(A, 3))

    assert (first.plan.decode, first.plan.runs) == (D1, (act.PageRange(AGENT_1, 0, 6, 1),))
    assert first.plan.places == (act.Place(AGENT_2, 6 * PAGE_BYTES),)
    assert second.plan.runs == (act.PageRange(AGENT_1, 0, 6, 1),)
    assert second.plan.places == (act.Place(AGENT_1, 6 * PAGE_BYTES),)
    assert harness.policy.snapshot()["checkpoints"] == {
        "A": {"pages": {"agent-n1": 6}, "unprotected": ""}
    }
