"""The lifecycle table is total, and exactly the moves that are drawn in it happen."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import fields

from kvrs.config.policy import PolicyName
from kvrs.core import ledger, recovery
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.lifecycle import (
    LEADS_TO,
    MOVES,
    TABLE,
    Ignored,
    Stage,
    Step,
    StreamEvent,
)
from kvrs.core.model.streams import AttemptState, RecoveryState, Stream
from kvrs.core.recovery import RecoveryPolicy
from kvrs.core.state import State
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, of
from tests.core.recorded_incident import Rough

CORE = Path(__file__).parent.parent.parent / "kvrs" / "core"
A, B, D1 = StreamId("A"), StreamId("B"), InstanceId("d1")
STAGES = (None, *Stage)


def test_the_table_has_a_cell_for_every_event_in_every_stage() -> None:
    """Nothing is left to chance: a step, a rule by which the event is ignored, or never."""
    assert set(TABLE) == set(get_args(StreamEvent))
    assert all(tuple(row) == STAGES for row in TABLE.values())


def test_every_step_is_drawn_and_carried_out_by_a_method() -> None:
    """No step that no event leads to, and none without code."""
    drawn = {cell for row in TABLE.values() for cell in row.values() if isinstance(cell, Step)}

    assert drawn == set(Step)
    assert set(recovery.STEPS) == set(Step)
    assert set(LEADS_TO) <= set(Step)


def test_every_step_and_every_move_of_the_table_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Impossible steps are not drawn; one that happens and is not drawn is an assertion."""
    taken: Counter[tuple[type[StreamEvent], Stage | None]] = Counter()
    moves: Counter[tuple[Stage | None, Stage | None]] = Counter()
    handle, apply = RecoveryPolicy.handle, recovery.apply
    enter, admit, forget = ledger._enter, Stream.admit, ledger.forget

    def count_event(self: RecoveryPolicy, event: ev.Event, now_s: float) -> list[act.Action]:
        if isinstance(event, ev.OfStream):
            stream = self.streams.get(event.stream)
            taken[type(event), None if stream is None else stream.stage] += 1
        return handle(self, event, now_s)

    def count_step(state: State, stream_id: StreamId, event: StreamEvent, now_s: float) -> None:
        taken[type(event), state.streams[stream_id].stage] += 1
        apply(state, stream_id, event, now_s)

    def count_enter(state: State, stream: Stream, stage: Stage, *member: Any) -> None:
        before = stream.stage
        enter(state, stream, stage, *member)
        moves[before, stage] += before is not stage

    def count_admit(self: Stream, *facts: Any) -> None:
        moves[None, self.stage] += 1
        admit(self, *facts)

    def count_forget(state: State, stream: Stream) -> None:
        moves[stream.stage, None] += 1
        forget(state, stream)

    monkeypatch.setattr(RecoveryPolicy, "handle", count_event)
    monkeypatch.setattr(recovery, "apply", count_step)
    monkeypatch.setattr(ledger, "_enter", count_enter)
    monkeypatch.setattr(Stream, "admit", count_admit)
    monkeypatch.setattr(ledger, "forget", count_forget)

    for seed in range(40):
        Rough(seed).run(300)
    expiring = at(Stage.DECODE)
    expiring.lose("d0", A=1)
    expiring.handle(ev.TimerFired(), at_s=100.0)
    at(Stage.WAITING).handle(ev.AttemptFailed(A, 1, InstanceId("d0"), "reset", 1))

    assert {move for move, times in moves.items() if times} == MOVES
    drawn = {
        (event, stage)
        for event, row in TABLE.items()
        for stage, cell in row.items()
        if isinstance(cell, Step)
    }
    assert drawn <= set(taken)


def at(stage: Stage | None) -> PolicyHarness:
    """A policy whose stream A is in this stage, after a first attempt where there was one."""
    harness = PolicyHarness("p0", "d0", "p1", name=PolicyName.ALWAYS_MIGRATE, slots_max=1)
    if stage is None:
        return harness
    if stage is Stage.PREFILL:
        harness.handle(ev.StreamArrived(A, 100))
    else:
        if stage is Stage.QUEUED:
            harness.decoding("B")
        harness.decoding("A")
    if stage is Stage.WAITING:
        harness.lose("d0", A=1)
    else:
        harness.handle(instance_up("d1"))
    if stage is Stage.QUEUED:
        harness.lose("d0", A=1, B=1)
    return harness


