"""A worker's part of its stage's pages, copied out and in beside the steps.

Ray runs the calls of one concurrency group in order, and different groups in parallel. `PAGES` is a
separate group, so no copy waits for a step, and no step for a copy. Their memory is kept apart:

- Out: only pages with a hard pin are copied. A full block is never written again, because positions
  only grow, and a pinned block gets no other owner. A block is whole before its pin: the step,
  migration or import that filled the block has answered, and an answer means that the data is
  there, also on a GPU (`worker.py` makes sure of it for migrations).
- In: the pages belong to the caller alone, so no step reads or writes them. Their last owner may
  still be swapped out: the caller waits until the workers have finished the swap
  (`PagedBlockManager.swapped_out`), and the copy waits for the device.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from distserve_patches.staging import StagingFile

PAGES = "pages"


class PageShard:
    """A mix-in for upstream's worker."""

    # Upstream's keys and values `[blocks, layers, kv_heads, block_size, head_dim]` of this rank.
    k_cache: Tensor
    v_cache: Tensor
    parallel_config: Any
    swap_out_stream: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._segments: dict[tuple[StagingFile, int], Tensor] = {}
        self._side: torch.cuda.Stream | None = None

    @ray.method(concurrency_group=PAGES)  # type: ignore[untyped-decorator]  # Ray has no types here.
    def export_pages(self, file: StagingFile, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy this rank's part of the pages into the slots, synchronously."""
        self._copy([(host, cache) for cache, host in self._pairs(file, slots, pages)])

    @ray.method(concurrency_group=PAGES)  # type: ignore[untyped-decorator]  # Ray has no types here.
    def import_pages(self, file: StagingFile, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy this rank's part of the slots into the pages, synchronously."""
        self._copy(list(self._pairs(file, slots, pages)))

    def _pairs(
        self, file: StagingFile, slots: Sequence[int], pages: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of each page in a cache and in a slot: `[layers, kv_heads, block_size,
        head_dim]` of this rank.
        """
        layers, heads = self._part()
        blocks = self.k_cache.shape[0]
        for slot, page in zip(slots, pages, strict=True):
            assert 0 <= page < blocks, f"there is no block {page}"
            number, index = divmod(slot, file.slots_per_segment)
            part = self._segment(file, number)[index, layers, heads]
            yield self.k_cache[page], part[:, :, 0]
            yield self.v_cache[page], part[:, :, 1]

    def _part(self) -> tuple[slice, slice]:
        """The layers and KV heads of this rank."""
        layers, heads = self.k_cache.shape[1:3]
        first_layer = self.parallel_config.pipeline_parallel_rank * layers
        first_head = self.parallel_config.tensor_parallel_rank * heads
        return slice(first_layer, first_layer + layers), slice(first_head, first_head + heads)

    def _segment(self, file: StagingFile, number: int) -> Tensor:
        """The segment: `[slots, layers, kv_heads, 2, block_size, head_dim]` of the whole model."""
        found = self._segments.get((file, number))
        if found is None:
            found = self._segments[file, number] = self._map(file, number)
        return found

    def _map(self, file: StagingFile, number: int) -> Tensor:
        _, layers, heads, block_size, head_dim = self.k_cache.shape
        layers *= self.parallel_config.pipeline_parallel_size
        heads *= self.parallel_config.tensor_parallel_size
        whole = (file.slots_per_segment, layers, heads, 2, block_size, head_dim)
        page_bytes = layers * 2 * heads * block_size * head_dim * self.k_cache.itemsize
        assert page_bytes == file.page_bytes, (
            f"a page of this stage has {page_bytes} bytes, one to be staged {file.page_bytes}"
        )
        region = torch.frombuffer(file.map(number), dtype=torch.uint8)
        if self.k_cache.is_cuda:
            # Registered memory is copied without the processor.
            driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types here
            torch.cuda.check_error(driver.cudaHostRegister(region.data_ptr(), region.nbytes, 0))
        return region[: file.slots_per_segment * page_bytes].view(self.k_cache.dtype).view(whole)

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor into the first."""
        if not self.k_cache.is_cuda:
            for target, source in pairs:
                target.copy_(source)
            return
        device = self.k_cache.device
        if self._side is None:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
        # A free block may just have been swapped out.
        self._side.wait_stream(self.swap_out_stream)
        with torch.cuda.stream(self._side):
            for target, source in pairs:
                _copy_contiguously(target, source)
        # A waiting thread sleeps instead of spinning, so that the thread of steps continues.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types here
        copied.record(self._side)
        copied.synchronize()


def _copy_contiguously(target: Tensor, source: Tensor) -> None:
    """Copy in pieces that are contiguous on both sides, which need no processor and no buffer
    between host and GPU.
    """
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
    else:
        for inner_target, inner_source in zip(target, source, strict=True):
            _copy_contiguously(inner_target, inner_source)
