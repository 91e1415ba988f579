"""Rotary position embedding (Su et al. 2021), in the half-split form of Hugging Face
checkpoints.
"""

import math

import torch
from torch import Tensor

from kvrs_engine.engine.model_config import RopeScaling

# A table of whole SIMD vectors: the last entries must not be computed by other code than the same
# entries of a longer table.
_ROWS_MULTIPLE = 32


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position, `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (theta**exponents)
    return plain if scaling is None else _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched, short ones stay, those between are blended (Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    longest = scaling.original_positions / scaling.low_freq_factor
    shortest = scaling.original_positions / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) / span
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    stretched = torch.where(wavelength > longest, plain / scaling.factor, blended)
    return torch.where(wavelength < shortest, plain, stretched)


class RotaryTable:
    """Cosines and sines of every position, computed once."""

    def __init__(self, frequencies: Tensor, positions: int, device: torch.device) -> None:
        rows = -(-positions // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
        angles = torch.arange(rows).float()[:, None] * frequencies[None, :]
        cos, sin = angles.cos(), angles.sin()
        # The sign of the rotation sits in the table, so that rotating is a plain swap of halves.
        self._cos = torch.cat((cos, cos), 1).to(device)
        self._sin = torch.cat((-sin, sin), 1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables `[rows, 1, 1, head_dim]` for `rotate`."""
        shape = (positions.shape[0], 1, 1, -1)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return cos.view(shape), sin.view(shape)


def rotate(heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn `[rows, units, heads, head_dim]` by each row's position."""
    cos, sin = tables
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    return heads * cos + swapped * sin
