"""Block swaps between a logical GPU's memory and the host's: on a CPU both are the same, so
a copy is all.
"""

import torch
from torch import Tensor


def swap(
    sources: list[int],
    targets: list[int],
    is_swap_in: bool,
    k_cache: Tensor,
    v_cache: Tensor,
    k_swap: Tensor,
    v_swap: Tensor,
) -> None:
    for cache, host in ((k_cache, k_swap), (v_cache, v_swap)):
        left, right = (cache, host) if is_swap_in else (host, cache)
        left[torch.tensor(targets, dtype=torch.int64)] = right[
            torch.tensor(sources, dtype=torch.int64)
        ]
