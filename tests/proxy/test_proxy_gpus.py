from dataclasses import dataclass
from typing import Any, cast

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.gpus import GpuHealth, GpuState
from kvrs.proxy.gpus import Gpus

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


def gpus_of(told: list[Any], **instances: list[str] | None) -> tuple[Gpus, dict[str, Seen]]:
    known = {name: Seen(InstanceId(name), N0, Info(gpus)) for name, gpus in instances.items()}
    return Gpus(cast(Any, known), lambda *judgement: told.append(judgement)), known


def health(uuid: str, state: GpuState, reason: str = "") -> GpuHealth:
    return GpuHealth(uuid, 0, state, reason, 0.0)


def test_an_instance_is_as_well_as_the_worst_of_its_own_gpus() -> None:
    """One that runs on a CPU has none; of whom nobody knows on which it runs, any of its node may be it."""
    told: list[Any] = []
    gpus, _ = gpus_of(told, both=["a", "b"], other=["c"], cpu=[], unknown=None)

    gpus.seen(
        N0, [health("a", GpuState.DEGRADED, "warm"), health("b", GpuState.FAILING, "xid 79"), health("c", GpuState.HEALTHY)]
    )

    assert told == [("both", GpuState.FAILING, "xid 79"), ("unknown", GpuState.FAILING, "xid 79")]


def test_a_judgement_is_told_once_and_its_end_too() -> None:
    """Gossip is looked at every second."""
    told: list[Any] = []
    gpus, known = gpus_of(told, late=["a"])
    info, known["late"].info = known["late"].info, None
    for _ in range(2):
        gpus.seen(N0, [health("a", GpuState.FAILING, "lost")])
    before = list(told)
    known["late"].info = info
    for state in (GpuState.FAILING, GpuState.FAILING, GpuState.HEALTHY, GpuState.HEALTHY):
        gpus.seen(N0, [health("a", state, "lost" if state is GpuState.FAILING else "")])

    assert (before, told) == ([], [("late", GpuState.FAILING, "lost"), ("late", GpuState.HEALTHY, "")])
