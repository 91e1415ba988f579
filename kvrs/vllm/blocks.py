"""Copies between vLLM's blocks and staged pages, in a worker.

A page is `[layers, heads, cell]` of bytes. A worker has some of the layers and heads; of each layer
one tensor `[blocks, heads, tokens, 2 * head_dim]`, in which a cell is one run of bytes.

On a GPU nothing waits for a copy. Blocks are gathered and scattered on the stream of vLLM's steps,
so that they are read behind the step that filled them and before one that uses them anew; what
crosses to the host or from it does so on a stream for each direction.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrs.errors import KvrsError
from kvrs.protocol.geometry import KvGeometry
from kvrs.vllm.staging import StagingPlace, open_staging

Cells = np.ndarray[Any, np.dtype[Any]]  # `[heads, elements]` of one layer of a page.
# Slot and block of each page that is copied.
Copies = Sequence[tuple[int, int]]
# Whether copies have been made; it does not wait, and raises where the GPU has failed.
Ended = Callable[[], bool]

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
        for layer, tensor in sorted(layers.items()):
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
        if [*cells] != [*range(min(cells), min(cells) + len(cells))]:
            raise KvrsError(f"layers {[*cells]}; allowed: one run of layers")
        starts = [[each.storage_offset(), *each.stride()[:2]] for each in cells.values()]
        self._element = _ELEMENTS[gcd(8, cell_bytes, *chain.from_iterable(starts))]
        self._rows = [each.view(self._element) for each in cells.values()]
        self._layers = slice(min(cells), min(cells) + len(cells))
        self._heads = slice(part.heads.start, part.heads.stop)
        self._device = self._rows[0].device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if self._device.type == "cuda":
            to_host, to_gpu = (torch.cuda.Stream(self._device) for _ in range(2))  # type: ignore[no-untyped-call]  # torch has no types here
            self._streams = to_host, to_gpu
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
        if self._streams is not None:
            # Registered with the driver, it is copied from and to without the processor.
            driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types here
            torch.cuda.check_error(driver.cudaHostRegister(pages.data_ptr(), count, 0))
            # Before the memory goes: what is mapped at its address next may be registered, too.
            registered = weakref.finalize(self, driver.cudaHostUnregister, pages.data_ptr())
            registered.atexit = False
        cells = (place.pages, self._geometry.layers, self._geometry.kv_heads, -1)
        staged = pages.view(self._element).view(cells)
        self._staged = staged[:, self._layers, self._heads]

    def save(self, copies: Copies) -> Ended:
        """Copy blocks to staged pages, which may be read when the copies have ended."""
        if not self._part.saves or not copies:
            return _ended
        assert self._staged is not None
        if self._streams is None:
            for page, block in self._on_host(copies):
                np.copyto(page, block)
            return _ended
        slots, blocks = _indexes(copies)
        blocks = blocks.to(self._device, non_blocking=True)
        picked = torch.stack([rows.index_select(0, blocks) for rows in self._rows], dim=1)
        to_host, _ = self._streams
        to_host.wait_stream(torch.cuda.current_stream(self._device))
        picked.record_stream(to_host)
        with torch.cuda.stream(to_host):
            for slot, page in zip(slots.tolist(), picked, strict=True):
                _copy_in_runs(self._staged[slot], page)
        return _ended_on(to_host)

    def load(self, copies: Copies) -> Ended:
        """Copy staged pages, which are read until the copies have ended, to blocks, which steps
        that follow may use at once.
        """
        if not copies:
            return _ended
        assert self._staged is not None
        if self._streams is None:
            for page, block in self._on_host(copies):
                np.copyto(block, page)
            return _ended
        slots, blocks = _indexes(copies)
        _, to_gpu = self._streams
        steps = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(to_gpu):
            shape = (len(copies), *self._staged.shape[1:])
            pages = torch.empty(shape, dtype=self._element, device=self._device)
            for slot, page in zip(slots.tolist(), pages, strict=True):
                _copy_in_runs(page, self._staged[slot])
        pages.record_stream(steps)
        steps.wait_stream(to_gpu)
        blocks = blocks.to(self._device, non_blocking=True)
        for layer, rows in enumerate(self._rows):
            rows.index_copy_(0, blocks, pages[:, layer])
        return _ended_on(to_gpu)

    def _on_host(self, copies: Copies) -> Iterator[tuple[Cells, Cells]]:
        """Staged cells and those of the block, for each layer of each page. Operators of torch take
        five times as long for so little.
        """
        assert self._staged is not None
        staged, layers = self._staged.numpy(), [rows.numpy() for rows in self._rows]
        for slot, block in copies:
            for page, rows in zip(staged[slot], layers, strict=True):
                yield page, rows[block]


def _indexes(copies: Copies) -> tuple[Tensor, Tensor]:
    slots, blocks = zip(*copies, strict=True)
    return torch.tensor(slots), torch.tensor(blocks)


def _copy_in_runs(target: Tensor, source: Tensor) -> None:
    """Copy between host and GPU in pieces that are one run on both sides: these take no processor
    and no buffer in between.
    """
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
    else:
        for inner_target, inner_source in zip(target, source, strict=True):
            _copy_in_runs(inner_target, inner_source)


def _ended() -> bool:
    return True


def _ended_on(stream: torch.cuda.Stream) -> Ended:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
    event.record(stream)
    return event.query
