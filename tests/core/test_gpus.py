from dataclasses import dataclass, field
from typing import Any, cast

from msgspec.structs import replace

from kvrs.core.fleet.drains import Gpus, RankDue
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import GpuHealth, GpuState, RankInfo

N0 = NodeId("n0")


@dataclass
class Info:
    gpus: list[str] | None
    ranks: list[RankInfo] = field(default_factory=list)


@dataclass
class Seen:
    """An instance as the proxy knows it, reduced to the fields used here."""

    id: InstanceId
    node: NodeId
    info: Info
    was_up: bool = True


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
    known["late"].was_up = False
    before = [gpus.seen(N0, [health("a", GpuState.FAILING, "lost")]) for _ in range(2)]
    known["late"].was_up = True
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


def ranks_on(*gpus: str) -> Info:
    ranks = [RankInfo(at, 0, 100 + at, N0, 4, [at], [gpu]) for at, gpu in enumerate(gpus)]
    return Info(list(gpus), ranks)


def test_a_rank_leaves_its_failing_gpu_and_comes_back_when_that_has_recovered() -> None:
    """The instance as a whole is not judged by it: it goes on with the others."""
    gpus, known = gpus_of(d0=[], d1=["c"])
    known["d0"].info = ranks_on("a", "b")
    d0 = InstanceId("d0")

    def seen(state: GpuState) -> list[RankDue]:
        for _ in range(2):  # Gossip is looked at again before anything is answered.
            assert gpus.seen(N0, [health("a", GpuState.HEALTHY), health("b", state)]) == []
        return gpus.take_due()

    (leaving,) = seen(GpuState.FAILING)
    assert leaving == RankDue(d0, "b", 1, leaves=True)
    gpus.answered(leaving, refused=False)
    assert seen(GpuState.FAILING) == []
    known["d0"].info = ranks_on("a")
    assert seen(GpuState.FAILING) == []
    (back,) = seen(GpuState.HEALTHY)
    assert back == replace(leaving, leaves=False)
    gpus.answered(back, refused=False)
    assert seen(GpuState.HEALTHY) == []


def test_where_a_rank_cannot_leave_the_instance_is_judged() -> None:
    """Until something of its ranks changes: then it is asked again."""
    gpus, known = gpus_of(d0=[])
    known["d0"].info = ranks_on("a", "b")
    failing = [health("b", GpuState.FAILING, "xid 79")]
    first = gpus.seen(N0, failing)
    (leaving,) = gpus.take_due()

    gpus.answered(leaving, refused=True)
    judged = gpus.seen(N0, failing)
    due = gpus.take_due()
    known["d0"].info = ranks_on("a", "b")
    again = gpus.seen(N0, failing)

    assert (first, due) == ([], [])
    assert judged == [("d0", GpuState.FAILING, "xid 79")]
    assert gpus.take_due() == [leaving]
    assert again == [("d0", GpuState.HEALTHY, "")]


def test_the_gpus_of_a_node_have_a_name_if_all_are_of_one_kind() -> None:
    """By what its agent has said last."""
    gpus, _ = gpus_of(one=None)
    names = {N0: gpus.name_of(N0)}

    for name, found in (("same", ["H100", "H100"]), ("mixed", ["H100", "L4"]), ("older", ["", ""])):
        gpus.seen(N0, [replace(health("a", GpuState.HEALTHY), name=each) for each in found])
        names[NodeId(name)] = gpus.name_of(N0)

    assert names == {"n0": "", "same": "H100", "mixed": "", "older": ""}
