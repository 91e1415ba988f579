"""Rotary position embedding (Su et al. 2021), in the half-split form of Hugging Face
checkpoints.
"""

import math

import torch
from torch import Tensor

from kvrs_engine.engine.model_config import RopeScaling

# The table has whole SIMD vectors, so that its last entries are computed by the same code as in a
# longer table.
_ROWS_MULTIPLE = 32


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the radians per position, `[head_dim / 2]`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (theta**exponents)
    return plain if scaling is None else _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale long wavelengths, keep short ones, and interpolate between them (Llama 3.1)."""
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
        # The table has the sign of the rotation, so that `rotate` only swaps halves.
        self._cos = torch.cat((cos, cos), 1).to(device)
        self._sin = torch.cat((-sin, sin), 1).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables `[rows, 1, 1, head_dim]` for `rotate`."""
        shape = (positions.shape[0], 1, 1, -1)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        return cos.view(shape), sin.view(shape)


def rotate(heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `[rows, units, heads, head_dim]` by each row's position."""
    cos, sin = tables
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    return heads * cos + swapped * sin
