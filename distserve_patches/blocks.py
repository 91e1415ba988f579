"""DistServe's block manager over our page manager: a block is a page, so it can be found by its
tag, pinned and leased.

Upstream's schedulers count blocks of requests and do not see pages that others hold: peers that are
being sent a page, recoveries whose pages are on their way in. So the one number that they compare
with, `max_num_gpu_blocks`, is what the requests have in their tables plus what could still be given
to them. With it, whatever the schedulers let through finds its blocks, and upstream's assertions
hold under any pins.
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
    """Upstream's block manager for the host, a page manager for the GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take upstream's arguments."""
        # On the GPU. A block that two requests share counts twice, as the schedulers count it.
        self._blocks_in_tables = 0
        self._last_swap_out: Sequence[Awaitable[object]] = ()
        self.free_gpu_blocks_list: list[int]
        self.swapping_gpu_blocks_list: list[int]
        super().__init__(*args, **kwargs)
        self.pages = PageManager(len(self.free_gpu_blocks_list), self.cache_config.block_size)
        self.free_gpu_blocks_list = []  # From here on pages say what is free.
        # Called with a request that should be swapped out and finds no room; it has no blocks any
        # more.
        self.on_swap_full: Callable[[Any], None] = _no_room_to_swap

    # What the schedulers ask.

    @property
    def max_num_gpu_blocks(self) -> int:
        """How many blocks requests have and could get; pages that others pin are not counted."""
        return self.pages.free_pages + self._blocks_in_tables

    @max_num_gpu_blocks.setter
    def max_num_gpu_blocks(self, blocks: int) -> None:
        """Ignored: upstream sets the total, from which the pages were made."""

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
        """The request's pages, in order; none while it is swapped out or unknown. A swap changes
        them.
        """
        on_gpu = self.request_location.get(request_id) is BlockLocation.GPU
        return list(self.block_table[request_id]) if on_gpu else []

    def adopt(self, request: Any, blocks: Sequence[int]) -> None:
        """Make these the request's blocks: the first ones hold the KV of its whole input, the
        others are given back.

        The caller has a hard pin on each, which passes over. Not for blocks that are only
        reserved: the schedulers take all blocks in tables for those of requests in their queues.
        The block that is written next must be the request's alone.
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
        """Swap requests out. Those for which there is no room are given up instead: `on_swap_full`
        is called with each.
        """
        for request in requests:
            if self.get_allocated_num_blocks(request.request_id) <= self.get_num_avail_cpu_blocks():
                super().swap_out_requests([request])
            else:
                self.free_blocks(request.request_id)
                self.on_swap_full(request)

    def swap_requests(self, requests: list[Any], is_swap_in: bool) -> None:
        """Swap, and have the workers finish swapping out before their next call. Upstream lets
        blocks that are being copied out rest until blocks run short, which is just then.
        """
        super().swap_requests(requests, is_swap_in)
        if not is_swap_in:
            self._last_swap_out = self.engine_remote_call_all_workers_async("wait_for_all_swap_out")
            copied, self.swapping_gpu_blocks_list = self.swapping_gpu_blocks_list, []
            self._give_back(copied)

    async def swapped_out(self) -> None:
        """Wait until no block that is free by now is still being copied out.

        Needed only before writing into blocks past the workers' queue of steps. The workers keep
        order, so the last call stands for all before it.
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
