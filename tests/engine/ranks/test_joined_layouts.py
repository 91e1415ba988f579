"""The ranks of an instance whose groups of stages re-form each for itself."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs_engine.elastic import on_demand
from kvrs_engine.elastic.layouts import Layout, hybrid, staged, uneven, validate
from kvrs_engine.elastic.units import Units
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.ranks.nodes import joined, together
from kvrs_engine.engine.ranks.reformed import RanksNow, ReformingNow

pytestmark = pytest.mark.engine

UNITS = Units(4, (128,) * 4, (64,) * 8, (64,) * 4, 32)
STAGES = staged(4, [range(2), range(2, 5), range(5, 7)])
PARTS = [range(1), range(1, 3)]


def without(layout: Layout, *ranks: int) -> Layout:
    return on_demand.reshaped(layout, UNITS, on_demand.survivors(layout, ranks))


def test_a_joined_layout_has_each_stage_as_its_part_has_it() -> None:
    """It is a layout of the model; its number rises with each change of a part."""
    full = uneven(UNITS, STAGES)
    first, rest = without(full, 1), without(without(full, 4), 6)

    found = joined([(PARTS[0], first), (PARTS[1], rest)])

    validate(found, UNITS)
    assert found.ranks == (0, 2, 3, 5)
    assert all(found.held(rank) == first.held(rank) for rank in (0,))
    assert all(found.held(rank) == rest.held(rank) for rank in (2, 3, 5))
    assert joined([(part, full) for part in PARTS]) == full
    assert [full.number, found.number] == [1, 4]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6]), max_size=6, unique=True), st.booleans())
def test_any_losses_of_parts_join_to_a_layout_of_the_living(lost: list[int], spread: bool) -> None:
    """Each part plans its own losses; together every unit has an owner."""
    full = (hybrid if spread else uneven)(UNITS, STAGES)
    own = dict.fromkeys(PARTS, full)
    changes = 0
    for rank in lost:
        part = next(part for part in PARTS if rank in ranks_in(full, part))
        if len(own[part].stage_of(rank).ranks) > 1:  # A stage without ranks does not re-form.
            own[part] = without(own[part], rank)
            changes += 1

    found = joined([(part, own[part]) for part in PARTS])

    validate(found, UNITS)
    assert found.number == 1 + changes
    for part in PARTS:
        for rank in ranks_in(own[part], part):
            assert found.held(rank) == own[part].held(rank)


def ranks_in(layout: Layout, part: range) -> list[int]:
    return [rank for stage in part for rank in layout.stages[stage].ranks]


def test_a_joined_layout_has_turns_where_a_part_has_spread_heads() -> None:
    """For any base that a sequence may have; the rank of a cell is that by its own part."""
    full = uneven(UNITS, STAGES)
    spread = hybrid(UNITS, STAGES)

    found = joined([(PARTS[0], full), (PARTS[1], spread)])

    assert found.bases > 0
    for base in range(8):
        for rank in spread.ranks[2:]:
            assert found.cells(rank, base) == spread.cells(rank, base)
        cells = [cell for rank in found.ranks for cell in found.cells(rank, base)]
        assert len(cells) == len(set(cells)) == 4 * 4


def test_an_instance_re_forms_until_its_last_part_serves() -> None:
    """With what all parts lose and move; a number that rises with each re-forming."""
    full = uneven(UNITS, STAGES)
    calm = RanksNow(full, {0: 100, 1: 101}, 1, 3, None)
    first = ReformingNow(4, Way.RESHARD, 10.0, without(full, 3), (3,), 64, 8)
    busy = RanksNow(full, {2: 102, 4: 104}, 2, 4, first)
    last = replace(first, ready_at_s=12.0, after=without(full, 1), lost=(1,))

    one = together([(PARTS[0], calm), (PARTS[1], busy)])
    both = together([(PARTS[0], replace(calm, number=4, reforming=last)), (PARTS[1], busy)])

    assert together([(PARTS[0], calm), (PARTS[1], calm)]).reforming is None
    assert one.reforming is not None
    assert both.reforming is not None
    assert (one.number, one.deaths, one.pids) == (7, 3, {0: 100, 1: 101, 2: 102, 4: 104})
    assert one.reforming.after.ranks == (0, 1, 2, 4, 5, 6)
    assert (both.reforming.number, both.reforming.ready_at_s) == (8, 12.0)
    assert both.reforming.after.ranks == (0, 2, 4, 5, 6)
    assert (both.reforming.lost, both.reforming.move_bytes) == ((1, 3), 128)
    assert busy.later(-3.0).reforming == replace(first, ready_at_s=7.0)


def test_an_instance_pauses_where_one_part_does_while_a_rank_leaves_another() -> None:
    """Though the rank leaves later than the lost one is done without."""
    full = uneven(UNITS, STAGES)
    lost = ReformingNow(4, Way.RESHARD, 10.0, without(full, 3), (3,), 64, 8)
    leaves = ReformingNow(4, Way.RESIZE, 12.0, without(full, 1), (), 64, 0)
    parts = [RanksNow(full, {}, 0, 4, each) for each in (leaves, lost)]

    found = together(list(zip(PARTS, parts, strict=True))).reforming

    assert found is not None
    assert (found.way, found.ready_at_s, found.lost) == (Way.RESHARD, 10.0, (3,))
