"""The streams of a draining instance are moved before it ends."""

import pytest

from kvrs.config.file import parse_config
from kvrs.core.configured import Configured
from kvrs.core.fleet.drains import Drains, NodeFault
from kvrs.core.fleet.known import Instances
from kvrs.core.kv_locations import is_left_at
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import GpuState
from tests.core.policy_harness import PolicyHarness, instance_up, load, of, only
from tests.core.test_gpu_treatment import decoders_of, judged
from tests.core.test_staying import reformed, reforming

S, D0, D1 = StreamId("s"), InstanceId("d0"), InstanceId("d1")


def draining(name: str, epoch: int = 1, **produced: int) -> ev.LoadReported:
    counts = {StreamId(s): n for s, n in produced.items()}
    return load(name, epoch=epoch, draining=True, produced_tokens=counts)


def test_streams_leave_an_instance_that_is_about_to_end() -> None:
    """Each in a new attempt elsewhere, and nothing new comes."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    here = harness.decoding("s").plan.decode
    there = "d1" if here == "d0" else "d0"

    actions = harness.handle(draining(here, s=7))

    halt, start, recovered = (
        only(actions, act.Halt),
        only(actions, act.Start),
        only(actions, act.Recovered),
    )
    assert (halt.stream, halt.attempt) == (S, 1)
    assert (start.stream, start.attempt, start.plan.decode) == (S, 2, there)
    assert recovered.cause == "moved: its instance is about to end"
    assert decoders_of(harness, 4) == {there}


@pytest.mark.parametrize("by", ["its process", "an operator"])
def test_what_it_has_computed_is_fetched_from_itself(by: str) -> None:
    """It has KV of everything that the client has; prefill has only that of the prompt."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    here = harness.decoding("s", prompt_tokens=400).plan.decode

    actions = harness.handle(
        draining(here, s=400) if by == "its process" else ordered(here, moves=True, s=400)
    )

    (run,) = only(actions, act.Start).plan.runs
    assert (run.holder, run.first_page, run.pages) == (here, 0, 799 // 16)
    assert only(actions, act.Recovered).option in (Option.MIGRATE, Option.SPLIT)


@pytest.mark.parametrize("missing", [0, 3])
def test_pages_that_it_has_lost_cells_of_are_not_fetched_from_it(missing: int) -> None:
    """It is drained before its re-forming has restored them."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    here = harness.decoding("s", prompt_tokens=400).plan.decode
    harness.handle(reforming(here, 0.01, missing_pages={S: missing}, page_s=0.001))

    actions = harness.handle(ordered(here, moves=True, s=400))

    holders = [run.holder for run in only(actions, act.Start).plan.runs]
    assert (here in holders) is (missing == 0)


def test_an_irreplaceable_instance_serves_until_another_comes_up() -> None:
    """Then its streams go there; better twice moved than cut off when its time is over."""
    harness = PolicyHarness("p0", "d0", "p1")
    harness.decoding("s")

    alone = harness.handle(draining("d0", s=7))
    new = decoders_of(harness, 2)
    harness.handle(instance_up("d1"))
    actions = harness.handle(draining("d0", s=9))

    assert (of(alone, act.Start), of(alone, act.Halt), new) == ([], [], {"d0"})
    assert [halt.stream for halt in of(actions, act.Halt)] == [S]
    assert next(start for start in of(actions, act.Start) if start.stream == S).plan.decode == "d1"


def test_one_that_ends_before_another_comes_up_is_drained_no_more() -> None:
    """Nothing of it is left that the next change could drain."""
    harness = PolicyHarness("p0", "d0", "p1")
    harness.handle(draining("d0"))
    harness.lose("d0")

    harness.handle(instance_up("d1"))

    assert decoders_of(harness, 2) == {"d1"}


@pytest.mark.parametrize("first", ["draining", "reforming"])
def test_an_instance_that_is_about_to_end_gets_nothing_while_another_re_forms(first: str) -> None:
    """Streams that come in that moment wait for the other one, and are not moved right away.
    Streams that run there go on, until the other one computes.
    """
    harness = PolicyHarness("p0", "d0")
    harness.decoding("s")
    news: dict[str, list[ev.Event]] = {
        "draining": [draining("d0", s=7), instance_up("d1"), reforming("d1", 0.2)],
        "reforming": [instance_up("d1"), reforming("d1", 0.2), draining("d0", s=7)],
    }
    for event in news[first]:
        assert of(harness.handle(event), act.Halt) == []

    assert decoders_of(harness, 2) == {"d1"}
    assert of(harness.handle(draining("d0", s=8)), act.Halt) == []
    harness.handle(reformed("d1"))
    assert [halt.stream for halt in of(harness.handle(draining("d0", s=9)), act.Halt)] == [S]


def test_its_successor_is_used_like_any_other() -> None:
    """The process was about to end, not the instance."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.handle(draining("d0"))

    harness.handle(instance_up("d0", epoch=2))
    harness.handle(draining("d0"))  # A late report of the process before.

    assert decoders_of(harness, 4) == {"d0", "d1"}


def test_a_healthy_gpu_does_not_end_the_draining_of_its_process() -> None:
    """Two reasons to leave it; only one of them is gone."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.handle(judged("d0", GpuState.FAILING))
    harness.handle(draining("d0"))

    harness.handle(judged("d0", GpuState.HEALTHY))

    assert decoders_of(harness, 4) == {"d1"}


@pytest.mark.parametrize("others", [True, False])
def test_a_prefill_is_handed_off_to_it_only_if_no_other_instance_decodes(others: bool) -> None:
    """The plan was made before it reported draining."""
    harness = PolicyHarness("p0", "d0", *(["p1", "d1"] if others else []))
    planned = only(harness.handle(ev.StreamArrived(S, 100)), act.Start).plan.decode
    harness.handle(draining(planned))

    actions = harness.handle(ev.PrefillDone(S, 1, 100))

    assert [start.plan.decode != planned for start in of(actions, act.Start)] == (
        [True] if others else []
    )


def test_to_be_moved_is_not_to_fail() -> None:
    """A long stream outlives any number of rolling restarts; `max_attempts` is for requests that
    break what they run on.
    """
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    here = harness.decoding("s").plan.decode

    for move in range(2, 40):
        start = only(harness.handle(draining(here, epoch=move // 2, s=7)), act.Start)
        harness.handle(ev.StreamResumed(S, start.attempt))
        harness.handle(instance_up(here, epoch=move // 2 + 1))
        here = start.plan.decode

    assert start.attempt == 39


def ordered(name: str, *, moves: bool = False, **produced: int) -> ev.DrainOrdered:
    return ev.DrainOrdered(InstanceId(name), moves, {StreamId(s): n for s, n in produced.items()})


def test_an_operators_order_keeps_new_streams_away_and_leaves_the_others() -> None:
    """Those that run there may end there, until they are to be moved."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    here = harness.decoding("s").plan.decode
    there = "d1" if here == "d0" else "d0"

    left = harness.handle(ordered(here))
    new = decoders_of(harness, 4)
    moved = harness.handle(ordered(here, moves=True, s=7))

    assert of(left, act.Halt) == []
    assert new == {there}
    assert only(moved, act.Start).plan.decode == there
    assert only(moved, act.Recovered).cause == "moved: its instance is drained"


def test_what_was_left_behind_is_known_until_the_stream_has_resumed() -> None:
    """Then its pages may be overwritten; an instance that retains the prompt still does."""
    harness = PolicyHarness("b0")
    here = harness.decoding("s", prompt_tokens=400).plan.decode
    prefilled = {each.holder: each.pages for each in harness.policy.kept(S)}
    harness.handle(instance_up("b1"))

    start = only(harness.handle(ordered(here, moves=True, s=400)), act.Start)
    left = {each.holder: each.pages for each in harness.policy.kept(S)}
    is_left = is_left_at(harness.policy.state, here)
    harness.handle(ev.StreamResumed(S, start.attempt))

    assert prefilled == {here: 400 // 16}
    assert (left[here], is_left) == (799 // 16, True)
    assert {each.holder: each.pages for each in harness.policy.kept(S)} == prefilled
    assert not is_left_at(harness.policy.state, here)


def test_a_prefill_that_ends_is_handed_off_elsewhere_than_to_a_drained_instance() -> None:
    """Its plan was made before the order."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    planned = only(harness.handle(ev.StreamArrived(S, 100)), act.Start).plan.decode
    harness.handle(ordered(planned))

    actions = harness.handle(ev.PrefillDone(S, 1, 100))

    assert only(actions, act.Start).plan.decode != planned


def test_a_fault_of_a_node_drains_until_it_is_over() -> None:
    """A worse fault brings the move forward. An order of an operator outlasts a node's fault, and
    only orders of operators are passed on to other workers.
    """
    told: list[ev.Event] = []
    config = parse_config({})
    drains = Drains(
        Instances(Configured.of(config)), lambda _: {}, lambda event, _: told.append(event)
    )
    cordoned, pressed = NodeFault("its node is cordoned", 30.0), NodeFault("pressure", 0.0)

    drains.begin(D1, 60.0, 0.0)
    for at_s, faults in enumerate([{D0: cordoned, D1: pressed}, {D0: cordoned}, {D0: pressed}]):
        drains.follow_nodes(faults, float(at_s))
    shared = drains.moves_in_s(3.0)
    drains.follow_nodes({}, 3.0)

    assert told == [
        ev.DrainOrdered(D1, False, {}),
        ev.DrainOrdered(D0, False, {}, cordoned.cause),
        ev.DrainOrdered(D0, True, {}, pressed.cause),
        ev.DrainEnded(D0),
    ]
    assert shared == {D1: 57.0}
    assert drains.describe(D1, 3.0) == {"moves_in_s": 57.0}


def test_an_operator_overrules_a_fault_of_a_node() -> None:
    """Until the node has another fault, or had none in between."""
    told: list[ev.Event] = []
    config = parse_config({})
    drains = Drains(
        Instances(Configured.of(config)), lambda _: {}, lambda event, _: told.append(event)
    )
    cordoned, pressed = NodeFault("its node is cordoned", 30.0), NodeFault("pressure", 0.0)

    drains.follow_nodes({D0: cordoned}, 0.0)
    drains.end(D0, 1.0)
    drains.follow_nodes({D0: cordoned}, 2.0)
    drains.follow_nodes({D0: cordoned}, 3.0)
    assert told == [ev.DrainOrdered(D0, False, {}, cordoned.cause), ev.DrainEnded(D0)]

    drains.follow_nodes({D0: pressed}, 4.0)
    drains.end(D0, 5.0)
    drains.follow_nodes({}, 6.0)
    drains.follow_nodes({D0: pressed}, 7.0)
    assert told[2:] == [
        ev.DrainOrdered(D0, True, {}, pressed.cause),
        ev.DrainEnded(D0),
        ev.DrainOrdered(D0, True, {}, pressed.cause),
    ]
