"""A plan completes its target, reads nothing twice and nothing that is gone, and moves nothing that
a survivor keeps.
"""

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.sentinels.lost_kv import with_kv
from kvrs.errors import LayoutError
from kvrs_engine.elastic import cmm, on_demand
from kvrs_engine.elastic.layouts import Layout, hybrid, staged, uneven, validate
from kvrs_engine.elastic.moving import LinkRates, schedule
from kvrs_engine.elastic.placing import cyclic, least_loaded, mended
from kvrs_engine.elastic.plans import HOST, MovePlan, plan
from kvrs_engine.elastic.trees import cover
from kvrs_engine.elastic.units import Unit, UnitKind, Units
from kvrs_testkit.examples import examples
from kvrs_testkit.layouts import even
from kvrs_testkit.planned import bytes_by_kind, host_bytes_by_rank
from tests.elastic.models import layouts, models

Planner = Callable[[Layout, Units, list[list[int]]], Layout]
PLANNERS: list[Planner] = [on_demand.reshaped, cmm.reshaped]
RATES = LinkRates(host_bytes_per_s=50.0, peer_bytes_per_s=400.0)


@st.composite
def losses(draw: st.DrawFn) -> tuple[Units, MovePlan, set[int]]:
    """Any layout that loses ranks, or has some leave or join, under either planner."""
    units = draw(models())
    before = draw(layouts(units))
    most = max(*map(len, (units.attention_bytes, units.mlp_bytes, units.dense_bytes)))
    groups: list[list[int]] = []
    for stage in before.stages:
        stay = draw(st.lists(st.sampled_from(stage.ranks), min_size=1, unique=True))
        new = draw(st.integers(0, 2))
        groups.append((stay + [100 * (len(groups) + 1) + at for at in range(new)])[:most])
    after = draw(st.sampled_from(PLANNERS))(before, units, groups)
    gone = set(before.ranks) - set(after.ranks)
    dead = set(draw(st.lists(st.sampled_from(sorted(gone)), unique=True))) if gone else set()
    return units, plan(before, after, units, dead), dead


