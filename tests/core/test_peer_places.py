"""Streams whose pages go to another instance: which one, what is known of it, and recovery."""

from typing import Any

import pytest

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Role
from tests.core.policy_harness import GEOMETRY, PolicyHarness, instance_up, load, only

A = StreamId("A")
D1, D2, D3 = (InstanceId(f"d{n}") for n in (1, 2, 3))


def cluster(*names: str, busy: tuple[str, ...] = ()) -> PolicyHarness:
    """Streams go to the one that is not busy: other proxies have streams at the others."""
    harness = PolicyHarness("p0", *names, backup=BackupSettings(mode=BackupMode.PEER))
    for name in busy:
        harness.handle(load(name, streams=9))
    return harness


def replicas(name: InstanceId, pages: int, epoch: int = 1) -> ev.CheckpointsReported:
    return ev.CheckpointsReported(name, epoch, 0, 0, {A: pages})


def sources(start: act.Start) -> list[InstanceId]:
    return [run.holder for run in start.plan.runs]


def places(start: act.Start) -> list[InstanceId]:
    return [place.holder for place in start.plan.places]


@pytest.mark.parametrize(
    ("names", "serving", "expected"),
    [
        (("d1", "d2", "d3"), "d1", D2),
        (("d1", "d2", "d3"), "d2", D3),
        (("d1", "d2", "d3"), "d3", D1),
        (("d1", "x1", "d2"), "d1", D2),
    ],
)
def test_pages_go_to_the_next_decode_instance_of_another_node(
    names: tuple[str, ...], serving: str, expected: InstanceId
) -> None:
    names = tuple(name.replace("x", "b") for name in names)
    harness = cluster(*names, busy=tuple(name for name in names if name != serving))
    start = harness.decoding("A")
    assert start.plan.decode == serving
    assert places(start) == [expected]


def test_one_of_the_own_node_is_taken_where_there_is_no_other() -> None:
    harness = cluster("d1", "b1", busy=("b1",))
    assert places(harness.decoding("A")) == ["b1"]


@pytest.mark.parametrize(
    "other",
    [{"fingerprint": "another model"}, {"capabilities": []}, {"role": Role.PREFILL}],
)
def test_no_page_goes_where_it_cannot_be_used(other: dict[str, Any]) -> None:
    harness = cluster("d1")
    harness.handle(instance_up("d2", **other))
    harness.handle(load("d2", streams=9))
    start = harness.decoding("A")
    assert places(start) == []
    assert harness.policy.snapshot()["unprotected"] == {A: "no other decode instance is up"}


def test_a_stream_goes_on_where_its_replica_is() -> None:
    harness = cluster("d1", "d2", "d3", busy=("d2", "d3"))
    harness.decoding("A", 400)
    harness.handle(replicas(D2, 20))
    assert harness.policy.snapshot()["checkpoints"][A]["pages"] == {D2: 20}
    for name in (D2, D3):
        harness.handle(load(name))

    before = len(harness.actions)
    harness.lose("d1", A=30)

    again, said = (
        only(harness.actions[before:], act.Start),
        only(harness.actions[before:], act.Recovered),
    )
    assert again.plan.decode == D2
    assert said.option is Option.REUSE
    assert places(again) == [D3]


def test_the_next_replica_is_begun_where_most_of_it_is() -> None:
    harness = cluster("d1", "d2", "d3", busy=("d2", "d3"))
    harness.decoding("A", 400)
    harness.handle(replicas(D3, 12))
    harness.handle(load("d2"))
    harness.handle(load("d3", queue_s=9.0, streams=9))
    before = len(harness.actions)
    harness.lose("d1", A=30)
    again = only(harness.actions[before:], act.Start)
    assert (again.plan.decode, places(again)) == (D2, [D3])


def assert_recovered_without_d2(harness: PolicyHarness, to: str) -> None:
    """d1 is lost, and its stream goes where there is room, with nothing of d2."""
    harness.handle(load(to))
    before = len(harness.actions)
    harness.lose("d1", A=30)
    assert D2 not in sources(only(harness.actions[before:], act.Start))
    assert only(harness.actions[before:], act.Recovered).option is not Option.REUSE


@pytest.mark.parametrize("event", [replicas(D2, 0), replicas(D2, 9, epoch=7)])
def test_pages_that_were_given_up_are_not_counted_on(event: ev.CheckpointsReported) -> None:
    harness = cluster("d1", "d2", busy=("d2",))
    harness.decoding("A", 400)
    if event.epoch == 1:
        harness.handle(replicas(D2, 20))
    harness.handle(event)
    assert harness.policy.snapshot()["checkpoints"][A]["pages"] == {}
    assert_recovered_without_d2(harness, "d2")


def test_the_instance_that_computes_a_stream_protects_nothing_of_it() -> None:
    harness = cluster("d1", "d2", busy=("d2",))
    harness.decoding("A", 400)
    harness.handle(replicas(D1, 3))
    assert harness.policy.snapshot()["checkpoints"][A]["pages"] == {}


def test_replicas_end_with_their_instance() -> None:
    harness = cluster("d1", "d2", "d3", busy=("d2", "d3"))
    harness.decoding("A", 400)
    harness.handle(replicas(D2, 20))
    harness.lose("d2")
    assert harness.policy.snapshot()["checkpoints"][A]["pages"] == {}
    assert_recovered_without_d2(harness, "d3")


def test_room_is_asked_for_all_that_the_stream_may_come_to() -> None:
    harness = cluster("d1", "d2", busy=("d2",))
    start = only(harness.handle(ev.StreamArrived(A, 100, most_tokens=330)), act.Start)
    assert start.plan.places == (act.Place(D2, 20 * GEOMETRY.page_bytes),)
