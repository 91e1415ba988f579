"""How often experts are chosen counts for what steps are predicted to take; copies do not follow a
popularity that turns faster than choices fade.
The counts of ranks are scripted.
"""

import os
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrs.config.cluster import ExpertSettings
from kvrs.ids import InstanceId
from kvrs_engine.elastic import on_demand
from kvrs_engine.elastic.layouts import Layout, staged, uneven
from kvrs_engine.elastic.units import Units
from kvrs_engine.engine.ranks import routed
from kvrs_engine.engine.ranks.reformer import Reformer
from kvrs_engine.engine.ranks.routed import RoutedLoads

pytestmark = pytest.mark.engine

EXPERTS, LAYERS, RANKS = 8, 3, 3
# A dense layer between two with experts, each of two parts.
UNITS = Units(LAYERS, (8,) * 4, (1 << 10,) * 2 * EXPERTS, (8,) * 4, 0, frozenset({1}), (8,) * 4, 2)
LAYOUT = uneven(UNITS, staged(LAYERS, [range(RANKS)]))
COUNTS = [[400.0, *[1.0] * (EXPERTS - 1)], [], [*[1.0] * (EXPERTS - 1), 400.0]]
INSTANCE = InstanceId("a/b")


class ScriptedMemory:
    """Tiles that ranks have counted since they began."""

    def __init__(self) -> None:
        self.tiles = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
        self.computed = torch.zeros(RANKS, dtype=torch.int64)
        self.areas = SimpleNamespace(layers=range(LAYERS), lines=dict.fromkeys(range(RANKS)))

    def count(self, by_expert: list[int]) -> None:
        self.tiles += torch.tensor(by_expert)


def loads_of() -> RoutedLoads:
    return RoutedLoads(UNITS, ExpertSettings(room_share=1.0), LAYOUT)


def look(
    loads: RoutedLoads, layout: Layout, memory: ScriptedMemory | None, now_s: float
) -> Layout | None:
    formation: Any = None if memory is None else SimpleNamespace(memory=memory)
    return loads.look(layout, formation, now_s)


def test_what_keeps_copies_away_is_reported_and_tried_again_ever_later() -> None:
    """Settings that leave no room, or memory that was short when a change had begun."""
    bare, memory = RoutedLoads(UNITS, ExpertSettings(room_share=0.01), LAYOUT), ScriptedMemory()
    memory.count([400, *[1] * (EXPERTS - 1)])

    assert look(bare, LAYOUT, memory, 10.0) is None
    assert bare.facts(LAYOUT).reason.startswith("elastic.experts.room_share leaves no room")
    assert bare.facts(LAYOUT).skew > 2

    loads, waits_s = loads_of(), []
    for _ in range(8):
        loads.put_off(100.0, "memory: got 1; allowed: 2")
        waits_s.append(loads.next_s - 100.0)
    assert loads.facts(LAYOUT).reason == "memory: got 1; allowed: 2"
    assert waits_s == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
    loads.changed(reformed(), LAYOUT, 100.0)
    assert loads.next_s == 102.0


def test_steps_are_predicted_by_the_fullest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one expert has nearly all rows, its rank has as much to do with two ranks as with
    three, and less where another one has a copy.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    loads, memory = loads_of(), ScriptedMemory()
    reformer: Any = SimpleNamespace(
        loads=loads,
        _group=SimpleNamespace(full=LAYOUT),
        _machine=SimpleNamespace(units=UNITS),
    )
    two = on_demand.reshaped(LAYOUT, UNITS, [[0, 1]], spread=False)
    even = Reformer.factors(reformer, two)

    memory.count([4000, *[1] * (EXPERTS - 1)])
    copied = look(loads, LAYOUT, memory, 10.0)
    skewed = Reformer.factors(reformer, two)

    assert copied is not None
    assert even == pytest.approx((1.5, 1.5), abs=0.2)
    assert skewed == pytest.approx((1.0, 1.0), abs=0.02)
    assert Reformer.factors(reformer, copied)[0] < 0.6


def test_a_popularity_that_turns_each_second_moves_copies_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within two minutes: choices fade within half a minute, so what is popular in the mean counts,
    and small changes of it are worth no bytes. Copies that follow each turn would change 120
    times.
    """
    monkeypatch.setattr(routed, "APART_S", 1.0)
    loads, memory, layout = loads_of(), ScriptedMemory(), LAYOUT
    popular, changes = [80, 40, 20, 10, 5, 5, 5, 5], []
    choose = random.Random(4)

    for now_s in range(1, 121):
        found = look(loads, layout, memory, float(now_s))
        if found is not None:
            changes.append(now_s)
            layout = found
            loads.changed(reformed(), layout, float(now_s))
        turned = popular if now_s % 2 else popular[::-1]
        memory.count([choose.randint(each // 2, each) for each in turned])

    assert layout.copies
    assert len(changes) <= 10
    assert sum(now_s > 60 for now_s in changes) <= 1
    assert all(later - at >= 1 for at, later in pairwise(changes))


def reformed() -> Any:
    return SimpleNamespace(moved={"peer": 1})
