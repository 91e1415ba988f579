"""Block migration: a decoding worker copies its part of a request's blocks from the context
workers' caches. Block swaps between a logical GPU's memory and the host's are copies too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distserve_patches.cpu.memory import Handle, is_gone, open_handle
from distserve_patches.cpu.shards import part_of
from kvrs.protocol.pages import Part


@dataclass(frozen=True, slots=True)
class _Source:
    part: Part
    handle: Handle
    keys: Tensor
    values: Tensor


_sources: dict[tuple[int, int], _Source] = {}  # By pipeline and tensor rank.


def register(
    key_handle: Handle,
    value_handle: Handle,
    layers: int,
    heads: int,
    context: list[int],
    decoding: list[int],
) -> None:
    """Record one context worker's caches. `context` and `decoding` are the ranks of that worker and
    of this worker, from upstream's `ParallelConfig.to_list`.
    """
    part = part_of(context, layers, heads)
    if part.shared(part_of(decoding, layers, heads)) is None:
        return
    _, tensor_rank, _, pipeline_rank = context
    _sources[pipeline_rank, tensor_rank] = _Source(
        part, key_handle, open_handle(key_handle), open_handle(value_handle)
    )


def migrate_blocks(
    context_pipeline_size: int,
    context_tensor_size: int,
    context_blocks: list[int],
    pipeline_size: int,
    tensor_size: int,
    pipeline_rank: int,
    tensor_rank: int,
    blocks: list[int],
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """Copy `context_blocks` into `blocks` of this worker's caches.

    Raises:
        RuntimeError: a context worker with part of the blocks is gone.
    """
    layers, heads = pipeline_size * k_cache.shape[1], tensor_size * k_cache.shape[2]
    own = part_of([tensor_size, tensor_rank, pipeline_size, pipeline_rank], layers, heads)
    sources = torch.tensor(context_blocks, dtype=torch.int64)
    targets = torch.tensor(blocks, dtype=torch.int64)
    for source in _sources.values():
        shared = source.part.shared(own)
        assert shared is not None, "only sources that share something are kept"
        if is_gone(source.handle):
            raise RuntimeError("the context worker that has the blocks is gone")
        for theirs, ours in ((source.keys, k_cache), (source.values, v_cache)):
            ours[(targets, *own.local(shared))] = theirs[(sources, *source.part.local(shared))]


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
