"""The worker of kvrs that replaces upstream's. `upstream.load` comes first."""

from typing import Any

import torch

from distserve_patches.checkout import para_worker
from distserve_patches.shard import PageShard
from kvrs.errors import ConfigError


class PageWorker(PageShard, para_worker()):  # type: ignore[misc]  # A class that exists at run time only.
    """Upstream's worker, with export and import of pages, and with answers only after the device is
    done.
    """

    def init_kvcache_and_swap(self, num_gpu_blocks: int, num_cpu_blocks: int) -> Any:
        """Refuse a cache without blocks, which upstream would make and which has no handle."""
        if num_gpu_blocks < 1:
            given = self.cache_config.gpu_memory_utilization
            raise ConfigError(
                f"--gpu-memory-utilization: got {given}; allowed: more (the model "
                f"leaves no room for one block of KV)"
            )
        return super().init_kvcache_and_swap(num_gpu_blocks, num_cpu_blocks)

    def model_s(self) -> float:
        """Return the seconds that all steps so far have spent in the model."""
        return float(self.execution_time)

    def migrate_blocks(self, *args: Any) -> None:
        """Answer when the copies are done. Upstream answers at their launch, and the context stage
        then gives away blocks that are still read.
        """
        super().migrate_blocks(*args)
        if self.k_cache.is_cuda:
            torch.cuda.current_stream(self.k_cache.device).synchronize()

    def swap_blocks(
        self, request_ids: list[int], sources: list[int], targets: list[int], is_swap_in: bool
    ) -> None:
        """Record the events again behind the copies. Upstream records them before the copies, so a
        wait would have no effect.
        """
        super().swap_blocks(request_ids, sources, targets, is_swap_in)
        if is_swap_in:
            self.latest_swap_in_event.record(self.swap_in_stream)
        else:
            self.latest_swap_out_event.record(self.swap_out_stream)
