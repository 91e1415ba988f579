"""Copies of experts go where they help most, each row of an expert is computed once, and a lost
expert with a copy is moved by no byte.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import LayoutError
from kvrs_engine.elastic import cmm, on_demand
from kvrs_engine.elastic.experts import (
    TileHistory,
    assign,
    divided,
    fullest,
    pieces_of,
    rebalance,
    skew,
)
from kvrs_engine.elastic.layouts import Layout, staged, uneven, validate
from kvrs_engine.elastic.plans import plan
from kvrs_engine.elastic.speed import shares
from kvrs_engine.elastic.units import Unit, UnitKind, Units
from kvrs_testkit.examples import examples

BYTES = 64


def model(experts: int = 8, layers: int = 1, parts: int = 1) -> Units:
    sizes = (BYTES,) * experts * parts
    return Units(layers, (8,) * 4, sizes, (8,) * 2, 0, expert_parts=parts)


def laid_out(units: Units, ranks: int) -> Layout:
    return uneven(units, staged(units.layers, [range(ranks)]))


def zipf(count: int, exponent: float, order: Sequence[int]) -> list[float]:
    return [1000 / (1 + at) ** exponent for at in order][:count]


@st.composite
def cases(draw: st.DrawFn, most_copies: int = 6) -> tuple[Units, Layout, list[list[float]], int]:
    """A model on ranks, perhaps after a loss, with how often experts are chosen, and the copies
    that each rank has room for.
    """
    parts = draw(st.sampled_from([1, 2]))
    units = model(draw(st.integers(2, 9)), draw(st.integers(1, 3)), parts)
    layout = laid_out(units, draw(st.integers(2, min(6, len(units.mlp_bytes)))))
    if len(layout.ranks) > 2 and draw(st.booleans()):
        layout = on_demand.reshaped(layout, units, on_demand.survivors(layout, [1]), spread=False)
    count = len(units.mlp_bytes) // parts
    loads = st.lists(st.integers(0, 1000), min_size=count, max_size=count)
    tiles = [[float(each) for each in draw(loads)] for _ in range(units.layers)]
    return units, layout, tiles, draw(st.integers(0, most_copies))


def room_for(layout: Layout, copies: int) -> dict[int, int]:
    return dict.fromkeys(layout.ranks, copies * BYTES)


@examples(150)
@given(data=st.data())
def test_each_run_has_one_holder_that_has_the_piece(data: st.DataObject) -> None:
    """And no holder has two runs more than another one of a piece that is alone."""
    ranks = range(data.draw(st.integers(1, 5)))
    holder = st.lists(st.sampled_from(ranks), min_size=1, unique=True).map(tuple)
    holders = data.draw(st.lists(holder, min_size=1, max_size=6))
    runs = [data.draw(st.integers(0, 9)) for _ in holders]

    found = assign(runs, holders)

    for piece, (own, count) in enumerate(zip(holders, runs, strict=True)):
        given_to = found.get(piece, [])
        assert len(given_to) == (count if len(own) > 1 else 0)
        assert set(given_to) <= set(own)
    alone = assign(runs[:1], holders[:1]).get(0, [])
    counts = [alone.count(rank) for rank in holders[0]]
    assert not alone or max(counts) - min(counts) <= 1


@examples(100)
@given(data=st.data())
def test_loads_are_divided_as_evenly_as_holders_allow(data: st.DataObject) -> None:
    """The largest is that of the set of ranks with most load of their own, divided by these."""
    ranks = range(data.draw(st.integers(1, 4)))
    holder = st.lists(st.sampled_from(ranks), min_size=1, unique=True).map(tuple)
    holders = data.draw(st.lists(holder, min_size=1, max_size=6))
    loads = [float(data.draw(st.integers(0, 100))) for _ in holders]

    found = divided(loads, holders, ranks)

    assert sum(found.values()) == pytest.approx(sum(loads))
    assert max(found.values()) == pytest.approx(least_fullest(loads, holders, ranks), rel=0.02)


def least_fullest(
    loads: Sequence[float], holders: Sequence[tuple[int, ...]], ranks: Sequence[int]
) -> float:
    sets = [set(own) for count in range(1, len(ranks) + 1) for own in combinations(ranks, count)]
    return max(
        sum(load for load, own in zip(loads, holders, strict=True) if own_set.issuperset(own))
        / len(own_set)
        for own_set in sets
    )


@examples(80)
@given(cases())
def test_a_rebalance_never_burdens_nor_overfills_and_is_idempotent(
    case: tuple[Units, Layout, list[list[float]], int],
) -> None:
    """At fixed counts; the layout is valid, and owners stay."""
    units, layout, tiles, copies = case
    room = room_for(layout, copies)

    found = rebalance(layout, units, tiles, room).layout

    validate(found, units)
    assert fullest(found, units, tiles)[0] <= fullest(layout, units, tiles)[0] * 1.001
    for rank in found.ranks:
        assert found.weight_bytes(rank, units) - layout.weight_bytes(rank, units) <= room[rank]
    assert replace(found, copies=(), number=1) == replace(layout, number=1)
    assert rebalance(found, units, tiles, room).layout is found


def test_a_rebalance_that_opens_the_way_for_a_better_one_makes_that_one() -> None:
    """Drawn cases seldom have it: with two copies of the last expert a third one pays."""
    units = model(experts=4, layers=2)
    layout, tiles = laid_out(units, 4), [[8.0, 2.0, 5.0, 2.0], [0.0, 1.0, 0.0, 23.0]]
    room = room_for(layout, 1)

    found = rebalance(layout, units, tiles, room).layout

    assert found.copies == (((0, 3),), ((3, 0), (3, 1), (3, 2)))
    assert found.number == layout.number + 1
    assert rebalance(found, units, tiles, room).layout is found


@examples(40)
@given(cases(), st.data())
def test_a_rebalance_from_other_copies_is_no_worse_than_they_are(
    case: tuple[Units, Layout, list[list[float]], int], data: st.DataObject
) -> None:
    """Popularity has turned, and room may be less than before."""
    units, layout, tiles, copies = case
    turned = [[*reversed(own)] for own in tiles]
    before = rebalance(layout, units, turned, room_for(layout, 6)).layout
    room = room_for(layout, copies)

    found = rebalance(before, units, tiles, room).layout

    for rank in found.ranks:
        assert found.weight_bytes(rank, units) - layout.weight_bytes(rank, units) <= room[rank]
    if copies == 6:
        assert fullest(found, units, tiles)[0] <= fullest(before, units, tiles)[0] * 1.001


@pytest.mark.parametrize(("ranks", "copies"), [(3, 1), (3, 2), (4, 1), (5, 1)])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_placement_is_within_5_percent_of_brute_force(
    ranks: int, copies: int, exponent: float
) -> None:
    """Brute force tries all choices of so many copies on each rank, of 8 experts, and knows the
    best division of their load.
    """
    units = model()
    layout = laid_out(units, ranks)
    loads = zipf(8, exponent, [3, 0, 6, 1, 7, 4, 2, 5])

    found = rebalance(layout, units, [loads], room_for(layout, copies)).layout

    choices = [
        list(combinations([at for at in range(8) if layout.mlp[0][at] != rank], copies))
        for rank in range(ranks)
    ]
    least = min(
        least_fullest(loads, with_copies(layout, each), range(ranks)) for each in product(*choices)
    )
    assert fullest(found, units, [loads])[0] <= 1.05 * least


def with_copies(layout: Layout, by_rank: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [
        (owner, *(rank for rank, own in enumerate(by_rank) if place in own))
        for place, owner in enumerate(layout.mlp[0])
    ]


@pytest.mark.parametrize(("experts", "parts"), [(8, 8), (128, 1)])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_behind_a_loss_the_fullest_has_a_tenth_more_at_most(
    experts: int, parts: int, exponent: float
) -> None:
    """Mixtral and Qwen3 from 8 ranks to 7, with room for as much again as a rank has."""
    units = model(experts, 1, parts)
    layout = laid_out(units, 8)
    layout = on_demand.reshaped(layout, units, on_demand.survivors(layout, [3]), spread=False)
    tiles = [zipf(experts, exponent, range(experts))]
    room = {rank: layout.weight_bytes(rank, units) for rank in layout.ranks}

    found = rebalance(layout, units, tiles, room).layout

    assert skew(found, units, tiles) <= 1.10


def test_copies_that_do_not_help_are_given_up() -> None:
    """Experts that are all chosen as often need none on ranks with as many."""
    units = model()
    layout = replace(laid_out(units, 4), copies=(((0, 3), (5, 0)),))

    found = rebalance(layout, units, [[10.0] * 8], room_for(layout, 4))

    assert found.layout.copies == ()
    assert not found.lacks_room


def test_without_counts_and_of_one_expert_nothing_changes() -> None:
    units, one = model(), model(experts=2)
    copied = replace(laid_out(units, 4), copies=(((0, 3),),))

    nothing: list[list[list[float]]] = [[[0.0] * 8], [[]]]
    for tiles in nothing:
        assert rebalance(copied, units, tiles, room_for(copied, 4)).layout is copied
        assert skew(copied, units, tiles) == 1.0
    two = laid_out(one, 2)
    assert rebalance(two, one, [[5.0, 5.0]], room_for(two, 1)).layout is two


def test_an_expert_that_all_rows_choose_has_a_copy_on_every_rank() -> None:
    units = model()
    layout = laid_out(units, 4)

    found = rebalance(layout, units, [[0.0, 0.0, 90.0, *[0.0] * 5]], room_for(layout, 8)).layout

    assert found.copies == (((2, 0), (2, 2), (2, 3)),)
    assert skew(found, units, [[0.0, 0.0, 90.0, *[0.0] * 5]]) == pytest.approx(1.0)


def test_without_room_the_skew_stays_and_that_is_said() -> None:
    units = model()
    layout, tiles = laid_out(units, 4), [[90.0, *[1.0] * 7]]

    found = rebalance(layout, units, tiles, room_for(layout, 0))

    assert found.layout is layout
    assert found.lacks_room
    assert not rebalance(layout, units, tiles, room_for(layout, 4)).lacks_room


def test_a_lost_expert_with_a_copy_is_not_moved() -> None:
    """With one copy or two; without any it is dealt as ever, and only that is."""
    units = model()
    before = replace(laid_out(units, 4), copies=(((4, 0), (4, 1), (5, 3)),))

    after = on_demand.reshaped(before, units, on_demand.survivors(before, [2]), spread=False)

    moved = {move.unit for move in plan(before, after, units, {2}).moves}
    assert after.mlp[0][4:6] == (0, 3)
    assert after.copies == (((4, 1),),)
    assert {unit for unit in moved if unit.kind is UnitKind.MLP} == set()
    both = on_demand.reshaped(before, units, on_demand.survivors(before, [2, 3]), spread=False)
    moved = {move.unit for move in plan(before, both, units, {2, 3}).moves}
    assert {Unit(UnitKind.MLP, 0, at) for at in (5, 6, 7)} <= moved
    assert Unit(UnitKind.MLP, 0, 4) not in moved


@pytest.mark.parametrize("lost", [1, 2])
def test_even_shares_keep_the_copies_of_other_ranks_than_their_owners(lost: int) -> None:
    """Copies at a lost rank are gone, and a copy at the new owner is its own unit."""
    units = model()
    before = replace(laid_out(units, 4), copies=(((4, 0), (4, 1), (5, 3)),))
    left = on_demand.survivors(before, [lost])

    after = cmm.reshaped(before, units, left)

    validate(after, units)
    assert after.copies == (((4, 0),),)
    assert cmm.reshaped(before, units, left, copies=False).copies == ()


def test_copies_are_kept_where_a_rank_joins_and_dropped_where_there_is_no_room() -> None:
    units = model()
    before = replace(laid_out(units, 3), copies=(((0, 2),),))

    joined = on_demand.reshaped(before, units, [[0, 1, 2, 5]], spread=False)
    bare = on_demand.reshaped(before, units, [[0, 1]], spread=False, copies=False)

    assert joined.copies == (((0, 2),),) or joined.mlp[0][0] == 2
    assert bare.copies == ()


def test_what_has_copies_counts_for_steps_as_it_is_divided() -> None:
    """A copy makes no rank slower."""
    units = model()
    layout = laid_out(units, 4)
    everywhere = replace(layout, copies=(tuple((0, rank) for rank in (1, 2, 3)),))

    assert shares(everywhere, units).weights <= shares(layout, units).weights


def test_experts_whose_parts_lie_apart_are_computed_in_parts() -> None:
    units = model(experts=2, parts=2)
    whole = replace(laid_out(units, 2), mlp=((0, 0, 1, 1),), copies=(((0, 1), (1, 1)),))

    assert pieces_of(whole, 0, 2).holders == ((0, 1), (1,))
    apart = replace(whole, copies=(((0, 1),),))
    assert pieces_of(apart, 0, 2) == (1, ((0, 1), (0,), (1,), (1,)))


def test_older_choices_count_less() -> None:
    """Half as much after a half-life; a layer tells nothing before it has enough."""
    history = TileHistory(half_life_s=10.0)

    history.note([[80, 0], []], 5.0)
    history.note([[0, 4], []], 15.0)

    assert history.tiles == [[40.0, 4.0], []]
    assert history.telling == [[40.0, 4.0], []]
    few = TileHistory(half_life_s=10.0)
    few.note([[1, 1]], 5.0)
    assert few.telling == [()]


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        ((((0, 0),),), "a copy of unit 0 of layer 0 on rank 0"),
        ((((8, 1),),), "a copy of unit 8 of layer 0 on rank 1; allowed: of units 0 to 7"),
        ((((0, 9),),), "a copy of unit 0 of layer 0 on rank 9"),
        ((((1, 2), (0, 2)),), "copies of layer 0: each once and in ascending order"),
        (((), ()), "copies of 2 layers, the model has 1"),
    ],
)
def test_copies_that_cannot_be_are_named(
    copies: tuple[tuple[tuple[int, int], ...], ...], said: str
) -> None:
    units = model()

    with pytest.raises(LayoutError, match=said):
        validate(replace(laid_out(units, 4), copies=copies), units)


def test_copies_of_dense_layers_are_refused() -> None:
    """All units of these take all rows."""
    units = replace(model(), expert_parts=0)

    with pytest.raises(LayoutError, match="copies in layer 0, which has no experts"):
        validate(replace(laid_out(units, 4), copies=(((0, 3),),)), units)


def parts_by_rank(layout: Layout, expert: int, parts: int) -> list[int]:
    own = layout.mlp[0][expert * parts : (expert + 1) * parts]
    return [own.count(rank) for rank in layout.ranks]


def test_split_experts_have_parts_on_all_ranks_also_behind_a_loss_and_back() -> None:
    """Mixtral's 8 parts on 8 ranks, 7 and 8 again: no rank has two more of an expert than another,
    and what survivors have stays where it is.
    """
    units = model(experts=8, parts=8)
    whole = uneven(units, staged(1, [range(8)]), split=True)

    seven = on_demand.reshaped(whole, units, on_demand.survivors(whole, [3]), spread=False)
    again = on_demand.reshaped(seven, units, [range(8)], spread=False)

    for layout in (whole, seven, again):
        counts = [parts_by_rank(layout, expert, 8) for expert in range(8)]
        assert all(max(own) - min(own) <= 1 for own in counts)
        totals = [sum(own) for own in zip(*counts, strict=True)]
        assert max(totals) - min(totals) <= 1
    kept = [after == before for before, after in zip(whole.mlp[0], seven.mlp[0], strict=True)]
    assert sum(kept) == 56


def test_split_experts_are_even_whatever_is_chosen() -> None:
    """Where parts and ranks divide; whole ones are as uneven as the choice."""
    units = model(experts=8, parts=8)
    tiles = [zipf(8, 1.0, range(8))]
    split, whole = (uneven(units, staged(1, [range(4)]), split=split) for split in (True, False))

    assert skew(split, units, tiles) == pytest.approx(1.0)
    assert skew(whole, units, tiles) > 2
    assert rebalance(split, units, tiles, room_for(split, 64)).layout is split


def test_experts_without_parts_cannot_be_split() -> None:
    with pytest.raises(LayoutError, match="experts are split, but each is one unit"):
        uneven(model(), staged(1, [range(2)]), split=True)
