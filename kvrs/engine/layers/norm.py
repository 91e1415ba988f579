"""Normalisation of rows."""

import torch
from torch import Tensor

from kvrs.engine.layers.tiles import fold_sum


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows divided by their root mean square, times `weight` (Zhang and Sennrich 2019)."""
    mean_square = fold_sum(rows * rows) / rows.shape[1]
    # A root and a division are rounded exactly by IEEE 754, unlike a reciprocal root on some devices.
    return rows / torch.sqrt(mean_square + eps) * weight
