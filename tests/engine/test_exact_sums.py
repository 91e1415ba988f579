"""The building blocks of exact arithmetic, each alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.errors import KvrsError
from kvrs_engine.engine.layers import tiles
from kvrs_engine.engine.layers.norm import layer_norm
from kvrs_engine.engine.layers.tiles import (
    TILE_ROWS,
    batched_product,
    check_batched_products,
    check_tile_products,
    fold_sum,
    pair_sum,
)

pytestmark = pytest.mark.engine


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100


@settings(deadline=None)
@given(size=st.integers(1, 300), zeros=st.integers(0, 300), seed=st.integers(0, 1000))
def test_zeros_appended_change_no_sum_of_blocks(size: int, zeros: int, seed: int) -> None:
    """A short stream's blocks are padded to those of the longest one beside it."""
    values = noise(2, size, 32, seed=seed)

    padded = torch.cat((values, torch.zeros(2, zeros, 32)), 1)

    assert torch.equal(pair_sum(padded), pair_sum(values))
    assert torch.allclose(pair_sum(values), values.sum(1), atol=0.05)


@settings(deadline=None)
@given(size=st.integers(1, 300), rows=st.integers(1, 40), seed=st.integers(0, 1000))
def test_a_sum_over_features_is_the_same_in_any_company(size: int, rows: int, seed: int) -> None:
    """Row by row, in a batch, and as a slice of something wider."""
    values = noise(rows, size, seed=seed)

    together = fold_sum(values)

    assert all(torch.equal(fold_sum(values[row]), together[row]) for row in range(rows))
    assert torch.equal(fold_sum(torch.cat((values, values), 1)[:, :size]), together)
    assert torch.allclose(together, values.sum(1, keepdim=True), atol=0.05)


@settings(deadline=None)
@given(size=st.integers(2, 300), rows=st.integers(1, 40), seed=st.integers(0, 1000))
def test_a_norm_is_the_same_in_any_company(size: int, rows: int, seed: int) -> None:
    """Row by row, in a batch, and as a slice of something wider; and it is the norm that torch
    knows.
    """
    values, weight, bias = (
        noise(rows, size, seed=seed),
        noise(size, seed=seed + 1),
        noise(size, seed=seed + 2),
    )

    together = layer_norm(values, weight, bias, 1e-5)

    assert all(
        torch.equal(layer_norm(values[row : row + 1], weight, bias, 1e-5)[0], together[row])
        for row in range(rows)
    )
    assert torch.equal(
        layer_norm(torch.cat((values, values), 1)[:, :size], weight, bias, 1e-5), together
    )
    # Where values differ by less, what is left of them is mostly rounded away.
    differ = values.std(1) > 1e-3 * values.abs().amax(1)
    known = torch.nn.functional.layer_norm(values, (size,), weight, bias, 1e-5)
    assert torch.allclose(together[differ], known[differ], rtol=1e-4, atol=0.05)


def test_batched_products_are_made_of_groups() -> None:
    """Every product has the one shape, and equals the mathematical one."""
    left, right = noise(48, 6, 20), noise(48, 20, 10, seed=1)

    assert torch.allclose(batched_product(left, right), left @ right, rtol=1e-4, atol=1.0)
    assert torch.equal(batched_product(left, right)[16:32], torch.bmm(left[16:32], right[16:32]))


def test_a_machine_that_computes_by_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better no start than recoveries that differ in the last bit."""
    weight = noise(32, 48)
    check_tile_products(weight)
    check_batched_products(32, 20, 64, torch.device("cpu"))

    def by_place(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows @ weight + torch.arange(TILE_ROWS)[:, None] * 1e-3

    def by_group(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right + torch.arange(left.shape[0])[:, None, None] * 1e-3

    monkeypatch.setattr(torch, "mm", by_place)
    monkeypatch.setattr(tiles, "batched_product", by_group)
    with pytest.raises(KvrsError, match="not position independent"):
        check_tile_products(weight)
    with pytest.raises(KvrsError, match="not position independent"):
        check_batched_products(32, 20, 64, torch.device("cpu"))
