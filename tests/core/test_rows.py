"""Streams of vLLM are restored out of the memory of their engine, which the agent of its node
serves: no checkpoint is kept of them before.
"""

from typing import Any

import msgspec
import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.core.incidents import Incidents, sentence
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.streams import Predicted, RestoredRows
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Capability
from kvrs.protocol.rows import CopyReport, RegionReport, RowsReport
from tests.core.policy_harness import GEOMETRY, PolicyHarness, instance_up, load, of, only

A = StreamId("A")
D = D0, D1, D2 = tuple(InstanceId(name) for name in ("d0", "d1", "d2"))
AGENT_0, AGENT_1 = InstanceId("agent-n0"), InstanceId("agent-n1")
SPACE, OTHER = "0123456789abcdef", "fedcba9876543210"
LOCAL, REMOTE = (BackupSettings(mode=each) for each in (BackupMode.LOCAL, BackupMode.REMOTE))


def region(engine: str, namespace: str = SPACE, *, is_alive: bool = True) -> RegionReport:
    return RegionReport(InstanceId(engine), namespace, is_alive, 1000, 1 << 16)


def copied(node: str, namespace: str = SPACE, share: float = 1.0) -> CopyReport:
    return CopyReport(NodeId(node), namespace, share)


class RowsHarness(PolicyHarness):
    """Servers of vLLM with prefix caches; `d0` and `d2` are on node `n0`, `d1` on `n1`."""

    def __init__(self, *names: str, backup: BackupSettings = LOCAL, **settings: Any) -> None:
        super().__init__(backup=backup, **settings)
        for name in names:
            self.up(name)
        self.agents("n0", "n1")

    def up(self, name: str, epoch: int = 1) -> None:
        node = self.node_of(name)
        event = instance_up(
            name,
            epoch,
            node=node,
            capabilities=[Capability.PREFIX_CACHE],
            computes_prompts=True,
        )
        self.handle(event)

    def node_of(self, name: str) -> NodeId:
        return NodeId("n1" if name == "d1" else "n0")

    def serve(
        self,
        agent: str,
        *regions: RegionReport,
        others: bool = True,
        copies: CopyReport | None = None,
    ) -> list[act.Action]:
        """`others`: to servers of other nodes, too."""
        rows = RowsReport(regions, others, () if copies is None else (copies,))
        return self.handle(ev.CheckpointsReported(InstanceId(agent), 1, 0, 0, {}, rows))

    def start(self) -> act.Start:
        start = self.decoding("A", 100)
        assert start.plan.decode == D0
        return start


def restore_of(record: act.Recovered) -> Any:
    return next((each for each in record.estimates if each.option is Option.RESTORE), None)


def test_a_victim_is_restored_on_the_node_whose_agent_serves_its_engine() -> None:
    """Nothing was reserved or sent. All full pages but what the last position is in are loaded."""
    harness = RowsHarness("d0", "d1", "d2")
    harness.serve("agent-n0", region("d0"), region("d2"))
    harness.serve("agent-n1", region("d1"))
    assert harness.start().plan.places == ()
    assert harness.policy.streams[A].unprotected == ""

    actions = harness.lose("d0", A=60)

    assert only(actions, act.Start).plan.runs == (act.PageRange(AGENT_0, 0, 9, 1),)
    record, restore = only(actions, act.Recovered), restore_of(only(actions, act.Recovered))
    assert (record.option, only(actions, act.Start).plan.decode) == (Option.RESTORE, D2)
    assert restore.transfer_s == pytest.approx(0.002 + 9 * GEOMETRY.page_bytes / 26e9)


def test_rows_of_another_node_cost_their_way() -> None:
    """By the measured rate of the link; where computing is sooner it is computed."""
    for bytes_per_s, option in ((1e9, Option.RESTORE), (1e6, Option.RECOMPUTE)):
        harness = RowsHarness("d0", "d1")
        harness.serve("agent-n0", region("d0"))
        harness.serve("agent-n1", region("d1"))
        harness.start()
        harness.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), bytes_per_s))

        record = only(harness.lose("d0", A=60), act.Recovered)

        assert record.option is option
        transfer_s = 0.002 + 9 * GEOMETRY.page_bytes / bytes_per_s
        assert restore_of(record).transfer_s == pytest.approx(transfer_s)


