"""The choice of the form in which this machine computes the blocks of a model."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvrs_engine.engine.layers.proofs import PROVEN, Proofs, is_exact, shape_of
from kvrs_engine.engine.layers.units import CANONICAL, ColumnUnits, Form
from kvrs_engine.engine.models.decoder import Forms, Layer

# Up to this size of a block, one product is faster, because calls cost more than arithmetic; above
# it, products per unit are faster, because a unit's weights stay in a core's cache.
TOGETHER_BYTES = 2 << 20


def choose_forms(
    layers: Sequence[Layer], head: ColumnUnits | None, proofs: Proofs | None = None
) -> Forms:
    """Prove on this machine that products of the model's units are exact, and choose for each kind
    of block the fastest form with the canonical bytes in all layers.

    Properties in `proofs` (None: all of this process) are not proven again.

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
            # Experts take different rows, so they are never computed together. All ranks route.
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
    """Units that are computed one after the other or together."""

    kind: str
    width: int  # Width of the input.
    weights: Sequence[Tensor]
    compute: Callable[[Tensor, Form], Tensor]
    more: Sequence[Tensor] = ()  # Weights of a second product.
    is_even: bool = True  # The units can be computed together.
    activation: Callable[[Tensor], Tensor] | None = None

    @property
    def all(self) -> list[Tensor]:
        return [*self.weights, *self.more]

    @property
    def shapes(self) -> Hashable:
        """Key of the block: blocks with equal keys compute products of equal shapes."""
        return self.kind, self.width, tuple(map(shape_of, self.all)), self.is_even, self.activation

    def is_exact(self, form: Form, device: torch.device) -> bool:
        return is_exact(self.compute, form, self.width, device)


def _joined(sums: Callable[[Tensor, Form], list[Tensor]]) -> Callable[[Tensor, Form], Tensor]:
    """Return a function that computes all sums of a block in one tensor, for comparison."""
    return lambda rows, form: torch.cat(sums(rows, form), 1)


def _form(blocks: Sequence[_Block], proofs: Proofs) -> Form:
    """Choose the form of all blocks of a kind."""
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
