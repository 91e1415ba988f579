"""Continuous Minimal Migration, AnchorTP's planner (Algorithm 1): a plan over one interval of
bytes, and the corresponding layout of units.

Every target gets an even part of the interval, in order. A target keeps its own bytes, copies bytes
that another living rank has, and reloads the rest. By Eq. (1) no plan for these targets reloads
less.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kvrs_engine.elastic.layouts import SPREAD, Layout, Stage, hybrid, uneven
from kvrs_engine.elastic.on_demand import turns_after
from kvrs_engine.elastic.plans import HOST
from kvrs_engine.elastic.units import Units


@dataclass(frozen=True, slots=True)
class Shard:
    """Bytes `[start, stop)` in the memory of a rank."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Task:
    """Bytes `[start, stop)` for a target: kept if the source is the target, else copied from
    another rank or the host.
    """

    start: int
    stop: int
    source: int
    target: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


def plan_interval(
    shards: Sequence[Shard], dead: Collection[int], targets: Sequence[int]
) -> list[Task]:
    """Plan by Algorithm 1. `shards` has the bytes of all ranks, dead ones included."""
    tasks: list[Task] = []
    for target, (first, last) in zip(targets, even_parts(_end(shards), len(targets)), strict=True):
        left = [(first, last)]
        for shard in shards:
            if shard.rank in dead:
                continue
            for start, stop in list(left):
                inner = max(start, shard.start), min(stop, shard.stop)
                if inner[0] < inner[1]:
                    tasks.append(Task(*inner, shard.rank, target))
                    left.remove((start, stop))
                    left += [(start, inner[0]), (inner[1], stop)]
        tasks += (Task(start, stop, HOST, target) for start, stop in sorted(left) if start < stop)
    return tasks


def least_reload_bytes(
    shards: Sequence[Shard], dead: Collection[int], targets: Sequence[int]
) -> int:
    """Return the bytes that every plan must reload, by Eq. (1): all bytes without the overlap of
    living ranks and targets. Shards of living ranks are disjoint.
    """
    end = _end(shards)
    return end - sum(
        max(0, min(last, shard.stop) - max(first, shard.start))
        for shard in shards
        if shard.rank not in dead
        for first, last in even_parts(end, len(targets))
    )


def even_parts(end: int, count: int) -> list[tuple[int, int]]:
    return [(at * end // count, (at + 1) * end // count) for at in range(count)]


def reshaped(
    before: Layout,
    units: Units,
    ranks: Sequence[Sequence[int]],
    *,
    spread: bool = False,
    copies: bool = True,
) -> Layout:
    """Return the layout with even contiguous shares for the given ranks of each stage. A stage with
    unchanged ranks keeps its assignment. With `spread` the KV heads that cannot be divided evenly
    are spread; without `copies` the new layout has no copies of experts.
    """
    stages = [
        Stage(stage.first, stage.last, tuple(sorted(group)))
        for stage, group in zip(before.stages, ranks, strict=True)
    ]
    even = (hybrid if spread else uneven)(units, stages, split=before.split)
    attention, mlp = list(even.attention), list(even.mlp)
    left: list[tuple[tuple[int, int], ...]] = []  # Remaining copies by layer.
    for stage, old in zip(stages, before.stages, strict=True):
        for layer in stage.layers:
            if stage == old:
                attention[layer], mlp[layer] = before.attention[layer], before.mlp[layer]
            left.append(
                tuple(
                    (place, rank)
                    for place, rank in before.copies_of(layer)
                    if rank in stage.ranks and rank != mlp[layer][place]
                )
            )
    is_spread = any(SPREAD in owners for owners in attention)
    return replace(
        even,
        number=before.number + 1,
        attention=tuple(attention),
        mlp=tuple(mlp),
        vocabulary=before.vocabulary if stages[-1] == before.stages[-1] else even.vocabulary,
        turns=turns_after(before, stages) if is_spread else (),
        copies=tuple(left) if copies and any(left) else (),
    )


def _end(shards: Sequence[Shard]) -> int:
    return max(shard.stop for shard in shards)
