"""Tests on this machine before a model is served ("proofs"): products of units must be exact, and
faster forms may be used only if they give the same bytes.
"""

import math
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from kvrs.errors import KvrsError
from kvrs_engine.engine.layers.tiles import TILE_ROWS, check_tile_products
from kvrs_engine.engine.layers.units import CANONICAL, TALL, Form, product

_ROWS = sum(TALL)  # A number of rows for which every height is used once.
_VECTOR_FLOATS = 16  # The largest alignment that a kernel may distinguish: 64 bytes.


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Return whether both tensors have the same bytes; `torch.equal` would accept -0.0 for 0.0."""
    return torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))


def sample(count: int, width: int, device: torch.device) -> Tensor:
    """Return `[count, width]` pseudo-random numbers from -0.5 to 0.5, the same on every machine:
    they are derived from integers without rounding.
    """
    mixed = torch.arange(1, count * width + 1, dtype=torch.int64) * 6364136223846793005
    mixed = (mixed ^ (mixed >> 29)) * 1442695040888963407
    return ((mixed >> 40 & 0xFFFFFF).float() / 0x1000000 - 0.5).view(count, width).to(device)


def check_unit_products(weights: Iterable[Tensor]) -> None:
    """Prove for each distinct shape of units `[in, out]` that a row's bits do not depend on the
    other rows, on the unit's address, or on the stride of the rows.

    Raises:
        KvrsError: the bits depend on one of these; exact recovery is impossible with this matrix
            library.
    """
    for weight in _distinct(weights):
        check_tile_products(weight)
        rows = sample(TILE_ROWS, weight.shape[0], weight.device)
        expected = torch.mm(rows, weight)
        _demand(same_bytes(torch.mm(_spread(rows), weight), expected), weight, "width of a row")
        # Consecutive units are aligned to the common divisor of their size and the alignment.
        step = math.gcd(weight.numel(), _VECTOR_FLOATS)
        memory = weight.new_empty(4 * _VECTOR_FLOATS + weight.numel())
        for offset in range(0, 4 * _VECTOR_FLOATS, step):
            place = memory[offset : offset + weight.numel()]
            moved = place.view(weight.shape[1], weight.shape[0]).copy_(weight.t()).t()
            _demand(same_bytes(torch.mm(rows, moved), expected), weight, "address of a unit")


def proven_heights(weights: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the heights in `TALL` for which products of all these units have the canonical
    bytes.
    """
    heights = set(TALL)
    for weight in _distinct(weights):
        rows = sample(_ROWS, weight.shape[0], weight.device)
        expected = product(rows, weight, CANONICAL.heights)
        heights -= {
            height
            for height in heights
            if not same_bytes(product(rows, weight, (height, TILE_ROWS)), expected)
            or not same_bytes(product(_spread(rows), weight, (height, TILE_ROWS)), expected)
        }
    return tuple(sorted(heights | {TILE_ROWS}, reverse=True))


def is_exact(
    block: Callable[[Tensor, Form], Tensor], form: Form, width: int, device: torch.device
) -> bool:
    """Return whether a whole block has its canonical bytes in this form, for several numbers of
    rows; `width` is the width of its input.
    """
    rows = sample(_ROWS, width, device)
    expected = block(rows, CANONICAL)
    return same_bytes(block(rows, form), expected) and all(
        same_bytes(block(rows[:count], form), expected[:count]) for count in (*TALL, 3 * TILE_ROWS)
    )


class Proofs:
    """The proven properties by shape; a proof holds for all weights of the same shape in the same
    process.
    """

    def __init__(self) -> None:
        self._units: set[Hashable] = set()
        self._heights: dict[Hashable, tuple[int, ...]] = {}
        self._blocks: dict[Hashable, bool] = {}

    def check_units(self, weights: Iterable[Tensor]) -> None:
        """Run `check_unit_products` for the units that are not proven yet."""
        new = [weight for weight in _distinct(weights) if shape_of(weight) not in self._units]
        check_unit_products(new)
        self._units.update(map(shape_of, new))

    def heights(self, weights: Iterable[Tensor]) -> tuple[int, ...]:
        """Return `proven_heights` of the units; each shape is proven once."""
        common = set(TALL)
        for weight in _distinct(weights):
            if (shape := shape_of(weight)) not in self._heights:
                self._heights[shape] = proven_heights([weight])
            common &= set(self._heights[shape])
        return tuple(sorted(common, reverse=True))

    def holds(self, what: Hashable, prove: Callable[[], bool]) -> bool:
        """Return whether a property of a whole block holds, proven at its first use; `what` is its
        key, with all shapes.
        """
        if what not in self._blocks:
            self._blocks[what] = prove()
        return self._blocks[what]


PROVEN = Proofs()  # The proofs of this process, whose models often have shapes in common.


def shape_of(weight: Tensor) -> Hashable:
    return tuple(weight.shape), weight.stride(), weight.device


def _distinct(weights: Iterable[Tensor]) -> list[Tensor]:
    return list({shape_of(weight): weight for weight in weights}.values())


def _spread(rows: Tensor) -> Tensor:
    """Return the same rows as a slice of wider rows."""
    count, width = rows.shape
    wider = rows.new_zeros(count, 2 * width + _VECTOR_FLOATS)
    wider[:, width : 2 * width] = rows
    return wider[:, width : 2 * width]


def _demand(holds: bool, weight: Tensor, what: str) -> None:
    if not holds:
        raise KvrsError(
            f"the matrix library of this machine computes by the {what} (units of "
            f"{tuple(weight.shape)}): exact recovery is impossible with it"
        )
