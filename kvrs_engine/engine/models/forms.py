"""The form in which this machine computes the blocks of a model."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvrs_engine.engine.layers.proofs import PROVEN, Proofs, is_exact, shape_of
from kvrs_engine.engine.layers.units import CANONICAL, ColumnUnits, Form
from kvrs_engine.engine.models.decoder import Forms, Layer

# Up to this size of a block's widest matrix the cost of calls outweighs that of arithmetic; above
# it, a unit's weights stay in a core's cache while all rows pass.
TOGETHER_BYTES = 2 << 20


def choose_forms(
    layers: Sequence[Layer], head: ColumnUnits | None, proofs: Proofs | None = None
) -> Forms:
    """Prove on this machine that products of the model's units are exact, and take the fastest form
    of each kind of block that has the canonical bytes in all layers. Layers with equally many units
    have the same shapes. What is in `proofs`, or else was proven in this process, is not proven
    again.

    Raises:
        KvrsError: this machine's matrix library cannot compute exactly.
    """
    proofs = PROVEN if proofs is None else proofs
    qkv, output, mlp, experts = [], [], [], []
    for layer in layers:
        attention, inner = layer.attention, layer.mlp
        width = attention.qkv.matrix.shape[0]
        qkv.append(_Block("qkv", width, attention.qkv.weights, attention.qkv.side_by_side))
        heads = sum(unit.shape[0] for unit in attention.output.weights)
        sums = _joined(attention.output.sums)
        output.append(_Block("output", heads, attention.output.weights, sums))
        up, down, act = inner.up.weights, inner.down.weights, inner.activation
        even, sums = inner.down.stacked is not None, _joined(inner.sums)
        if layer.experts is None:
            mlp.append(_Block("mlp", width, up, sums, down, even, act))
        else:
            # Each takes rows of its own: never together. All ranks route.
            more = (*down, layer.experts.router.weight)
            experts.append(_Block("experts", width, up, sums, more, False, act))
    vocabulary = []
    if head is not None:
        vocabulary.append(_Block("head", head.matrix.shape[0], head.weights, head.joined))
    blocks = [
        {block.shapes: block for block in of if block.all}.values()
        for of in (qkv, output, mlp, experts, vocabulary)
    ]
    proofs.check_units(unit for of in blocks for block in of for unit in block.all)
    return Forms(*(_form(list(of), proofs) for of in blocks))


@dataclass(frozen=True, slots=True)
class _Block:
    """Units that are computed one behind the other, or together."""

    kind: str
    width: int  # Of its input.
    weights: Sequence[Tensor]
    compute: Callable[[Tensor, Form], Tensor]
    more: Sequence[Tensor] = ()  # Of a second product.
    is_even: bool = True  # They can be computed together.
    activation: Callable[[Tensor], Tensor] | None = None

    @property
    def all(self) -> list[Tensor]:
        return [*self.weights, *self.more]

    @property
    def shapes(self) -> Hashable:
        """Blocks that have the same make the same products."""
        return self.kind, self.width, tuple(map(shape_of, self.all)), self.is_even, self.activation

    def is_exact(self, form: Form, device: torch.device) -> bool:
        return is_exact(self.compute, form, self.width, device)


def _joined(sums: Callable[[Tensor, Form], list[Tensor]]) -> Callable[[Tensor, Form], Tensor]:
    """All sums of a block in one tensor, to be compared."""
    return lambda rows, form: torch.cat(sums(rows, form), 1)


def _form(blocks: Sequence[_Block], proofs: Proofs) -> Form:
    """The form of all blocks of a kind."""
    if not blocks:
        return CANONICAL
    device = blocks[0].all[0].device
    heights = proofs.heights(unit for block in blocks for unit in block.all)
    size_bytes = max(sum(unit.nbytes for unit in block.weights) for block in blocks)
    is_small = size_bytes <= TOGETHER_BYTES or device.type == "cuda"
    if is_small and all(block.is_even for block in blocks):
        together = Form(heights, together=True)
        if all(
            proofs.holds((block.shapes, together), partial(block.is_exact, together, device))
            for block in blocks
        ):
            return together
    return Form(heights, together=False)
