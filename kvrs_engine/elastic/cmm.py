"""Continuous Minimal Migration: AnchorTP's planner (Algorithm 1), over one interval of bytes, and
the layout that it stands for among units.

Every target has an even part of the interval, in order. What a living rank has of it is copied from
there, unless it is the target's own; the rest is reloaded. By Eq. (1) no plan for these targets
reloads less.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvrs_engine.elastic.layouts import Layout, Stage, uneven
from kvrs_engine.elastic.plans import HOST
from kvrs_engine.elastic.units import Units


@dataclass(frozen=True, slots=True)
class Shard:
    """Bytes `[start, stop)` that a rank has."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Task:
    """Bytes `[start, stop)` for a rank: kept where source and target are one, else copied from a
    rank or the host.
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
    """Algorithm 1. `shards`: what each rank has, living or not."""
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
    """Eq. (1): all bytes, without those that living ranks and targets have in common; shards of
    living ranks are disjoint.
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


def reshaped(before: Layout, units: Units, ranks: Sequence[Sequence[int]]) -> Layout:
    """The layout of even contiguous shares for the ranks of each stage."""
    stages = [
        Stage(stage.first, stage.last, tuple(sorted(group)))
        for stage, group in zip(before.stages, ranks, strict=True)
    ]
    return uneven(units, stages, split=before.split, number=before.number + 1)


def _end(shards: Sequence[Shard]) -> int:
    return max(shard.stop for shard in shards)
