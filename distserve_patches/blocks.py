"""DistServe's block manager over the page manager of kvrs: a block is a page, which can be found by
its tag, pinned and leased.

Upstream's schedulers count blocks of requests and do not see pages with other holders, such as
peers that are being sent a page, or recoveries that wait for pages. The schedulers' only limit,
`max_num_gpu_blocks`, is therefore the number of blocks that the requests have and could get. So
every scheduled request finds its blocks, and upstream's assertions hold under any pins.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from distserve.block_manager import BlockLocation, BlockManager

from kvrs.errors import KvrsError
from kvrs_engine.scheduling.pages import PageManager

log = logging.getLogger(__name__)


def _no_room_to_swap(request: Any) -> None:
    raise KvrsError(
        f"there is no swap space left for request {request.request_id}; --swap-space gives more"
    )


class PagedBlockManager(BlockManager):  # type: ignore[misc]  # Upstream has no types.
    """Upstream's block manager for the host, with a page manager for the GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take upstream's arguments."""
        # GPU blocks. A block that two requests share counts twice, as in the schedulers.
        self._blocks_in_tables = 0
        self._last_swap_out: Sequence[Awaitable[object]] = ()
        self.free_gpu_blocks_list: list[int]
        self.swapping_gpu_blocks_list: list[int]
        super().__init__(*args, **kwargs)
        self.pages = PageManager(len(self.free_gpu_blocks_list), self.cache_config.block_size)
        self.free_gpu_blocks_list = []  # The page manager has the free pages from here on.
        # Called with a request that has no blocks any more, since no swap space was left.
        self.on_swap_full: Callable[[Any], None] = _no_room_to_swap

    # Calls of the schedulers.

    @property
    def max_num_gpu_blocks(self) -> int:
        """Number of blocks that requests have and could get; pages that peers pin are left out."""
        return self.pages.free_pages + self._blocks_in_tables

    @max_num_gpu_blocks.setter
    def max_num_gpu_blocks(self, blocks: int) -> None:
        """Ignore the total that upstream sets: the pages were made from it."""

    def get_num_avail_gpu_blocks(self) -> int:
        return self.pages.free_pages

    def print_block_usage(self) -> None:
        log.debug(
            "%s stage: %s blocks in use, %s free",
            self.stage,
            self._blocks_in_tables,
            self.pages.free_pages,
        )

    # Ownership.

    def gpu_blocks(self, request_id: int) -> list[int]:
        """The request's pages, in order; none while the request is swapped out or unknown. A swap
        changes the pages.
        """
        on_gpu = self.request_location.get(request_id) is BlockLocation.GPU
        return list(self.block_table[request_id]) if on_gpu else []

    def adopt(self, request: Any, blocks: Sequence[int]) -> None:
        """Give these blocks to the request: the first blocks hold the KV of its whole input, the
        others are given back.

        The caller passes on a hard pin of each block. Reserved blocks are excluded: the schedulers
        take all blocks in tables for those of requests in their queues. The block that is written
        next must belong to the request alone.
        """
        request_id, tokens = request.request_id, request.get_input_len()
        assert request_id not in self.block_table, f"request {request_id} has blocks"
        kept = -(-tokens // self.pages.page_size_tokens)
        assert len(blocks) >= kept, f"{len(blocks)} blocks do not hold {tokens} tokens"
        written = blocks[tokens // self.pages.page_size_tokens : kept]
        assert all(self.pages.references[block] == 1 for block in written), (
            "a block that others read is about to be written"
        )
        self.block_table[request_id] = list(blocks[:kept])
        self.request_location[request_id] = BlockLocation.GPU
        self._blocks_in_tables += kept
        self.pages.release(blocks[kept:])

    def free_blocks(self, request_id: int) -> None:
        blocks = self.gpu_blocks(request_id)
        super().free_blocks(request_id)
        self._give_back(blocks)

    def _get_free_blocks(self, num_blocks: int, location: Any) -> list[int]:
        if location is not BlockLocation.GPU:
            return list(super()._get_free_blocks(num_blocks, location))
        blocks = self.pages.allocate(num_blocks)
        assert blocks is not None, (
            f"{num_blocks} blocks are wanted where {self.pages.free_pages} are free"
        )
        self._blocks_in_tables += num_blocks
        return blocks

    def _give_back(self, blocks: list[int]) -> None:
        self.free_gpu_blocks_list.clear()
        self._blocks_in_tables -= len(blocks)
        self.pages.release(blocks)

    # Swapping.

    def swap_out_requests(self, requests: list[Any]) -> None:
        """Swap requests out. A request without room is given up instead, and `on_swap_full` is
        called.
        """
        for request in requests:
            if self.get_allocated_num_blocks(request.request_id) <= self.get_num_avail_cpu_blocks():
                super().swap_out_requests([request])
            else:
                self.free_blocks(request.request_id)
                self.on_swap_full(request)

    def swap_requests(self, requests: list[Any], is_swap_in: bool) -> None:
        """Swap, and make the workers finish swapping out before their next call. Upstream lets
        blocks rest that are being copied out until blocks run short, which is just then.
        """
        super().swap_requests(requests, is_swap_in)
        if not is_swap_in:
            self._last_swap_out = self.engine_remote_call_all_workers_async("wait_for_all_swap_out")
            copied, self.swapping_gpu_blocks_list = self.swapping_gpu_blocks_list, []
            self._give_back(copied)

    async def swapped_out(self) -> None:
        """Wait until no free block is still being copied out.

        Only writes into blocks past the workers' queue of steps need this wait. The workers keep
        order, so the last call stands for all earlier calls.
        """
        while self._last_swap_out:
            waited_for = self._last_swap_out
            await asyncio.gather(*waited_for)
            if waited_for is self._last_swap_out:
                self._last_swap_out = ()

    def check(self) -> None:
        """Assert that the books agree. O(blocks)."""
        on_gpu = [self.gpu_blocks(request_id) for request_id in self.block_table]
        assert self._blocks_in_tables == sum(map(len, on_gpu)), "blocks in tables do not add up"
        assert not self.free_gpu_blocks_list
        assert not self.swapping_gpu_blocks_list
        for blocks in on_gpu:
            assert len(set(blocks)) == len(blocks), "a block is twice in a table"
            assert all(self.pages.references[block] > 0 for block in blocks), (
                "a block in a table is free"
            )
        self.pages.check()
