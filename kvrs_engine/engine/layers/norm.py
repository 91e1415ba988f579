"""Normalisation over the last dimension.

The code uses roots and divisions, which IEEE 754 rounds exactly, not the reciprocal root, which
some devices approximate.
"""

import torch
from torch import Tensor

from kvrs_engine.engine.layers.tiles import fold_sum


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide rows by their root mean square and multiply by `weight` (Zhang and Sennrich 2019)."""
    mean_square = fold_sum(rows * rows) / rows.shape[-1]
    return rows / torch.sqrt(mean_square + eps) * weight


def layer_norm(rows: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (rows - mean) / standard deviation * weight + bias (Ba et al. 2016)."""
    centred = rows - fold_sum(rows) / rows.shape[-1]
    variance = fold_sum(centred * centred) / rows.shape[-1]
    return centred / torch.sqrt(variance + eps) * weight + bias