def stage_of(harness: PolicyHarness) -> Stage | None:
    policy: Any = harness.policy
    stream = policy.state.streams.get(A)
    return None if stream is None else stream.stage


Report = (
    ev.PrefillDone
    | ev.WholeAsked
    | ev.StreamResumed
    | ev.AttemptFailed
    | ev.SlotDenied
    | ev.StreamEnded
)


def reports(attempt: int) -> Iterator[Report]:
    """Everything that can be reported of an attempt."""
    yield ev.PrefillDone(A, attempt, 100)
    yield ev.WholeAsked(A, attempt)
    yield ev.StreamResumed(A, attempt)
    yield ev.AttemptFailed(A, attempt, D1, "late", 500)
    yield ev.SlotDenied(A, attempt, D1, 1.0)
    yield ev.StreamEnded(A, attempt)


@pytest.mark.parametrize("stage", STAGES)
def test_ignored_events_change_nothing(stage: Stage | None) -> None:
    """Each by the rule that the table names."""
    events: list[Report | ev.StreamArrived | ev.StreamAdopted] = [*reports(attempt=1)]
    for event in [*events, ev.StreamArrived(A, 100), ev.StreamAdopted(A, 100, 5)]:
        if isinstance(TABLE[type(event)][stage], Ignored):
            harness = at(stage)
            before = harness.policy.snapshot()

            assert stage_of(harness) is stage
            assert harness.handle(event) == []
            assert harness.policy.snapshot() == before


@pytest.mark.parametrize("stage", Stage)
def test_reports_of_an_older_attempt_change_nothing_in_any_stage(stage: Stage) -> None:
    """Only the current attempt can move its stream (`Ignored.LATE`)."""
    harness = at(stage)
    started = [start for start in of(harness.actions, act.Start) if start.stream == A]
    before = harness.policy.snapshot()

    for event in reports(started[-1].attempt - 1):
        assert harness.handle(event) == []

    assert harness.policy.snapshot() == before


def assignments() -> Iterator[tuple[str, str]]:
    """Module and name of every attribute that the policy's code assigns or augments, but for what
    other classes keep of their own. `control.py` and `fleet/` write records of theirs.
    """
    for path in sorted(CORE.rglob("*.py")):
        if path.name == "control.py" or path.parent.name == "fleet":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    is_record = path.name == "streams.py"
                    own = not is_record and ast.unparse(each).startswith("self.")
                    if isinstance(each, ast.Attribute) and not own:
                        yield path.name, each.attr


def test_a_stage_is_set_at_one_place() -> None:
    """`ledger._enter`, which asserts that the table allows the move."""
    assert [path for path, name in assignments() if name == "stage"] == ["ledger.py"]


@pytest.mark.parametrize(
    ("record", "writer"), [(AttemptState, "ledger.py"), (RecoveryState, "streams.py")]
)
def test_each_record_of_a_stream_is_written_from_one_module(
    record: type[msgspec.Struct], writer: str
) -> None:
    """The cause of a value is found in one file."""
    names = {field.name for field in fields(record)}

    assert {path for path, name in assignments() if name in names} == {writer}


@pytest.mark.parametrize("stage", [Stage.WAITING, Stage.QUEUED])
@pytest.mark.parametrize("kind", [ev.PrefillDone, ev.StreamResumed, ev.SlotDenied])
def test_progress_of_an_attempt_that_is_over_is_late(stage: Stage, kind: type) -> None:
    """Its number is still the stream's, but nothing runs: the recovery goes on as without it."""
    harness, without = at(stage), at(stage)

    assert [harness.handle(event) for event in reports(attempt=1) if isinstance(event, kind)] == [
        []
    ]

    up = instance_up("d2")
    assert harness.policy.snapshot() == without.policy.snapshot()
    assert harness.handle(up) == without.handle(up)


@pytest.mark.parametrize("kind", [ev.StreamResumed, ev.SlotDenied])
def test_nothing_comes_of_an_attempt_before_its_prefill_is_done(kind: type) -> None:
    """A report that overtakes `PrefillDone` is ignored."""
    harness = at(Stage.PREFILL)
    before = harness.policy.snapshot()

    assert [harness.handle(event) for event in reports(attempt=1) if isinstance(event, kind)] == [
        []
    ]

    assert harness.policy.snapshot() == before
