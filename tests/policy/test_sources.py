"""Every source of KV is weighed: instances that retain it, agents that keep checkpoints, the target itself; and splits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.agent.config import BackupMode, BackupSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.actions import Place, Plan, Recovered, Run, Settled, Start
from kvrs.policy.config import PolicyName
from kvrs.policy.costs import Option, best_front
from kvrs.policy.events import (
    AttemptFailed,
    HolderLost,
    InstanceUp,
    LinkMeasured,
    PrefillDone,
    RetentionLost,
    StreamArrived,
    StreamResumed,
    TimerFired,
)
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import Capability
from tests.policy.policy_stories import GEOMETRY, Story, instance, of, only

A = StreamId("A")
P0, D1, B0, B1 = (InstanceId(name) for name in ("p0", "d1", "b0", "b1"))
AGENT_1, AGENT_2 = InstanceId("agent-n1"), InstanceId("agent-n2")
N0, N1 = NodeId("n0"), NodeId("n1")
REMOTE, LOCAL = BackupSettings(mode=BackupMode.REMOTE), BackupSettings(mode=BackupMode.LOCAL)
PAGE_BYTES = GEOMETRY.page_bytes
NO_SPLIT = frozenset(Capability) - {Capability.SPLIT}


def checkpointed(*names: str, backup: BackupSettings = REMOTE, prompt_tokens: int = 100, **settings: object) -> Story:
    """A stream decodes on d0; `agent-n1` (or, local, `agent-n0`) keeps its checkpoint. Nobody splits."""
    story = Story(backup=backup, **settings)  # type: ignore[arg-type]
    for name in names:
        story.tell(InstanceUp(instance(name, capabilities=NO_SPLIT)))
    story.agents("n0", "n1")
    story.decoding("A", prompt_tokens)
    return story


def test_a_victim_is_restored_on_the_node_that_keeps_its_checkpoint() -> None:
    """All full pages of the history are asked for: the agent may have more than it has said."""
    story = checkpointed("p0", "d0", "p1", "d1")
    story.kept("agent-n1", A=8)

    actions = story.lose("d0", A=60)

    assert only(actions, Start).plan.runs == (Run(AGENT_1, 0, 9, 1),)
    record = only(actions, Recovered)
    restore = next(estimate for estimate in record.estimates if estimate.option is Option.RESTORE)
    assert record.option is Option.RESTORE
    assert restore.transfer_s == pytest.approx(0.002 + 8 * PAGE_BYTES / 26e9)
    assert restore.compute_s == pytest.approx(0.160 - 0.128)


def test_within_a_node_a_measured_link_says_more_than_the_settings() -> None:
    """`host_to_device_bytes_per_s` is what is assumed until something was fetched."""
    story = checkpointed("p0", "d0", "p1", "d1")
    story.kept("agent-n1", A=8)
    story.tell(LinkMeasured(N1, N1, 1e6))

    restore = next(e for e in only(story.lose("d0", A=60), Recovered).estimates if e.option is Option.RESTORE)

    assert restore.transfer_s == pytest.approx(0.002 + 8 * PAGE_BYTES / 1e6)


def test_the_prompt_comes_from_prefill_and_what_was_generated_from_an_agent() -> None:
    """Where the agent is far and prefill is near, each gives what it gives best."""
    story = checkpointed("p0", "d0", "d1")
    story.kept("agent-n1", A=5)
    story.kept("agent-n1", A=11)
    story.tell(LinkMeasured(N1, N1, 4e6))
    story.tell(LinkMeasured(N0, N1, 1e9))

    actions = story.lose("d0", A=90)

    assert only(actions, Start).plan.runs == (Run(P0, 0, 6, 1), Run(AGENT_1, 6, 5, 1))
    assert only(actions, Recovered).option is Option.MIGRATE


def test_a_checkpoint_that_lags_is_extended_by_the_instance_that_has_more() -> None:
    """Runs follow each other: the agent is asked for no more than what it is known to have."""
    story = checkpointed("p0", "d0", "d1", name=PolicyName.ALWAYS_RESTORE)
    story.kept("agent-n1", A=4)

    assert only(story.lose("d0", A=1), Start).plan.runs == (Run(AGENT_1, 0, 4, 1), Run(P0, 4, 2, 1))


def test_an_extension_that_is_sooner_computed_is_not_fetched() -> None:
    """Every run has its hand-shake."""
    story = checkpointed("p0", "d0", "d1", name=PolicyName.ALWAYS_RESTORE)
    story.kept("agent-n1", A=4)
    story.tell(LinkMeasured(N0, N1, 1e5))

    assert only(story.lose("d0", A=1), Start).plan.runs == (Run(AGENT_1, 0, 6, 1),)


def test_an_agent_that_has_all_of_the_prompt_is_asked_for_what_came_after_it() -> None:
    """Its report lags behind what was sent to it: what it does not have costs no more than asking."""
    story = checkpointed("p0", "d0", "d1", name=PolicyName.ALWAYS_MIGRATE)
    story.kept("agent-n1", A=6)

    assert only(story.lose("d0", A=60), Start).plan.runs == (Run(P0, 0, 6, 1), Run(AGENT_1, 6, 3, 1))


@pytest.mark.parametrize("how", ["agent lost", "agent replaced", "retention lost", "nothing reported"])
def test_what_an_agent_no_longer_has_is_never_a_source(how: str) -> None:
    """A new life of an agent is believed only what it says itself."""
    story = checkpointed("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_RESTORE)
    if how != "nothing reported":
        story.kept("agent-n1", A=6)
    match how:
        case "agent lost":
            story.tell(HolderLost(AGENT_1, 1, "killed"))
        case "agent replaced":
            story.agents("n1", epoch=2)
        case "retention lost":
            story.tell(RetentionLost(AGENT_1, (A,)))

    start = only(story.lose("d0", A=1), Start)

    assert AGENT_1 not in {run.holder for run in start.plan.runs}


def test_a_restarted_agent_counts_again_with_what_it_says() -> None:
    """It adopts its segments, and the instances find their way back to it."""
    story = checkpointed("p0", "d0", "p1", "d1", name=PolicyName.ALWAYS_RESTORE)
    story.tell(HolderLost(AGENT_1, 1, "killed"))
    unprotected = story.policy.snapshot()["unprotected"]
    story.agents("n1", epoch=2)
    story.kept("agent-n1", epoch=1, A=99)
    story.kept("agent-n1", epoch=2, A=6)

    start = only(story.lose("d0", A=1), Start)

    assert unprotected == {"A": "agent-n1 was lost: killed"}
    assert start.plan.runs == (Run(AGENT_1, 0, 6, 2),)


def test_what_the_target_has_itself_is_reused_and_extended() -> None:
    """An instance of both roles that prefilled the stream, and failed it once, is as good a place as any to go on."""
    story = Story("b0", backup=REMOTE)
    story.agents("n0", "n1")
    story.tell(StreamArrived(A, 100))
    story.tell(PrefillDone(A, 1, 100))
    story.tell(StreamResumed(A, 1))
    story.kept("agent-n1", A=9)
    story.tell(LinkMeasured(N1, N0, 1e8))
    story.tell(AttemptFailed(A, 1, B0, "error event", 60), at_s=1.0)

    actions = story.tell(TimerFired(), at_s=1.05)

    assert only(actions, Recovered).option is Option.REUSE
    assert only(actions, Start).plan.runs == (Run(AGENT_1, 6, 3, 1),)


def test_reuse_without_more_takes_no_slot() -> None:
    """There is no transfer."""
    story = Story("b0", slots_max=1)
    story.tell(StreamArrived(A, 100))
    story.tell(PrefillDone(A, 1, 100))
    story.tell(AttemptFailed(A, 1, B0, "error event", 60), at_s=1.0)

    actions = story.tell(TimerFired(), at_s=1.05)

    assert only(actions, Start).plan == Plan(decode=B0)
    assert only(actions, Recovered).option is Option.REUSE
    assert story.policy.snapshot()["slots"] == {}


def test_a_split_fetches_the_back_while_the_front_is_computed() -> None:
    """Near the crossover neither way alone is good: half of each takes half the time."""
    story = Story("p0", "d0", "p1", "d1")
    story.tell(LinkMeasured(N0, N1, 2_048_000.0))  # 1 ms per token, as long as computing it takes.
    story.decoding("A", 321)

    actions = story.lose("d0")

    (run,) = only(actions, Start).plan.runs
    record = only(actions, Recovered)
    assert record.option is Option.SPLIT
    assert (run.holder, run.first_page, run.first_page + run.pages) == (P0, 10, 20)
    best_other = min(e.total_s for e in record.estimates if e.option is not Option.SPLIT)
    assert best_other / record.predicted_s > 1.9


def test_only_an_engine_that_can_split_is_asked_to() -> None:
    """Capability `split`; and static policies do not split."""
    story = Story("p0", "d0", "p1")
    story.tell(InstanceUp(instance("d1", capabilities=NO_SPLIT)))
    story.tell(LinkMeasured(N0, N1, 2_048_000.0))
    story.decoding("A", 321)

    assert Option.SPLIT not in {estimate.option for estimate in only(story.lose("d0"), Recovered).estimates}


@given(
    pages=st.integers(2, 400),
    token_s=st.floats(1e-6, 1e-2),
    overhead_s=st.floats(0, 0.1),
    page_s=st.floats(1e-5, 0.5),
    fixed_s=st.floats(0, 1.0),
    tail=st.integers(1, 300),
)
def test_the_front_is_optimal_to_the_page_for_a_straight_table(
    pages: int, token_s: float, overhead_s: float, page_s: float, fixed_s: float, tail: int
) -> None:
    """In closed form, against trying every page."""
    history = pages * 16 + tail
    table = PrefillTable("line", "made up", 10_000, [overhead_s, overhead_s + 10_000 * token_s])

    def both_s(k: int) -> float:
        return max(fixed_s + (pages - k) * page_s, table.seconds_for(16 * k))

    best_s = min(both_s(k) for k in range(1, pages))
    found = best_front(table, 16, pages, page_s, fixed_s, table.seconds_for(history), history)

    if found is None:
        assert best_s >= (fixed_s + pages * page_s) * (1 - 1e-9)
    else:
        assert found[1] == pytest.approx(both_s(found[0]))
        assert found[1] <= best_s * (1 + 1e-9)


@given(pages=st.integers(2, 400), page_s=st.floats(1e-4, 0.1), fixed_s=st.floats(0, 0.5), curve=st.floats(0, 1e-8))
def test_the_front_is_near_the_optimum_for_a_bent_table(pages: int, page_s: float, fixed_s: float, curve: float) -> None:
    """Attention makes prefill quadratic: a fixed number of look-ups must still do."""
    table = PrefillTable("bent", "made up", 100, [0.005 + 1e-5 * n + curve * n * n for n in range(0, 8000, 100)])
    history = pages * 16 + 1

    best_s = min(max(fixed_s + (pages - k) * page_s, table.seconds_for(16 * k)) for k in range(1, pages))
    found = best_front(table, 16, pages, page_s, fixed_s, table.seconds_for(history), history)

    assert (found[1] if found is not None else fixed_s + pages * page_s) <= best_s * 1.15


def test_a_recovery_says_what_it_has_cost_and_teaches_the_next_one() -> None:
    """`Settled` at the first token: raw and corrected prediction, real cost, regret; the correction is bounded."""
    story = Story("p0", "d0", "d1", name=PolicyName.ALWAYS_MIGRATE)
    story.decoding("A")
    record = only(story.lose("d0", at_s=10.0, A=1), Recovered)

    settled = only(story.tell(StreamResumed(A, 2), at_s=11.0), Settled)
    story.tell(InstanceUp(instance("d0", epoch=2)))
    again = only(story.lose("d1", at_s=12.0, A=2), Recovered)

    migrate, other = (next(e for e in record.estimates if (e.option is Option.MIGRATE) is wanted) for wanted in (True, False))
    assert settled == Settled(A, 2, Option.MIGRATE, migrate.raw_s, migrate.total_s, 1.0, 1.0 - other.total_s)
    assert migrate.raw_s == migrate.total_s
    learned = next(e for e in again.estimates if e.option is Option.MIGRATE)
    assert learned.raw_s < learned.total_s <= 4 * learned.raw_s
    assert story.policy.snapshot()["corrections"]["migrate"] == pytest.approx(learned.total_s / learned.raw_s, rel=0.01)


def test_the_seeds_rule_is_left_as_the_seed_has_it() -> None:
    """`rom` learns nothing, and neither does anybody with `correction_max: 1`."""
    for changes in ({"name": PolicyName.ROM}, {"correction_max": 1.0}):
        story = Story("p0", "d0", "d1", **changes)
        story.decoding("A")
        story.lose("d0", at_s=10.0, A=1)
        story.tell(StreamResumed(A, 2), at_s=99.0)

        assert story.policy.snapshot()["corrections"] == {}


def test_a_first_start_is_no_recovery_to_settle() -> None:
    """Only what was on record as a recovery is settled."""
    story = Story("p0", "d0")
    story.decoding("A")

    assert of(story.actions, Settled) == []


def test_the_old_checkpoint_is_a_source_until_the_stream_flows_elsewhere() -> None:
    """The holder is where the stream now runs, so another one is chosen; what the first has is still wanted if that fails."""
    story = checkpointed("p0", "d0", "d1", "d2", name=PolicyName.ALWAYS_RESTORE)
    story.agents("n2")
    story.kept("agent-n1", A=6)
    first = only(story.lose("d0", A=1), Start)

    second = only(story.lose("d1", A=1), Start)
    story.tell(StreamResumed(A, 3))

    assert (first.plan.decode, first.plan.runs) == (D1, (Run(AGENT_1, 0, 6, 1),))
    assert first.plan.places == (Place(AGENT_2, 6 * PAGE_BYTES),)
    assert second.plan.runs == (Run(AGENT_1, 0, 6, 1),)
    assert second.plan.places == (Place(AGENT_1, 6 * PAGE_BYTES),)
    assert story.policy.snapshot()["checkpoints"] == {"A": {"pages": {"agent-n1": 6}, "unprotected": ""}}
