"""Bytes that planners have ranks read from the host, and copy between them, after a loss (AnchorTP,
table II): nothing is moved.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from experiments.model_shapes import SHAPES, ModelShape
from kvrs_engine.elastic import cmm, on_demand
from kvrs_engine.elastic.layouts import uneven
from kvrs_engine.elastic.plans import HOST, plan
from kvrs_engine.elastic.units import UnitKind, Units
from kvrs_testkit.layouts import even
from kvrs_testkit.planned import bytes_by_kind, host_bytes_by_rank

# Qwen3-30B-A3B, from its config.json on the Hugging Face hub.
_QWEN3_30B = ModelShape(48, 2048, 32, 4, 128, 768, 151936, experts=128)
MODELS = {
    "Mixtral-8x22B": SHAPES["mistralai/Mixtral-8x22B-v0.1"].units(),
    "Qwen3-30B-A3B": _QWEN3_30B.units(),
}
CASES = (
    ("Mixtral-8x22B", 8, 7),
    ("Mixtral-8x22B", 8, 6),
    ("Qwen3-30B-A3B", 4, 3),
    ("Qwen3-30B-A3B", 4, 2),
)


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes from the host, those of the rank that reads most, and bytes between ranks."""

    host: int
    busiest: int
    peer: int


def by_interval(units: Units, ranks: int, dead: set[int], *, copies: bool, keeps: bool) -> Counted:
    """AnchorTP's planner and its two baselines, over all bytes as one interval. `keeps`: a rank
    uses what it has; `copies`: and what others have.
    """
    parts = cmm.even_parts(units.total_bytes, ranks)
    shards = [cmm.Shard(rank, *part) for rank, part in enumerate(parts)]
    left = [rank for rank in range(ranks) if rank not in dead]
    read: Counter[int] = Counter()
    peer = 0
    tasks = cmm.plan_interval(shards, dead, left)
    for task in tasks:
        if task.source == task.target and keeps:
            continue
        if task.source != HOST and copies:
            peer += task.bytes
        else:
            read[task.target] += task.bytes
    if copies:
        assert read.total() == cmm.least_reload_bytes(shards, dead, left), "Eq. (1)"
    return Counted(read.total(), max(read.values()), peer)


def by_units(units: Units, ranks: int, dead: set[int]) -> Counted:
    """RaidServe's weights on demand, in whole units."""
    spread = len(units.attention_bytes) % ranks
    start = uneven(units, even(units, ranks).stages) if spread else even(units, ranks)
    after = on_demand.reshaped(start, units, on_demand.survivors(start, sorted(dead)))
    found = plan(start, after, units, dead)
    assert bytes_by_kind(found)[UnitKind.MLP][1] == 0, "a tile goes from rank to rank"
    lost = set().union(*(start.held(rank) for rank in dead))
    kept = set().union(*(start.held(rank) for rank in after.ranks))
    assert found.host_bytes == sum(map(units.bytes_of, lost - kept)), "Eq. (1), in units"
    busiest = max(host_bytes_by_rank(found).values())
    return Counted(found.host_bytes, busiest, found.peer_bytes)


PLANNERS: dict[str, Callable[[Units, int, set[int]], Counted]] = {
    "full reload": partial(by_interval, copies=False, keeps=False),
    "greedy": partial(by_interval, copies=False, keeps=True),
    "cmm": partial(by_interval, copies=True, keeps=True),
    "on demand": by_units,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A planner asked for every loss of that many ranks."""

    model: str
    ranks: int
    left: int
    planner: str
    counted: list[Counted]


def cases() -> Iterator[Case]:
    for model, ranks, left in CASES:
        units = MODELS[model]
        losses = [set(dead) for dead in combinations(range(ranks), ranks - left)]
        for planner, count in PLANNERS.items():
            # On demand every loss costs the same but for the place of the ragged last tile.
            asked = losses[:2] if planner == "on demand" else losses
            yield Case(model, ranks, left, planner, [count(units, ranks, dead) for dead in asked])


def measure() -> dict[str, tuple[int, int]]:
    """By model, ranks and planner: the most of all losses from the host, and between ranks."""
    return {
        f"{each.model}, {each.ranks} to {each.left}, {each.planner}": (
            max(one.host for one in each.counted),
            max(one.peer for one in each.counted),
        )
        for each in cases()
    }
