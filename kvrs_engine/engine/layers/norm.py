"""Normalisation over the last dimension.

Roots and divisions are rounded exactly by IEEE 754, unlike a reciprocal root on some devices.
"""

import torch
from torch import Tensor

from kvrs_engine.engine.layers.tiles import fold_sum


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows divided by their root mean square, times `weight` (Zhang and Sennrich 2019)."""
    mean_square = fold_sum(rows * rows) / rows.shape[-1]
    return rows / torch.sqrt(mean_square + eps) * weight


def layer_norm(rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Rows less their mean, divided by their standard deviation (Ba et al. 2016); then, if any,
    weight and bias.
    """
    centred = rows - fold_sum(rows) / rows.shape[-1]
    variance = fold_sum(centred * centred) / rows.shape[-1]
    normed = centred / torch.sqrt(variance + eps)
    if weight is not None:
        normed = normed * weight
    return normed if bias is None else normed + bias
