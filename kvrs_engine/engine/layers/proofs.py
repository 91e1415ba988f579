"""Proofs on this machine before a model is served: that products of units are exact, and which
faster forms of them give the same bytes.
"""

import math
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from kvrs.errors import KvrsError
from kvrs_engine.engine.layers.tiles import TILE_ROWS, check_tile_products
from kvrs_engine.engine.layers.units import CANONICAL, TALL, Form, product

# All heights once: as many rows as every form computes in one call.
_ROWS = sum(TALL)
_VECTOR_FLOATS = 16  # The alignment up to which a kernel may distinguish addresses: 64 bytes.


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Unlike `torch.equal`, which takes -0.0 for 0.0."""
    return torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))


def sample(count: int, width: int, device: torch.device) -> Tensor:
    """`[count, width]` numbers from -0.5 to 0.5, the same on every machine: they come from integers
    without rounding.
    """
    mixed = torch.arange(1, count * width + 1, dtype=torch.int64) * 6364136223846793005
    mixed = (mixed ^ (mixed >> 29)) * 1442695040888963407
    return ((mixed >> 40 & 0xFFFFFF).float() / 0x1000000 - 0.5).view(count, width).to(device)


def check_unit_products(weights: Iterable[Tensor]) -> None:
    """Prove for each distinct shape of units `[in, out]` that a row's bits depend neither on the
    rows beside it, nor on where the unit lies in memory, nor on how far apart rows lie.

    Raises:
        KvrsError: they do; exact recovery is impossible with this matrix library.
    """
    for weight in _distinct(weights):
        check_tile_products(weight)
        rows = sample(TILE_ROWS, weight.shape[0], weight.device)
        expected = torch.mm(rows, weight)
        _demand(same_bytes(torch.mm(_spread(rows), weight), expected), weight, "width of a row")
        # Units lie one behind the other, so at multiples of what their size is a multiple of.
        step = math.gcd(weight.numel(), _VECTOR_FLOATS)
        memory = weight.new_empty(4 * _VECTOR_FLOATS + weight.numel())
        for offset in range(0, 4 * _VECTOR_FLOATS, step):
            place = memory[offset : offset + weight.numel()]
            moved = place.view(weight.shape[1], weight.shape[0]).copy_(weight.t()).t()
            _demand(same_bytes(torch.mm(rows, moved), expected), weight, "address of a unit")


def proven_heights(weights: Iterable[Tensor]) -> tuple[int, ...]:
    """Heights in `TALL` at which products of all these units have the canonical bytes."""
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
    """A whole block has its canonical bytes in that form, for several counts of rows; `width` is
    that of its input.
    """
    rows = sample(_ROWS, width, device)
    expected = block(rows, CANONICAL)
    return same_bytes(block(rows, form), expected) and all(
        same_bytes(block(rows[:count], form), expected[:count]) for count in (*TALL, 3 * TILE_ROWS)
    )


class Proofs:
    """Properties that are proven. A proof is one of shapes, so it holds for other weights of the
    same shapes in the same process.
    """

    def __init__(self) -> None:
        self._units: set[Hashable] = set()
        self._heights: dict[Hashable, tuple[int, ...]] = {}
        self._blocks: dict[Hashable, bool] = {}

    def check_units(self, weights: Iterable[Tensor]) -> None:
        """Check the products of units that are not proven, as `check_unit_products` does."""
        new = [weight for weight in _distinct(weights) if shape_of(weight) not in self._units]
        check_unit_products(new)
        self._units.update(map(shape_of, new))

    def heights(self, weights: Iterable[Tensor]) -> tuple[int, ...]:
        """Proven heights of the units, as by `proven_heights`."""
        common = set(TALL)
        for weight in _distinct(weights):
            if (shape := shape_of(weight)) not in self._heights:
                self._heights[shape] = proven_heights([weight])
            common &= set(self._heights[shape])
        return tuple(sorted(common, reverse=True))

    def holds(self, what: Hashable, prove: Callable[[], bool]) -> bool:
        """The property of a whole block, proven at its first use; `what` names it, with all shapes
        in it.
        """
        if what not in self._blocks:
            self._blocks[what] = prove()
        return self._blocks[what]


# Those of this process: its models often have shapes in common.
PROVEN = Proofs()


def shape_of(weight: Tensor) -> Hashable:
    return tuple(weight.shape), weight.stride(), weight.device


def _distinct(weights: Iterable[Tensor]) -> list[Tensor]:
    return list({shape_of(weight): weight for weight in weights}.values())


def _spread(rows: Tensor) -> Tensor:
    """The same rows as a slice of wider ones."""
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
