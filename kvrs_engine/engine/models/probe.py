"""A hash of sample results, equal on two machines if a model computes the same bits on both, as far
as samples can show.

The hash is needed because the name and the capability of a processor do not determine the kernels
of a matrix library: two machines of one capability may add in different orders.
"""

import hashlib

import torch
from torch import Tensor
from torch.nn.functional import silu

from kvrs_engine.engine.layers.proofs import sample
from kvrs_engine.engine.layers.step import pages_per_block
from kvrs_engine.engine.layers.tiles import GROUP_MATRICES, TILE_ROWS, batched_product
from kvrs_engine.engine.model_config import ModelConfig

# Longer than any SIMD vector, and not a multiple of a vector's length.
_ELEMENTS = 1003


def probe_digest(config: ModelConfig, page_size_tokens: int, device: torch.device) -> bytes:
    """Return a hash of sample results: one product of every shape of the model's units and of its
    attention, and the functions that are not exactly rounded.
    """
    total = hashlib.blake2b(digest_size=16, person=b"kvrs-probe")

    def add(result: Tensor) -> None:
        total.update(result.contiguous().cpu().numpy().tobytes())

    with torch.inference_mode():
        for inner, columns in sorted(_shapes(config)):
            weight = sample(columns, inner, device).t()
            add(torch.mm(sample(TILE_ROWS, inner, device), weight))
        rows, width = config.heads // config.kv_heads * TILE_ROWS, config.head_dim
        keys = pages_per_block(page_size_tokens) * page_size_tokens
        for inner, columns in ((width, keys), (keys, width)):
            left = sample(GROUP_MATRICES * rows, inner, device).view(GROUP_MATRICES, rows, inner)
            right = sample(GROUP_MATRICES * columns, inner, device)
            right = right.view(GROUP_MATRICES, columns, inner).transpose(1, 2)
            add(batched_product(left, right))
        values = sample(1, _ELEMENTS, device) * 20
        for function in (torch.exp, silu, torch.sqrt):
            add(function(values.abs()))
        # Rotary tables are computed on the host.
        angles = sample(1, _ELEMENTS, torch.device("cpu")) * 8000
        for function in (torch.cos, torch.sin):
            add(function(angles))
    return total.digest()


def _shapes(config: ModelConfig) -> set[tuple[int, int]]:
    """Return (inner size, columns) of every product over rows."""
    hidden, shared = config.hidden, config.heads // config.kv_heads
    shapes = {
        (hidden, (shared + 2) * config.head_dim),
        (shared * config.head_dim, hidden),
        *((hidden, len(tile)) for tile in config.grain.vocabulary),
    }
    if config.experts is not None:
        shapes.add((hidden, config.experts.count))
    for tile in (*config.grain.mlp, *config.grain.dense_mlp):
        wide = len(tile) * (2 if config.mlp == "gated silu" else 1)
        shapes |= {(hidden, wide), (len(tile), hidden)}
    return shapes