def test_rows_that_other_nodes_cannot_load_are_no_source_there() -> None:
    harness = RowsHarness("d0", "d1")
    harness.serve("agent-n0", region("d0"), others=False)
    harness.serve("agent-n1", region("d1"))
    harness.start()

    assert only(harness.lose("d0", A=60), act.Recovered).option is Option.RECOMPUTE


def test_auto_goes_to_another_node_where_the_one_with_the_rows_is_busy() -> None:
    harness = RowsHarness("d0", "d1", "d2")
    harness.serve("agent-n0", region("d0"), region("d2"))
    harness.serve("agent-n1", region("d1"))
    harness.start()
    harness.handle(load("d2", queue_s=5.0))

    assert only(harness.lose("d0", A=60), act.Start).plan.decode == D1


def test_many_victims_use_both_loading_and_computing() -> None:
    """Where one of them is loaded about as quickly as computed, half of them are: the last one goes
    on in half of the time that either way takes for all.
    """
    harness = RowsHarness("d0", "d1")
    harness.serve("agent-n0", region("d0"))
    harness.serve("agent-n1", region("d1"))
    harness.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 2e6))
    for number in range(16):
        harness.decoding(f"S{number}", 3000)
    plans = {stream.id: stream.attempt.plan for stream in harness.policy.streams.values()}
    cut = [name for name, plan in plans.items() if plan is not None and plan.decode == D0]

    actions = harness.lose("d0", **dict.fromkeys(map(str, cut), 60))

    chosen = [each.option for each in of(actions, act.Recovered)]
    assert len(chosen) == 8
    assert chosen.count(Option.RESTORE) == chosen.count(Option.RECOMPUTE) == 4


@pytest.mark.parametrize(
    ("own", "others", "backup"),
    [
        pytest.param(SPACE, OTHER, LOCAL, id="other weights"),
        pytest.param(SPACE, None, LOCAL, id="a server without rows"),
        pytest.param(None, SPACE, LOCAL, id="it had no rows"),
        pytest.param(SPACE, SPACE, BackupSettings(), id="nothing is to be protected"),
    ],
)
def test_rows_that_cannot_be_used_are_no_source(
    own: str | None, others: str | None, backup: BackupSettings
) -> None:
    harness = RowsHarness("d0", "d2", backup=backup)
    regions = [region(name, space) for name, space in (("d0", own), ("d2", others)) if space]
    harness.serve("agent-n0", *regions)
    harness.start()

    record = only(harness.lose("d0", A=60), act.Recovered)

    assert (record.option, restore_of(record)) == (Option.RECOMPUTE, None)


def test_an_agent_speaks_for_the_engines_of_its_own_node_alone() -> None:
    """A region of an engine that is not there, or that nobody knows, changes nothing."""
    harness = RowsHarness("d0", "d1")
    harness.serve("agent-n1", region("d0"), region("nobody"), region("d1"))
    harness.start()

    assert only(harness.lose("d0", A=60), act.Recovered).option is Option.RECOMPUTE


def test_an_agent_may_hear_of_a_death_before_the_proxy() -> None:
    """The rows that it serves of the dead engine are those of streams that are about to leave."""
    harness = RowsHarness("d0", "d2")
    harness.serve("agent-n0", region("d0"), region("d2"))
    harness.start()
    harness.serve("agent-n0", region("d0", is_alive=False), region("d2"))

    assert only(harness.lose("d0", A=60), act.Recovered).option is Option.RESTORE


def test_the_next_process_has_rows_when_the_agent_has_them() -> None:
    """Not those of the one before: it may have been started without a tier."""
    harness = RowsHarness("d0", "d2")
    harness.serve("agent-n0", region("d0"), region("d2"))
    harness.lose("d0")
    harness.serve("agent-n0", region("d0", is_alive=False), region("d2"))
    harness.up("d0", epoch=2)
    assert harness.policy.members[D0].shared.rows == ""

    harness.serve("agent-n0", region("d0", is_alive=False), region("d0"), region("d2"))

    assert harness.policy.members[D0].shared.rows == SPACE


