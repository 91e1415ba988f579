"""Every unit has an owner, whatever the degree; what cannot be laid out is refused by name."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import LayoutError
from kvrs_engine.elastic.grain import Grain
from kvrs_engine.elastic.layouts import SPREAD, Layout, Stage, hybrid, staged, uneven, validate
from kvrs_engine.elastic.shares import Share
from kvrs_engine.elastic.units import Unit, UnitKind, Units
from kvrs_testkit.layouts import even, rotated
from tests.elastic.models import layouts, models

SMALL = Units(
    layers=4,
    attention_bytes=(300,) * 4,
    mlp_bytes=(100,) * 8,
    vocabulary_bytes=(10,) * 4,
    common_bytes=7,
)


def test_units_of_a_known_model_weigh_what_its_weights_do() -> None:
    """Llama-3.1-70B in bfloat16: 141 GB, without norms."""
    grain = Grain.of(heads=64, kv_heads=8, intermediate=28672, vocab=128256)
    embeddings = 128256 * 8192 * 2

    units = Units.of(
        grain,
        layers=80,
        hidden=8192,
        head_dim=128,
        gated=True,
        weight_bytes=2,
        common_bytes=embeddings,
    )

    assert units.total_bytes == 141_104_775_168
    assert sum(map(units.bytes_of, units.all())) == units.total_bytes


@given(units=models(), ranks=st.integers(1, 9), rotate=st.booleans())
def test_uneven_shares_differ_by_one_unit_at_most(units: Units, ranks: int, rotate: bool) -> None:
    """Any degree is possible, and no rank has two units more than another in a layer."""
    if ranks > max(*map(len, (units.attention_bytes, units.mlp_bytes, units.dense_bytes))):
        return

    layout = (rotated if rotate else uneven)(units, staged(units.layers, [range(ranks)]))

    for layer in range(units.layers):
        for own in (layout.heads, layout.tiles):
            counts = [len(own(rank, layer)) for rank in range(ranks)]
            assert max(counts) - min(counts) <= 1


def test_cyclic_shares_even_out_over_layers() -> None:
    """RaidServe's placement: 4 heads on 3 ranks are 4/3 heads each over 3 layers, not 2 and 1."""
    three = replace(SMALL, layers=3)
    stages = staged(3, [range(3)])

    naive, cyclic = uneven(three, stages), rotated(three, stages)

    assert sorted(naive.cells_per_page(rank) for rank in range(3)) == [3, 3, 6]
    assert [cyclic.cells_per_page(rank) for rank in range(3)] == [4, 4, 4]


def test_hybrid_spreads_the_heads_that_are_left_over() -> None:
    layout = hybrid(SMALL, staged(4, [(0, 1, 2)]))

    assert layout.attention[0] == (0, 1, 2, SPREAD)
    assert layout.spread(0) == (3,)
    assert layout.holders(Unit(UnitKind.ATTENTION, 0, 3)) == (0, 1, 2)
    # 4 heads of its own and a third of 4 spread ones, rounded up.
    assert [layout.cells_per_page(rank) for rank in range(3)] == [6, 6, 6]


@given(st.data())
def test_every_cell_of_a_page_is_on_one_rank(data: st.DataObject) -> None:
    """Whatever its base, which may be one of a layout with more of them."""
    units = data.draw(models())
    layout = data.draw(layouts(units))

    for base in range(layout.bases + 2):
        cells = [cell for rank in layout.ranks for cell in layout.cells(rank, base)]
        assert sorted(cells) == [
            (layer, head)
            for layer in range(units.layers)
            for head in range(len(units.attention_bytes))
        ]


def test_sequences_of_all_bases_make_every_rank_compute_as_much() -> None:
    """In each layer, and each page has as many cells on each rank, to one."""
    layout = hybrid(SMALL, staged(4, [(0, 1, 2)]))

    assert layout.bases == 3
    for layer in range(4):
        assert sorted(layout.turn(layer, base) for base in range(3)) == [0, 1, 2]
    for base in range(3):
        counts = [len(layout.cells(rank, base)) for rank in range(3)]
        assert max(counts) - min(counts) <= 1


