"""Instances that lose ranks while they serve, in virtual time, by the objects of
`kvrs_engine.elastic`.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvrs.config.cluster import Planner
from kvrs.core.event_log import rerun
from kvrs.ids import InstanceId
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.speed import shares
from kvrs_engine.elastic.units import Units
from kvrs_engine.elastic.ways import PLANNERS
from kvrs_lab.sim import cluster
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.lost_cells import LostCells
from kvrs_lab.sim.process import InvariantError
from kvrs_lab.sim.rank_model import RankModel
from kvrs_lab.sim.ranks import SimRanks
from kvrs_testkit.examples import scaled
from kvrs_testkit.random_worlds import ranked, too_few_ranks

SEEDS = scaled(5)


def outcomes(planner: Planner = "on_demand") -> list[Outcome]:
    return [ranked(seed, planner=planner).run() for seed in range(SEEDS)]


@pytest.mark.parametrize("planner", PLANNERS)
def test_no_computation_reads_a_cell_that_is_gone(planner: Planner) -> None:
    """Two ranks at once, one in mid-move of another, devices and processes, ranks that leave by
    order, instances that take five times as long as they say: every stream ends complete, and most
    stay where they are.
    """
    found = outcomes(planner)

    ended = sum((outcome.ended for outcome in found), Counter[str]())
    recoveries = sum((outcome.recoveries for outcome in found), Counter[str]())
    hit = {one.death for outcome in found for one in outcome.hits if one.streams}
    assert set(ended) == {"complete"}
    assert recoveries["in_place"] > 20
    assert len(hit) == 6


def test_streams_leave_an_instance_that_has_too_few_ranks() -> None:
    """It ends, as one process does; each stream goes on elsewhere and ends complete."""
    found = [too_few_ranks(seed).run() for seed in range(3)]

    assert all(one.streams for outcome in found for one in outcome.hits)
    assert {key for outcome in found for key in outcome.ended} == {"complete"}
    recoveries = sum((outcome.recoveries for outcome in found), Counter[str]())
    assert recoveries["in_place"] == 0
    assert recoveries.total() >= sum(one.streams for outcome in found for one in outcome.hits)


def test_the_law_notices_streams_that_compute_on_without_what_they_have_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An invariant that cannot be broken proves nothing."""

    def nothing(self: LostCells, *given: Any) -> None:
        pass

    monkeypatch.setattr(LostCells, "_begin_again", nothing)

    with pytest.raises(InvariantError, match="cells that are gone"):
        outcomes()


def test_a_log_with_ranks_can_be_run_again() -> None:
    world = ranked(3, keep_log=True)
    world.run()

    for proxy in world.cluster.proxies:
        assert proxy.log is not None
        assert rerun(proxy.log).difference is None


@pytest.mark.parametrize("planner", PLANNERS)
def test_ranks_are_divided_by_the_planner_of_the_configuration(planner: Planner) -> None:
    world = ranked(0, deaths=0, planner=planner)
    ranks = world.cluster.engines[InstanceId("d0")].ranks
    assert isinstance(ranks, SimRanks)
    before, units, clock = ranks.layout, RankModel().units, world.cluster.clock
    left: list[Layout] = []

    clock.after(3.0, partial(ranks.lose, [1], memory_kept=False))
    clock.after(4.0, lambda: left.append(ranks.layout))
    world.run()

    by_each = {
        each: reshape(before, units, [[0, 2, 3]], spread=True).mlp
        for each, reshape in PLANNERS.items()
    }
    assert [each for each, mlp in by_each.items() if mlp == left[0].mlp] == [planner]


def test_ranks_that_leave_and_join_cost_no_stream_a_recovery() -> None:
    """Streams wait for the new formation where they are."""
    world = ranked(0, deaths=0)
    engine = world.cluster.engines[InstanceId("d0")]
    clock = world.cluster.clock
    seen: list[tuple[int, bool]] = []

    def order(*, leaves: bool) -> None:
        assert isinstance(engine.ranks, SimRanks)
        assert engine.ranks.order(2, leaves=leaves)
        seen.append((engine.ranks.degree, engine.scheduler.running > 0))

    clock.after(3.0, partial(order, leaves=True))
    clock.after(6.0, partial(order, leaves=False))
    outcome = world.run()

    assert set(outcome.ended) == {"complete"}
    assert seen == [(4, True), (3, True)]
    assert isinstance(engine.ranks, SimRanks)
    assert engine.ranks.degree == 4
    assert not outcome.recoveries


EXPERTS = RankModel(
    units=Units(4, (200_000_000,) * 6, (60_000_000,) * 48, (50_000_000,) * 8, 0, expert_parts=1),
    tiles=[[1000 / (1 + (at * 29 + layer) % 48) for at in range(48)] for layer in range(4)],
    balances_after_s=0.2,
)


def test_hot_experts_get_copies_while_ranks_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream ends complete, nothing is read for a copy (as an invariant), and a step is
    shorter with the copies than without.
    """
    monkeypatch.setattr(cluster, "RankModel", lambda: EXPERTS)
    found = [ranked(seed) for seed in range(3)]

    outcomes = [world.run() for world in found]

    assert {key for outcome in outcomes for key in outcome.ended} == {"complete"}
    copied = 0
    for world in found:
        for engine in world.cluster.engines.values():
            if isinstance(engine.ranks, SimRanks) and engine.ranks.layout.copies:
                layout, copied = engine.ranks.layout, copied + 1
                bare = replace(layout, copies=())
                steps = [shares(each, EXPERTS.units, EXPERTS.tiles) for each in (layout, bare)]
                assert steps[0].weights < steps[1].weights
    assert copied > 0
