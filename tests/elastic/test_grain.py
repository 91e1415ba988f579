"""Units are cut by the model alone, and tile it."""

from hypothesis import given
from hypothesis import strategies as st

from kvrs_engine.elastic.grain import Grain


def widths(tiles: tuple[range, ...]) -> list[int]:
    return [len(tile) for tile in tiles]


def test_known_models_are_cut_as_the_rule_says() -> None:
    """A change of these numbers is a new version of the grain."""
    tiny = Grain.of(heads=4, kv_heads=2, intermediate=256, vocab=512)
    small = Grain.of(heads=12, kv_heads=12, intermediate=3072, vocab=32000)
    large = Grain.of(heads=32, kv_heads=8, intermediate=14336, vocab=128256)
    odd = Grain.of(heads=5, kv_heads=1, intermediate=131, vocab=97)

    assert tiny.attention == (range(2), range(2, 4))
    assert widths(tiny.mlp) == [64] * 4
    assert widths(small.mlp) == [96] * 32
    assert widths(large.mlp) == [224] * 64
    assert widths(odd.mlp) == [64, 67]
    assert widths(tiny.vocabulary) == [128] * 4
    assert set(widths(large.vocabulary)) == {2000, 2016}
    assert widths(odd.vocabulary) == [97]


def test_wide_experts_are_of_parts_and_others_whole() -> None:
    """These numbers belong to the grain too: Mixtral-8x7B, Qwen3-30B-A3B, and two small ones."""
    dense = Grain.of(heads=32, kv_heads=8, intermediate=14336, vocab=32000)

    mixtral = dense.with_experts(8, 14336, frozenset(), 2)
    qwen3 = dense.with_experts(128, 768, frozenset({1, 3}), 8)

    assert widths(mixtral.mlp) == [1792] * 64
    assert (mixtral.expert_parts, mixtral.dense_mlp) == (8, ())
    assert widths(qwen3.mlp) == [768] * 128
    assert qwen3.expert_parts == 1
    assert [len(qwen3.mlp_of(layer)) for layer in range(4)] == [128, 64, 128, 64]
    assert widths(dense.with_experts(1, 2047, frozenset(), 1).mlp) == [2047]
    assert widths(dense.with_experts(1, 2050, frozenset(), 1).mlp) == [1024, 1026]


@given(intermediate=st.integers(1, 40_000), vocab=st.integers(1, 300_000))
def test_tiles_cover_everything_once_and_are_even(intermediate: int, vocab: int) -> None:
    """No column is lost or computed twice, and no owner of a tile has much more to do."""
    grain = Grain.of(heads=8, kv_heads=4, intermediate=intermediate, vocab=vocab)

    for tiles, size in ((grain.mlp, intermediate), (grain.vocabulary, vocab)):
        assert [at for tile in tiles for at in tile] == list(range(size))
        assert len(tiles).bit_count() == 1
        assert all(width % 16 == 0 for width in widths(tiles)[:-1])
        assert max(widths(tiles)) - min(widths(tiles)) < 32
