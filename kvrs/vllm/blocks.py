"""Copies between vLLM's blocks and staged pages, in a worker.

A page is `[layers, heads, cell]` of bytes. A worker has some of the layers and heads; of each layer
one tensor `[blocks, heads, tokens, 2 * head_dim]`, in which a cell is one run of bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd

import torch
from torch import Tensor

from kvrs.errors import KvrsError
from kvrs.protocol.geometry import KvGeometry
from kvrs.vllm.staging import StagingPlace, open_staging

# Slot and block of each page that is copied.
Copies = Sequence[tuple[int, int]]

# Elements that are copied, by their bytes: torch copies an indexed cell element by element.
_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """The KV heads that a worker has in each of its layers, and whether it is the one of several
    with the same heads that saves them.
    """

    heads: range
    saves: bool


def part_of(kv_heads: int, tp_rank: int, tp_size: int) -> WorkerPart:
    """How vLLM divides KV heads: equally, or each among several ranks where there are fewer."""
    if kv_heads >= tp_size:
        per_rank = kv_heads // tp_size
        return WorkerPart(range(tp_rank * per_rank, (tp_rank + 1) * per_rank), saves=True)
    replicas = tp_size // kv_heads
    head = tp_rank // replicas
    return WorkerPart(range(head, head + 1), saves=tp_rank % replicas == 0)


class Blocks:
    """The KV tensors of one worker."""

    def __init__(
        self, geometry: KvGeometry, part: WorkerPart, layers: Mapping[int, Tensor]
    ) -> None:
        """`layers`: tensors by the number of the layer in the model.

        Raises:
            KvrsError: a tensor has another shape or order; the message says which.
        """
        self._geometry, self._part = geometry, part
        cell_bytes = geometry.page_bytes // geometry.page_cells
        heads, tokens = len(part.heads), geometry.page_size_tokens
        cells: dict[int, Tensor] = {}
        for layer, tensor in layers.items():
            shape, width = tuple(tensor.shape), 2 * geometry.head_dim
            if len(shape) != 4 or shape[1:] != (heads, tokens, width):
                raise KvrsError(
                    f"layer {layer}: KV of shape {shape}; allowed: (blocks, {heads}, {tokens}, "
                    f"{width})"
                )
            if tensor.element_size() != geometry.dtype_bytes:
                raise KvrsError(
                    f"layer {layer}: KV of {tensor.element_size()} bytes; allowed: "
                    f"{geometry.dtype_bytes}"
                )
            if tensor.stride()[2:] != (width, 1):
                raise KvrsError(
                    f"layer {layer}: strides {tensor.stride()}; allowed: each head of a block in "
                    f"one run (a layout with heads before tokens)"
                )
            if layer not in range(geometry.layers):
                raise KvrsError(f"layer {layer}; allowed: below {geometry.layers}")
            cells[layer] = tensor.view(torch.uint8).flatten(2)
            assert cells[layer].shape[2] == cell_bytes
        starts = [[each.storage_offset(), *each.stride()[:2]] for each in cells.values()]
        self._element = _ELEMENTS[gcd(8, cell_bytes, *chain.from_iterable(starts))]
        self._rows = {layer: each.view(self._element) for layer, each in cells.items()}
        self._staged: Tensor | None = None

    def open(self, place: StagingPlace) -> None:
        """Use this staging memory; more than once is harmless.

        Raises:
            KvrsError, OSError: it cannot be used.
        """
        if self._staged is not None:
            return
        if place.page_bytes != self._geometry.page_bytes:
            raise KvrsError(
                f"staged pages of {place.page_bytes} bytes; allowed: {self._geometry.page_bytes}"
            )
        self._region = open_staging(place)  # Kept: the tensor is its memory.
        count = place.pages * place.page_bytes
        pages = torch.frombuffer(self._region.memory, dtype=torch.uint8, count=count)
        cells = (place.pages, self._geometry.layers, self._geometry.kv_heads, -1)
        self._staged = pages.view(self._element).view(cells)

    def save(self, copies: Copies) -> None:
        """Copy blocks to staged pages. They are there when this returns."""
        if not self._part.saves or not copies:
            return
        assert self._staged is not None
        slots, blocks = _indexes(copies)
        heads = slice(self._part.heads.start, self._part.heads.stop)
        for layer, rows in self._rows.items():
            picked = rows.index_select(0, blocks.to(rows.device)).cpu()
            self._staged[:, layer, heads].index_copy_(0, slots, picked)

    def load(self, copies: Copies) -> None:
        """Copy staged pages to blocks."""
        if not copies:
            return
        assert self._staged is not None
        slots, blocks = _indexes(copies)
        heads = slice(self._part.heads.start, self._part.heads.stop)
        for layer, rows in self._rows.items():
            picked = self._staged[:, layer, heads].index_select(0, slots).to(rows.device)
            rows.index_copy_(0, blocks.to(rows.device), picked)


def _indexes(copies: Copies) -> tuple[Tensor, Tensor]:
    slots, blocks = zip(*copies, strict=True)
    return torch.tensor(slots), torch.tensor(blocks)
