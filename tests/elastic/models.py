"""Small models as units, and layouts of them, for the tests of this folder."""

from hypothesis import strategies as st

from kvrs_engine.elastic.layouts import SPREAD, Layout, staged
from kvrs_engine.elastic.units import Units


@st.composite
def models(draw: st.DrawFn) -> Units:
    tiles = 1 << draw(st.integers(0, 4))
    layers = draw(st.integers(1, 5))
    # With experts in some layers, or in all, or in none.
    parts = draw(st.sampled_from([0, 0, 1, 2]))
    dense = draw(st.frozensets(st.integers(0, layers - 1))) if parts else frozenset()
    return Units(
        layers=layers,
        attention_bytes=(192 * draw(st.integers(1, 3)),) * draw(st.integers(1, 9)),
        mlp_bytes=(128,) * (tiles - 1) + (128 + draw(st.integers(0, 64)),),
        vocabulary_bytes=(64,) * (1 << draw(st.integers(0, 3))),
        common_bytes=draw(st.integers(0, 500)),
        dense_layers=dense,
        dense_bytes=(100,) * draw(st.integers(1, 4)) if dense else (),
        expert_parts=parts,
    )


@st.composite
def layouts(draw: st.DrawFn, units: Units) -> Layout:
    """Any owner for any unit."""
    ranks = list(range(draw(st.integers(1, 6))))
    cuts = draw(st.integers(1, min(len(ranks), units.layers)))
    groups = [ranks[at::cuts] for at in range(cuts)]
    stages = staged(units.layers, groups)

    def owners(count: int, allowed: list[int]) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from(allowed)) for _ in range(count))

    def copies(layer: int, allowed: list[int]) -> tuple[tuple[int, int], ...]:
        if not units.expert_parts or layer in units.dense_layers:
            return ()
        places = st.integers(0, len(units.mlp_bytes) - 1)
        pairs = draw(st.frozensets(st.tuples(places, st.sampled_from(allowed)), max_size=5))
        return tuple(sorted(pair for pair in pairs if mlp[layer][pair[0]] != pair[1]))

    bases = draw(st.integers(1, 4))
    by_layer = [list(stage.ranks) for stage in stages for _ in stage.layers]
    mlp = tuple(owners(len(units.mlp_of(layer)), own) for layer, own in enumerate(by_layer))
    return Layout(
        number=1,
        stages=stages,
        attention=tuple(owners(len(units.attention_bytes), [*own, SPREAD]) for own in by_layer),
        mlp=mlp,
        vocabulary=owners(len(units.vocabulary_bytes), groups[-1]),
        turns=tuple(owners(bases, own) for own in by_layer),
        copies=tuple(copies(layer, own) for layer, own in enumerate(by_layer)),
        split=units.expert_parts > 1 and draw(st.booleans()),
    )