@given(st.data())
def test_every_unit_is_held_by_its_holders_only(data: st.DataObject) -> None:
    """Weights that no rank needs are on none."""
    units = data.draw(models())
    layout = data.draw(layouts(units))

    validate(layout, units)
    held = {rank: layout.held(rank) for rank in layout.ranks}

    for unit in units.all():
        assert {rank for rank in layout.ranks if unit in held[rank]} == set(layout.holders(unit))
    assert set().union(*held.values()) == set(units.all())


def test_stages_have_the_vocabulary_at_the_end() -> None:
    layout = even(SMALL, tp=2, pp=2)

    assert layout.stages == (Stage(0, 2, (0, 1)), Stage(2, 4, (2, 3)))
    assert Counter(layout.vocabulary) == {2: 2, 3: 2}
    assert layout.heads(2, 0) == ()


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (lambda: even(SMALL, tp=3), "tp 3 does not divide the model's 4 KV heads evenly"),
        (lambda: even(SMALL, tp=2, pp=5), "pp 5: a model of 4 layers has 1 to 4 stages"),
        (
            lambda: uneven(SMALL, staged(4, [range(9)])),
            "tp 9: the model has 4 KV heads and 8 tiles, allowed: 1 to 8",
        ),
        (lambda: uneven(SMALL, [Stage(0, 3, (0,))]), r"\[0, 3\) do not cover layers \[0, 4\)"),
        (
            lambda: uneven(SMALL, [Stage(0, 3, (0,)), Stage(2, 4, (1,))]),
            r"\[0, 3\), \[2, 4\) do not cover",
        ),
        (lambda: uneven(SMALL, [Stage(0, 4, ())]), "a stage has no rank"),
        (lambda: uneven(SMALL, staged(4, [(0, 1), (1, 2)])), "each is in one stage once"),
    ],
)
def test_impossible_layouts_are_refused(layout: object, said: str) -> None:
    assert callable(layout)
    with pytest.raises(LayoutError, match=said):
        layout()


LAYOUT = even(SMALL, tp=2)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (replace(LAYOUT, mlp=((0,) * 7,) * 4), "mlp of layer 0 has 7 owners for 8 units"),
        (replace(LAYOUT, mlp=((0,) * 8,) * 3), "mlp of 3 layers, the model has 4"),
        (replace(LAYOUT, mlp=((SPREAD,) * 8,) * 4), "unit 0 of mlp of layer 0 is given to rank -1"),
        (
            replace(LAYOUT, attention=((0, 1, 2, 0),) * 4),
            "unit 2 of attention of layer 0 is given to rank 2",
        ),
        (replace(LAYOUT, vocabulary=(0, 0, 0, 9)), "unit 3 of vocabulary is given to rank 9"),
        (
            replace(LAYOUT, attention=((0, 1, 1, SPREAD),) * 4),
            "spread heads have turns of 0 layers",
        ),
        (
            replace(LAYOUT, attention=((0, 1, 1, SPREAD),) * 4, turns=((0, 1),) * 3 + ((0, 5),)),
            "turns of layer 3 are given to rank 5",
        ),
    ],
)
def test_units_without_an_owner_of_their_stage_are_named(broken: Layout, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        validate(broken, SMALL)


def test_shares_of_other_experts_make_the_same_products() -> None:
    """Experts are computed one by one, so a layout that gives a rank others proves nothing anew;
    dense layers are computed as a whole.
    """
    grain = Grain.of(heads=4, kv_heads=2, intermediate=256, vocab=256)
    grain = grain.with_experts(8, 96, frozenset({1}), 2)
    units = Units.of(
        grain, layers=3, hidden=64, head_dim=16, gated=True, weight_bytes=4, common_bytes=0
    )
    layout = uneven(units, staged(3, [range(3)]))
    given = (0, 1, 0, 2, 0, 1, 0, 0)
    others = replace(layout, mlp=(given, layout.mlp[1], given))
    more = replace(layout, mlp=(layout.mlp[0], (0, 0, 1, 2), layout.mlp[2]))

    one, other, third = (Share.of(each, 0).kinds(units) for each in (layout, others, more))

    assert len(Share.of(layout, 0).tiles[0]) != len(Share.of(others, 0).tiles[0])
    assert one == other != third