def test_without_its_agent_an_instance_has_no_rows() -> None:
    """They are back with it."""
    harness = RowsHarness("d0", "d2")
    harness.serve("agent-n0", region("d0"), region("d2"))
    harness.handle(ev.HolderLost(AGENT_0, 1, "killed"))
    harness.start()
    assert harness.policy.streams[A].unprotected == "no agent keeps KV of d0"
    assert harness.policy.members[D0].shared.rows == ""

    harness.agents("n0", epoch=2)
    harness.handle(ev.CheckpointsReported(AGENT_0, 2, 0, 0, {}, RowsReport((region("d0"),))))

    assert harness.policy.members[D0].shared.rows == SPACE


@pytest.mark.parametrize("cause", ["given back", "the agent is lost"])
def test_rows_that_are_gone_before_a_target_is_up_are_no_source(cause: str) -> None:
    harness = RowsHarness("d0")
    harness.serve("agent-n0", region("d0"))
    harness.start()
    harness.lose("d0", A=60)
    if cause == "given back":
        harness.serve("agent-n0")
    else:
        harness.handle(ev.HolderLost(AGENT_0, 1, "killed"))
    assert not harness.policy.streams[A].checkpoints

    harness.up("d2")

    record = only(of(harness.actions, act.Recovered), act.Recovered)
    assert record.option is Option.RECOMPUTE


@pytest.mark.parametrize("first", ["agent", "instance"])
def test_a_stream_of_a_lost_node_is_restored_from_the_second_copy(first: str) -> None:
    """Whichever loss is known first."""
    harness = RowsHarness("d0", "d1")
    harness.serve("agent-n0", region("d0"))
    harness.serve("agent-n1", region("d1"), copies=copied("n0"))
    harness.start()

    if first == "agent":
        harness.handle(ev.HolderLost(AGENT_0, 1, "killed"))
        actions = harness.lose("d0", A=60)
    else:
        harness.handle(ev.InstanceLost(D0, 1, "killed", {A: 60}))
        actions = harness.actions

    assert only(actions, act.Recovered).option is Option.RESTORE
    start = of(actions, act.Start)[-1]
    assert (start.plan.decode, {run.holder for run in start.plan.runs}) == (D1, {AGENT_1})


OF_OTHERS = {"of other rows": copied("n0", OTHER), "of another node": copied("n2")}


@pytest.mark.parametrize("cause", ["dropped", *OF_OTHERS, "its agent is lost"])
def test_a_second_copy_that_is_not_there_is_no_source(cause: str) -> None:
    harness = RowsHarness("d0", "d1")
    harness.serve("agent-n0", region("d0"))
    harness.serve("agent-n1", region("d1"), copies=OF_OTHERS.get(cause, copied("n0")))
    harness.start()
    if cause == "dropped":
        harness.serve("agent-n1", region("d1"))
    elif cause == "its agent is lost":
        harness.handle(ev.HolderLost(AGENT_1, 1, "killed"))

    harness.handle(ev.HolderLost(AGENT_0, 1, "killed"))

    assert only(harness.lose("d0", A=60), act.Recovered).option is Option.RECOMPUTE


def test_a_moved_stream_takes_the_rows_of_a_living_engine() -> None:
    """A drain computes nothing twice."""
    harness = RowsHarness("d0", "d2")
    harness.serve("agent-n0", region("d0"), region("d2"))
    harness.start()

    actions = harness.handle(ev.DrainOrdered(D0, moves=True, produced_tokens={A: 60}))

    assert only(actions, act.Recovered).option is Option.RESTORE


def test_a_stream_without_a_token_has_no_rows() -> None:
    harness = RowsHarness("d0", "d2")
    harness.serve("agent-n0", region("d0"), region("d2"))
    harness.decoding("A", 100, resumed=False)

    assert only(harness.lose("d0"), act.Recovered).option is not Option.RESTORE


def test_rows_can_be_loaded_where_they_mean_the_same_and_their_agent_is_reached() -> None:
    harness = RowsHarness("d0", "d1", "d2")
    members = harness.policy.members

    def loads(target: InstanceId, holder: InstanceId) -> bool:
        return harness.policy.loads_rows_of(members[target], members[holder])

    assert not loads(D2, D0)
    harness.serve("agent-n0", region("d0"), region("d2"), others=False)
    harness.serve("agent-n1", region("d1"))
    assert (loads(D2, D0), loads(D1, D0), loads(D0, D1)) == (True, False, True)
    harness.serve("agent-n0", region("d0"), region("d2", OTHER))
    assert (loads(D2, D0), loads(D1, D0), loads(D1, D2)) == (False, True, False)


