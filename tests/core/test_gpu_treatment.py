"""An instance is left before its GPU takes it along."""

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.streams import Stream
from kvrs.core.options.recompute import prefill_for
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import GpuState
from tests.core.policy_harness import PolicyHarness, instance_up, member, of, only

S = StreamId("s")


def judged(name: str, state: GpuState, **produced: int) -> ev.GpuJudged:
    return ev.GpuJudged(
        InstanceId(name), state, "xid 79", {StreamId(s): n for s, n in produced.items()}
    )


def decoders_of(harness: PolicyHarness, count: int) -> set[str]:
    """Where new streams go."""
    names = [StreamId(f"new{len(harness.actions)}-{n}") for n in range(count)]
    return {
        only(harness.handle(ev.StreamArrived(name, 10)), act.Start).plan.decode for name in names
    }


def test_an_irreplaceable_instance_serves_on() -> None:
    """A failing GPU may last for hours; without an instance no stream is served at all."""
    harness = PolicyHarness("p0", "d0")
    harness.decoding("s")

    actions = harness.handle(judged("d0", GpuState.FAILING, s=7)) + harness.handle(
        judged("p0", GpuState.FAILING)
    )
    alone = decoders_of(harness, 2)
    harness.handle(instance_up("p1"))
    harness.handle(instance_up("d1"))

    assert of(actions, act.Start) == []
    assert of(actions, act.Halt) == []
    assert (alone, decoders_of(harness, 4)) == ({"d0"}, {"d1"})


def test_a_new_process_on_the_same_gpu_is_drained_too() -> None:
    """The engine is new, the board is not."""
    harness = PolicyHarness("p0", "d0", "p1", "d1")
    harness.handle(judged("d0", GpuState.FAILING))

    harness.lose("d0")
    harness.handle(instance_up("d0", epoch=2))
    drained = decoders_of(harness, 4)
    harness.handle(judged("d0", GpuState.HEALTHY))

    assert drained == {"d1"}
    assert "d0" in decoders_of(harness, 6)


def test_a_history_is_not_computed_on_a_failing_gpu() -> None:
    """A recovery that needs a prefill takes a healthy instance, though the target's own pair is
    nearer.
    """
    view, stream = ClusterView(1e9), Stream(S, 0, 100, 0.0, None)
    for name in ("p0", "p1", "d1"):
        view.add(member(name))
    members = view.members

    well = prefill_for(view, members[InstanceId("d1")], stream)
    members[InstanceId("p1")].gpu_degraded = True
    view.update(members[InstanceId("p1")])

    assert (well, prefill_for(view, members[InstanceId("d1")], stream)) == (
        members[InstanceId("p1")],
        members[InstanceId("p0")],
    )
