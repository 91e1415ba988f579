"""In which form this machine computes the blocks of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrs.engine.layers.proofs import check_unit_products, is_exact, proven_heights
from kvrs.engine.layers.units import CANONICAL, ColumnUnits, Form
from kvrs.engine.models.decoder import Forms, Layer

# Up to this size of a block's widest matrix the cost of calls outweighs that of arithmetic; above
# it, a unit's weights stay in a core's cache while all rows pass.
TOGETHER_BYTES = 2 << 20


def choose_forms(layers: Sequence[Layer], head: ColumnUnits | None) -> Forms:
    """Prove on this machine that products of the model's units are exact, and take the fastest form
    of each kind of block that has the canonical bytes in all layers. Layers with equally many units
    have the same shapes.

    Raises:
        KvrsError: this machine's matrix library cannot compute exactly.
    """
    qkv, output, mlp = [], [], []
    for layer in layers:
        attention, inner = layer.attention, layer.mlp
        width = attention.qkv.matrix.shape[0]
        qkv.append(_Block(width, attention.qkv.weights, attention.qkv.side_by_side))
        heads = sum(unit.shape[0] for unit in attention.output.weights)
        output.append(_Block(heads, attention.output.weights, _joined(attention.output.sums)))
        even, up, down = inner.down.stacked is not None, inner.up.weights, inner.down.weights
        mlp.append(_Block(width, up, _joined(inner.sums), down, even))
    vocabulary = [] if head is None else [_Block(head.matrix.shape[0], head.weights, head.joined)]
    blocks = [
        {tuple(unit.shape for unit in block.all): block for block in of if block.weights}.values()
        for of in (qkv, output, mlp, vocabulary)
    ]
    check_unit_products(unit for of in blocks for block in of for unit in block.all)
    return Forms(*(_form(list(of)) for of in blocks))


@dataclass(frozen=True, slots=True)
class _Block:
    """Units that are computed one behind the other, or together."""

    width: int  # Of its input.
    weights: Sequence[Tensor]
    compute: Callable[[Tensor, Form], Tensor]
    more: Sequence[Tensor] = ()  # Of a second product.
    is_even: bool = True  # They can be computed together.

    @property
    def all(self) -> list[Tensor]:
        return [*self.weights, *self.more]


def _joined(sums: Callable[[Tensor, Form], list[Tensor]]) -> Callable[[Tensor, Form], Tensor]:
    """All sums of a block in one tensor, to be compared."""
    return lambda rows, form: torch.cat(sums(rows, form), 1)


def _form(blocks: Sequence[_Block]) -> Form:
    """The form of all blocks of a kind."""
    if not blocks:
        return CANONICAL
    device = blocks[0].weights[0].device
    heights = proven_heights(unit for block in blocks for unit in block.all)
    size_bytes = max(sum(unit.nbytes for unit in block.weights) for block in blocks)
    if size_bytes <= TOGETHER_BYTES or device.type == "cuda":
        together = Form(heights, together=True)
        if all(
            block.is_even and is_exact(block.compute, together, block.width, device)
            for block in blocks
        ):
            return together
    return Form(heights, together=False)