class Ring(RowsHarness):
    """Three nodes with a server each; each agent copies the rows of the node before its own."""

    def __init__(self) -> None:
        super().__init__(*D, backup=REMOTE)
        self.agents("n2")
        for number in range(3):
            self.report(number)

    def node_of(self, name: str) -> NodeId:
        return NodeId(f"n{name[1:]}")

    def report(self, number: int, share: float = 1.0) -> None:
        copies = copied(f"n{(number - 1) % 3}", share=share)
        self.serve(f"agent-n{number}", region(f"d{number}"), copies=copies)

    def moved(self, target: InstanceId) -> act.Plan:
        """The plan of a stream that `d0` loses, where no other server than this is left."""
        for other in {*D[1:]} - {target}:
            self.lose(other)
        return only(self.lose("d0", A=60), act.Start).plan


def run(holder: InstanceId, pages: int = 9, first: int = 0) -> act.PageRange:
    return act.PageRange(holder, first, pages, 1)


@pytest.mark.parametrize("target", D[1:])
def test_a_restore_asks_the_dead_nodes_agent_first_and_then_those_that_copy_its_rows(
    target: InstanceId,
) -> None:
    """None that copies only rows of other nodes, be it that of the target's own."""
    ring = Ring()
    ring.start()

    plan = ring.moved(target)

    assert (plan.decode, plan.asked) == (target, (AGENT_0, AGENT_1))
    assert plan.runs == (run(AGENT_1 if target == D1 else AGENT_0),)


@pytest.mark.parametrize("target", D[1:])
def test_behind_the_loss_of_a_node_its_successor_is_asked(target: InstanceId) -> None:
    ring = Ring()
    ring.start()
    ring.handle(ev.HolderLost(AGENT_0, 1, "killed"))

    plan = ring.moved(target)

    assert (plan.decode, plan.asked, plan.runs) == (target, (AGENT_1,), (run(AGENT_1),))


def test_of_copies_that_are_not_complete_a_part_is_expected() -> None:
    """The rest is loaded from the agent that has all rows."""
    ring = Ring()
    ring.report(1, share=0.5)
    ring.start()

    plan = ring.moved(D1)

    assert plan.asked == (AGENT_0, AGENT_1)
    assert plan.runs in ((run(AGENT_1, 4), run(AGENT_0, 5, 4)), (run(AGENT_0),))


def test_an_agent_that_does_not_say_whose_rows_it_copies_has_its_own_alone() -> None:
    """One of a former version."""
    ring = Ring()
    former = msgspec.json.decode(
        msgspec.json.encode({"to_other_nodes": True, "copies": [SPACE]}), type=RowsReport
    )
    ring.handle(ev.CheckpointsReported(AGENT_1, 1, 0, 0, {}, former))
    ring.start()

    assert ring.moved(D2).asked == (AGENT_0,)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"node": "n" * 129}, id="a name without end"),
        pytest.param({"node": ""}, id="no name"),
        pytest.param({"share": 1.1}, id="more than all"),
        pytest.param({"namespace": "short"}, id="no namespace"),
        pytest.param(None, id="too many"),
    ],
)
def test_a_report_of_copies_has_bounds(wrong: dict[str, Any] | None) -> None:
    right = {"node": "n0", "namespace": SPACE, "share": 1.0}
    reported = [right] * 65 if wrong is None else [right | wrong]

    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"copied": reported}, RowsReport)


EXPECTED_TOKENS = 9 * GEOMETRY.page_size_tokens


def count(harness: RowsHarness, loaded_tokens: int) -> act.RowsLoaded:
    harness.now_s += 0.1
    harness.handle(ev.StreamResumed(A, 2))
    return only(harness.handle(ev.RowsCounted(A, 2, loaded_tokens)), act.RowsLoaded)


