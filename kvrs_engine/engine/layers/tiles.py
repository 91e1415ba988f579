"""Matrix products and sums whose bits for a row do not depend on the other rows.

A BLAS chooses its kernel, and so the order of its additions, by the shape of the product. Here the
shape of every product depends on the model alone: rows come in padded tiles of `TILE_ROWS`, and
small matrices in groups of `GROUP_MATRICES`.
"""

import torch
from torch import Tensor

from kvrs.errors import KvrsError

TILE_ROWS = 16
FLOAT_BYTES = 4  # All computations are in float32.
GROUP_MATRICES = 16


def padded_rows(rows: int) -> int:
    """Round `rows` up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def batched_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply many small matrices of equal shape, `[whole groups, m, k] x [whole groups, k,
    n]`.
    """
    if left.shape[0] == GROUP_MATRICES:
        return torch.bmm(left, right)
    out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    for a, b, result in zip(
        _matrix_groups(left), _matrix_groups(right), _matrix_groups(out), strict=True
    ):
        torch.bmm(a, b, out=result)
    return out


def fold_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension (kept, of size 1) by adding halves; the order depends only on the
    size.
    """
    size = values.shape[-1]
    half = 1 << (size.bit_length() - 1)
    if half < size:
        rest = values[..., half:]
        values = torch.cat((values[..., : size - half] + rest, values[..., size - half : half]), -1)
    while half > 1:
        half //= 2
        values = values[..., :half] + values[..., half:]
    return values


def pair_sum(values: Tensor) -> Tensor:
    """Sum over dimension 1 (dropped) by adding neighbours, then neighbouring sums.

    A value without a neighbour passes on unchanged, so that zeros appended to the dimension do not
    change the result.
    """
    while (size := values.shape[1]) > 1:
        even = size - size % 2
        sums = values[:, 0:even:2] + values[:, 1:even:2]
        values = sums if even == size else torch.cat((sums, values[:, even:]), 1)
    return values.squeeze(1)


def check_tile_products(weight: Tensor) -> None:
    """Prove on this machine that a row's bits in the product of a tile depend neither on its place
    in the tile nor on the other rows.

    Raises:
        KvrsError: the bits differ; exact recovery is impossible with this matrix library.
    """
    rows = _sample((TILE_ROWS, weight.shape[0]), weight.device)
    expected = torch.mm(rows, weight)
    for shift in range(1, TILE_ROWS):
        _demand(
            torch.equal(torch.mm(rows.roll(shift, 0), weight), expected.roll(shift, 0)),
            f"rows of {tuple(weight.shape)}",
        )
    alone = torch.zeros_like(rows)
    alone[0] = rows[0]
    _demand(
        torch.equal(torch.mm(alone, weight)[0], expected[0]), f"neighbours of {tuple(weight.shape)}"
    )


def check_batched_products(rows: int, inner: int, columns: int, device: torch.device) -> None:
    """Prove on this machine that the bits of `batched_product` depend neither on the place of a row
    nor on the place of a matrix in its group.

    Raises:
        KvrsError: as `check_tile_products`.
    """
    left = _sample((GROUP_MATRICES, rows, inner), device)
    right = _sample((GROUP_MATRICES, inner, columns), device)
    shape = f"{rows}x{inner}x{columns}"
    for transposed in (False, True):
        other = right.transpose(1, 2).contiguous().transpose(1, 2) if transposed else right
        expected = batched_product(left, other)
        for shift in range(1, GROUP_MATRICES):
            moved = batched_product(
                left.roll(shift, 0), torch.cat((other[-shift:], other[:-shift]))
            )
            _demand(torch.equal(moved, expected.roll(shift, 0)), f"places of {shape}")
        for shift in range(1, rows):
            _demand(
                torch.equal(batched_product(left.roll(shift, 1), other), expected.roll(shift, 1)),
                f"rows of {shape}",
            )


def _matrix_groups(matrices: Tensor) -> list[Tensor]:
    assert matrices.shape[0] % GROUP_MATRICES == 0, "matrices come in whole groups"
    return [
        matrices[start : start + GROUP_MATRICES]
        for start in range(0, matrices.shape[0], GROUP_MATRICES)
    ]


def _sample(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise KvrsError(
            f"the matrix library of this machine is not position independent ({what}): "
            f"exact recovery is impossible with it"
        )