def blocks_of(unit: Unit, start: int, stop: int) -> set[tuple[Unit, int]]:
    """Blocks of 64 bytes; pieces of units begin at multiples of it."""
    assert start % 64 == 0
    return {(unit, at) for at in range(start // 64, -(-stop // 64))}


def blocks_there(
    had: dict[int, set[tuple[Unit, int]]], moves: MovePlan
) -> dict[int, set[tuple[Unit, int]]]:
    """Blocks that each rank has after all moves."""
    there = defaultdict(set, {rank: set(own) for rank, own in had.items()})
    for move in moves.moves:
        blocks = blocks_of(move.unit, move.start, move.stop)
        assert move.source == HOST or blocks <= there[move.source], "its source has it"
        there[move.target] |= blocks
    return there


@examples(80)
@given(losses())
def test_moves_complete_the_layout_and_read_only_what_is_there(
    case: tuple[Units, MovePlan, set[int]],
) -> None:
    """In the order of the plan, every source has what is read from it, and is alive."""
    units, found, dead = case
    validate(found.after, units)
    had = {
        rank: set().union(
            *(blocks_of(unit, 0, units.bytes_of(unit)) for unit in found.before.held(rank))
        )
        for rank in found.before.ranks
        if rank not in dead
    }

    there = blocks_there(had, found)

    assert not {move.source for move in found.moves} & dead
    for rank in found.after.ranks:
        for unit in found.after.held(rank):
            assert blocks_of(unit, 0, units.bytes_of(unit)) <= there[rank]


@examples(80)
@given(losses())
def test_nothing_moves_that_its_target_has(case: tuple[Units, MovePlan, set[int]]) -> None:
    """No byte reaches a rank twice, and none that it kept."""
    _, found, _ = case
    reached: dict[int, set[tuple[Unit, int]]] = defaultdict(set)
    for move in found.moves:
        blocks = blocks_of(move.unit, move.start, move.stop)
        assert blocks.isdisjoint(reached[move.target])
        reached[move.target] |= blocks
        if move.target in found.before.ranks:
            assert move.unit not in found.before.held(move.target)


@examples(80)
@given(losses())
def test_the_host_is_read_once_for_what_no_living_rank_has(
    case: tuple[Units, MovePlan, set[int]],
) -> None:
    """Reload is the least possible for the layout: the units that are wanted and of no survivor."""
    units, found, dead = case
    living = [rank for rank in found.before.ranks if rank not in dead]
    kept = {unit for rank in living for unit in found.before.held(rank)}
    wanted = {unit for rank in found.after.ranks for unit in found.after.held(rank)}

    assert found.host_bytes == sum(units.bytes_of(unit) for unit in wanted - kept)


@examples(100)
@given(losses())
def test_a_schedule_takes_its_longest_channel_at_least(
    case: tuple[Units, MovePlan, set[int]],
) -> None:
    """No channel carries two moves at once, and a piece is copied on only once it was read."""
    _, found, _ = case

    timed = schedule(found, RATES)

    assert len(timed.timed) == len(found.moves)
    ends: dict[tuple[str, int], float] = defaultdict(float)
    busy_s: dict[tuple[str, int], float] = defaultdict(float)
    there_s: dict[tuple[Unit, int, int], float] = {}
    for each in timed.timed:
        move, rate = each.move, RATES.peer_bytes_per_s
        if move.source == HOST:
            rate = RATES.host_bytes_per_s
            channels = [("host", move.target)]
            there_s[move.unit, move.start, move.target] = each.end_s
        else:
            channels = [("out", move.source), ("in", move.target)]
            assert each.start_s >= there_s.get((move.unit, move.start, move.source), 0.0)
        for channel in channels:
            assert each.start_s >= ends[channel]
            ends[channel] = each.end_s
            busy_s[channel] += move.bytes / rate
    assert timed.makespan_s >= max(busy_s.values(), default=0.0) * (1 - 1e-9)


@examples(100)
@given(
    tiles=st.sampled_from([8, 16, 64]),
    heads=st.integers(1, 12),
    ranks=st.sampled_from([2, 4, 8]),
    layers=st.integers(1, 12),
    data=st.data(),
)
def test_on_demand_weights_move_no_tile_between_ranks(
    tiles: int, heads: int, ranks: int, layers: int, data: st.DataObject
) -> None:
    """From an even layout, whichever rank is lost: no tile goes from rank to rank, each survivor
    reads as much from the host as the others to within one unit (of a head), and no layer is
    uneven by more than a tile.
    """
    units = Units(layers, (256,) * heads, (192,) * tiles, (64,) * tiles, 100)
    before = hybrid(units, staged(layers, [range(ranks)]))
    lost = data.draw(st.sampled_from(before.ranks))

    after = on_demand.reshaped(before, units, on_demand.survivors(before, [lost]))
    found = plan(before, after, units, {lost})

    assert bytes_by_kind(found).get(UnitKind.MLP, (0, 0))[1] == 0
    read = host_bytes_by_rank(found, UnitKind.ATTENTION, UnitKind.MLP, UnitKind.VOCABULARY)
    assert max(read.values()) - min(read.values()) <= 256
    for layer in range(layers):
        counts = [len(after.tiles(rank, layer)) for rank in after.ranks]
        assert max(counts) - min(counts) <= 1
        assert all(
            set(before.tiles(rank, layer)) <= set(after.tiles(rank, layer)) for rank in after.ranks
        )


@pytest.mark.parametrize("losses_in_a_row", [[3], [3, 0], [3, 0, 6], [3, 0, 6, 7]])
def test_lost_tiles_are_dealt_evenly_over_all_survivors(losses_in_a_row: list[int]) -> None:
    """Loss after loss: whole host reads stay even, and the shares of the last layout too."""
    units = Units(80, (1 << 16,) * 8, (1 << 16,) * 64, (1 << 16,) * 64, 0)
    layout = even(units, tp=8)
    for lost in losses_in_a_row:
        after = on_demand.reshaped(layout, units, on_demand.survivors(layout, [lost]))
        found = plan(layout, after, units, {lost})
        layout = after

    read = host_bytes_by_rank(found)
    spread = layout.spread(0)
    assert max(read.values()) - min(read.values()) <= len(layout.stages[0].layers) << 16
    if len(losses_in_a_row) == 1:
        assert max(read.values()) - min(read.values()) <= 2 << 16
    assert len(spread) == 8 % len(layout.ranks)
    assert bytes_by_kind(found).get(UnitKind.MLP, (0, 0))[1] == 0


def test_raidserves_figure_4() -> None:
    """12 shards on 4 ranks: each survivor loads exactly one. The paper's text loses GPU 3 and its
    result is that of GPU 0; both are one rule here.
    """
    units = Units(1, (64,) * 4, (64,) * 12, (64,) * 4, 0)
    before = uneven(units, staged(1, [range(4)]))

    after = {
        lost: on_demand.reshaped(before, units, on_demand.survivors(before, [lost]))
        for lost in (0, 3)
    }

    assert [after[3].tiles(rank, 0) for rank in (0, 1, 2)] == [
        (0, 1, 2, 9),
        (3, 4, 5, 10),
        (6, 7, 8, 11),
    ]
    assert [after[0].tiles(rank, 0) for rank in (1, 2, 3)] == [
        (0, 3, 4, 5),
        (1, 6, 7, 8),
        (2, 9, 10, 11),
    ]


def test_lost_heads_are_read_in_distinct_pieces_and_exchanged() -> None:
    """RaidServe's attention: 1/7 of the lost head on each survivor's link, the rest from peers."""
    units = Units(1, (7 * 64,) * 8, (64,) * 8, (64,) * 8, 0)
    before = even(units, tp=8)
    after = on_demand.reshaped(before, units, on_demand.survivors(before, [7]))

    found = plan(before, after, units, {7})

    assert after.spread(0) == (7,)
    assert host_bytes_by_rank(found, UnitKind.ATTENTION) == dict.fromkeys(range(7), 64)
    assert bytes_by_kind(found)[UnitKind.ATTENTION] == (7 * 64, 7 * 6 * 64)


def test_subtrees_of_the_sum_stay_large() -> None:
    """After a loss, 64 tiles on 8 ranks send 7 + 7 sums; 7 + 8 would be no better than a random
    deal (design, 1.4: 15).
    """
    units = Units(7, (64,) * 8, (64,) * 64, (64,) * 64, 0)
    before = even(units, tp=8)

    after = on_demand.reshaped(before, units, on_demand.survivors(before, [2]))

    assert sum(len(cover(before.tiles(rank, 0), 64)) for rank in before.ranks) == 8
    for layer in range(7):
        assert sum(len(cover(after.tiles(rank, layer), 64)) for rank in after.ranks) == 14


@pytest.mark.parametrize("reshaped", PLANNERS)
def test_a_rank_that_leaves_on_purpose_is_read_and_the_host_is_not(reshaped: Planner) -> None:
    units = Units(2, (128,) * 8, (64,) * 16, (64,) * 8, 64)
    before = even(units, tp=4)
    after = reshaped(before, units, [[0, 1, 3]])

    assert plan(before, after, units).host_bytes == 0
    assert plan(before, after, units, {2}).host_bytes > 0


@pytest.mark.parametrize("reshaped", PLANNERS)
def test_growth_gives_the_new_rank_its_even_share(reshaped: Planner) -> None:
    units = Units(2, (128,) * 6, (64,) * 12, (64,) * 12, 64)
    before = even(units, tp=2)

    after = reshaped(before, units, [[0, 1, 5]])

    assert [len(after.tiles(rank, 1)) for rank in (0, 1, 5)] == [4, 4, 4]
    assert [len(after.heads(rank, 1)) for rank in (0, 1, 5)] == [2, 2, 2]
    assert plan(before, after, units).host_bytes == 0


def test_lost_kv_is_read_once_and_in_even_shares() -> None:
    """RaidServe 3.2: of 35 GB on the lost rank each of 7 survivors reads 5."""
    units = Units(4, (64,) * 8, (64,) * 8, (64,) * 8, 0)
    before = even(units, tp=8)
    after = on_demand.reshaped(before, units, on_demand.survivors(before, [0]))

    kv = with_kv(MovePlan(before, after, ()), 7 * 6400, {0})

    assert host_bytes_by_rank(kv) == dict.fromkeys(range(1, 8), 4 * 6400)
    assert kv.peer_bytes == 0


def test_a_stage_without_a_survivor_is_refused() -> None:
    units = Units(4, (64,) * 4, (64,) * 8, (64,) * 8, 0)
    before = even(units, tp=1, pp=2)

    with pytest.raises(LayoutError, match=r"no rank is left for layers \[2, 4\)"):
        on_demand.reshaped(before, units, on_demand.survivors(before, [1]))


# Cells of spread heads.


@given(
    ranks=st.integers(2, 8),
    layers=st.integers(1, 90),
    gone=st.lists(st.integers(0, 7), unique=True, max_size=6),
)
def test_turns_are_mended_and_stay_even(ranks: int, layers: int, gone: list[int]) -> None:
    """Only the lost rank's turns change hands, and no page lies unevenly by more than a layer for
    each loss.
    """
    turns = cyclic(range(ranks), layers, ranks)
    lost = 0
    left = list(range(ranks))
    for rank in gone:
        if rank not in left or len(left) == 1:
            continue
        left.remove(rank)
        lost += 1
        new_turns = mended(turns, left)
        for old, new in zip(turns, new_turns, strict=True):
            assert all(now == was or was == rank for was, now in zip(old, new, strict=True))
        turns = new_turns

    for of_base in zip(*turns, strict=True):
        cells = Counter(of_base)
        assert set(cells) <= set(left)
        assert max(cells.values()) - min(cells[rank] for rank in left) <= 1 + lost


def test_a_sequence_goes_to_the_base_with_least_to_compute() -> None:
    assert least_loaded({0: 300, 1: 20, 2: 20}) == 1