@pytest.mark.parametrize(
    ("loaded_tokens", "option"),
    [(0, Option.RECOMPUTE), (71, Option.RECOMPUTE), (72, Option.RESTORE), (144, Option.RESTORE)],
)
def test_a_restore_is_booked_as_what_it_was(loaded_tokens: int, option: Option) -> None:
    """One that has loaded less than half was a recompute, and is compared with that prediction."""
    ring = Ring()
    ring.start()
    asked = ring.moved(D2).asked
    assert ring.policy.state.spread.events == 1.0

    record = count(ring, loaded_tokens)

    wanted = act.RowsLoaded(A, 2, option, loaded_tokens, EXPECTED_TOKENS, asked)
    assert record == wanted
    assert ring.policy.state.spread.events > 1.0


def test_a_count_is_booked_once_and_also_behind_the_streams_end() -> None:
    ring = Ring()
    ring.start()
    ring.moved(D2)
    ring.handle(ev.StreamResumed(A, 2))
    ring.handle(ev.StreamEnded(A, 2))

    assert only(ring.handle(ev.RowsCounted(A, 2, 144)), act.RowsLoaded).option is Option.RESTORE
    assert ring.handle(ev.RowsCounted(A, 2, 144)) == []


@pytest.mark.parametrize(("loaded_tokens", "option"), [(0, "recompute"), (144, "restore")])
def test_agents_that_had_nothing_are_not_asked_again_until_they_report(
    loaded_tokens: int, option: str
) -> None:
    ring = Ring()
    ring.start()
    ring.moved(D2)
    count(ring, loaded_tokens)
    ring.up(D0, epoch=2)

    ring.decoding("B", 100)
    then = only(ring.lose(D0, epoch=2, B=60), act.Recovered).option
    ring.up(D0, epoch=3)
    ring.report(1, share=0.9)
    ring.now_s += 11  # It does not die at once again and again.
    assert ring.decoding("C", 100).plan.decode == D0
    plan = only(ring.lose(D0, epoch=3, C=60), act.Start).plan

    assert then.value == option
    assert plan.asked == ((AGENT_1,) if loaded_tokens == 0 else (AGENT_0, AGENT_1))


def test_a_waiting_stream_loses_the_rows_that_were_not_there() -> None:
    ring = Ring()
    ring.start()
    ring.moved(D2)
    ring.policy.streams[A].produced_tokens = 60
    waiting = ring.policy.streams[A]
    assert {*waiting.checkpoints} == {AGENT_0, AGENT_1}

    ring.policy.state.restored[StreamId("B"), 2] = RestoredRows(
        *((AGENT_0, AGENT_1), frozenset({D0}), EXPECTED_TOKENS, 0),
        *(Predicted(0.1, 0.1, 0.1), 0.1, 0.1),
    )
    ring.handle(ev.RowsCounted(StreamId("B"), 2, 0))

    assert waiting.checkpoints == {}


def test_a_short_history_says_nothing_about_an_agents_rows() -> None:
    """Rows of the last three steps may be missing everywhere."""
    ring = Ring()
    for number in range(3):
        own = msgspec.structs.replace(region(f"d{number}"), row_tokens=48)
        ring.serve(f"agent-n{number}", own, copies=copied(f"n{(number - 1) % 3}"))
    ring.start()
    ring.moved(D2)

    assert count(ring, 0).option is Option.RECOMPUTE
    assert not any(agent.doubted for agent in ring.policy.state.view.agents.values())


def test_another_proxy_is_not_told_of_rows() -> None:
    """It knows by its own reports whose rows agents have, and would take them for a checkpoint."""
    ring = Ring()
    ring.start()
    ring.moved(D2)

    assert ring.policy.streams[A].checkpoints
    assert ring.policy.kept(A) == ()


def test_incidents_show_a_restore_that_was_none() -> None:
    ring, found = Ring(), Incidents(100)
    ring.start()
    ring.moved(D2)
    losses = ev.InstanceLost(D0, 1, "killed", {A: 60})
    found.note(0.0, None, losses, ring.actions)
    resumed = ev.StreamResumed(A, 2, gap_s=0.3)
    found.note(0.3, None, resumed, ring.handle(resumed))
    counted = ev.RowsCounted(A, 2, 0)
    found.note(0.9, None, counted, ring.handle(counted))

    (incident,) = found.entries
    (decision,) = incident.victims[A].decisions
    assert "; 1 restore loaded less than half; " in sentence(incident)
    assert decision.option == "recompute"
    assert decision.way == ("recompute at d2: 0 of 144 tokens were loaded from agent-n0, agent-n1")
