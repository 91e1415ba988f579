"""Checks of our worker before upstream's would fail. Ray does not run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrs.errors import ConfigError


def test_a_gpu_without_room_for_one_block_is_named_by_the_flag(distserve: Path) -> None:
    """Upstream would make a cache of no blocks, and fail with an unrelated error."""
    from distserve_patches.worker import PageWorker

    worker = object.__new__(PageWorker)
    worker.cache_config = SimpleNamespace(gpu_memory_utilization=0.01)

    with pytest.raises(ConfigError, match=r"^--gpu-memory-utilization: got 0\.01; allowed: more"):
        worker.init_kvcache_and_swap(0, 100)
