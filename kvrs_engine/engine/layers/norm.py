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


def layer_norm(rows: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Rows less their mean, divided by their standard deviation, times `weight`, and `bias` (Ba et
    al. 2016).
    """
    centred = rows - fold_sum(rows) / rows.shape[-1]
    variance = fold_sum(centred * centred) / rows.shape[-1]
    return centred / torch.sqrt(variance + eps) * weight + bias
