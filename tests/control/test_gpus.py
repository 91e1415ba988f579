from dataclasses import dataclass
from typing import Any, cast

from kvrs.control.gpus import Gpus
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.gpus import GpuHealth, GpuState

N0 = NodeId("n0")


@dataclass
class Info:
    gpus: list[str] | None


@dataclass
class Seen:
    """What the proxy knows of an instance, as far as this is concerned."""

    id: InstanceId
    node: NodeId
    info: Info | None


def gpus_of(**instances: list[str] | None) -> tuple[Gpus, dict[str, Seen]]:
    known = {name: Seen(InstanceId(name), N0, Info(gpus)) for name, gpus in instances.items()}
    return Gpus(cast(Any, known)), known


def health(uuid: str, state: GpuState, reason: str = "") -> GpuHealth:
    return GpuHealth(uuid, 0, state, reason, 0.0)


def test_an_instance_is_as_well_as_the_worst_of_its_own_gpus() -> None:
    """One that runs on a CPU has none; where the GPU is unknown, any of its node may be
    it.
    """
    gpus, _ = gpus_of(both=["a", "b"], other=["c"], cpu=[], unknown=None)

    judged = gpus.seen(
        N0,
        [
            health("a", GpuState.DEGRADED, "warm"),
            health("b", GpuState.FAILING, "xid 79"),
            health("c", GpuState.HEALTHY),
        ],
    )

    assert judged == [("both", GpuState.FAILING, "xid 79"), ("unknown", GpuState.FAILING, "xid 79")]


def test_a_judgement_is_told_once_and_its_end_too() -> None:
    """Gossip is looked at every second."""
    gpus, known = gpus_of(late=["a"])
    info, known["late"].info = known["late"].info, None
    before = [gpus.seen(N0, [health("a", GpuState.FAILING, "lost")]) for _ in range(2)]
    known["late"].info = info
    after = [
        gpus.seen(N0, [health("a", state, "lost" if state is GpuState.FAILING else "")])
        for state in (GpuState.FAILING, GpuState.FAILING, GpuState.HEALTHY, GpuState.HEALTHY)
    ]

    assert before == [[], []]
    assert after == [
        [("late", GpuState.FAILING, "lost")],
        [],
        [("late", GpuState.HEALTHY, "")],
        [],
    ]
