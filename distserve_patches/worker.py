"""The worker that our engine starts in place of upstream's. `upstream.load` comes first."""

from typing import Any

import torch

from distserve_patches.shard import PageShard
from distserve_patches.upstream import para_worker
from kvrs.errors import ConfigError


class PageWorker(PageShard, para_worker()):  # type: ignore[misc]  # A class that exists at run time only.
    """Pages go out and in, and an answer means that the device is done."""

    def init_kvcache_and_swap(self, num_gpu_blocks: int, num_cpu_blocks: int) -> Any:
        """Upstream would make a cache without blocks, of which there is no handle to give out."""
        if num_gpu_blocks < 1:
            given = self.cache_config.gpu_memory_utilization
            raise ConfigError(
                [f"--gpu-memory-utilization: got {given}; allowed: more (the model leaves no room for one block of KV)"]
            )
        return super().init_kvcache_and_swap(num_gpu_blocks, num_cpu_blocks)

    def migrate_blocks(self, *args: Any) -> None:
        """Upstream answers when the copies are launched; the context stage then gives away blocks that are still being read."""
        super().migrate_blocks(*args)
        if self.k_cache.is_cuda:
            torch.cuda.current_stream(self.k_cache.device).synchronize()

    def swap_blocks(self, request_ids: list[int], sources: list[int], targets: list[int], is_swap_in: bool) -> None:
        """Upstream records the event that others wait for before it launches the copies; here it is recorded behind them."""
        super().swap_blocks(request_ids, sources, targets, is_swap_in)
        if is_swap_in:
            self.latest_swap_in_event.record(self.swap_in_stream)
        else:
            self.latest_swap_out_event.record(self.swap_out_stream)
