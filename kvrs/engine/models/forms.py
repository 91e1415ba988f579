"""In which form this machine computes the blocks of a model."""

from collections.abc import Callable, Sequence

from torch import Tensor

from kvrs.engine.layers.proofs import check_unit_products, is_exact, proven_heights
from kvrs.engine.layers.units import ColumnUnits, Form
from kvrs.engine.models.decoder import Forms, Layer

# Up to this size of a block's widest matrix the cost of calls outweighs that of arithmetic; above
# it, a unit's weights stay in a core's cache while all rows pass.
_TOGETHER_BYTES = 2 << 20


def choose_forms(layer: Layer, head: ColumnUnits) -> Forms:
    """Prove on this machine that products of the model's units are exact, and take the fastest form
    of each block that has the canonical bytes. All layers have the shapes of that one.

    Raises:
        KvrsError: this machine's matrix library cannot compute exactly.
    """
    attention, mlp = layer.attention, layer.mlp
    check_unit_products(
        [
            *attention.qkv.weights,
            *attention.output.weights,
            *mlp.up.weights,
            *mlp.down.weights,
            *head.weights,
        ]
    )
    inner = sum(unit.shape[0] for unit in attention.output.weights)
    width = attention.qkv.matrix.shape[0]
    return Forms(
        qkv=_form(width, attention.qkv.weights, attention.qkv.side_by_side),
        output=_form(inner, attention.output.weights, attention.output),
        mlp=_form(width, mlp.up.weights, mlp, mlp.down.weights, even=mlp.down.stacked is not None),
        head=_form(head.matrix.shape[0], head.weights, head.joined),
    )


def _form(
    width: int,
    weights: Sequence[Tensor],
    block: Callable[[Tensor, Form], Tensor],
    more: Sequence[Tensor] = (),
    *,
    even: bool = True,
) -> Form:
    """The form of a block of those units whose input has that width; `even`: they can be computed
    together.
    """
    device = weights[0].device
    heights = proven_heights([*weights, *more])
    size_bytes = sum(weight.nbytes for weight in weights)
    if even and (size_bytes <= _TOGETHER_BYTES or device.type == "cuda"):
        together = Form(heights, together=True)
        if is_exact(block, together, width, device):
            return together
    return Form(heights, together=False)
