"""Logical GPU memory, migration and swapping: the operators below upstream's workers."""

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distserve_patches.cpu import memory, migration
from distserve_patches.cpu.shards import part_of
from kvrs.protocol.pages import Part

LAYERS, HEADS, BLOCK, HEAD_DIM = 4, 2, 16, 8
BLOCKS = 6
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # Tensor and pipeline parallel sizes.


def ranks(layout: tuple[int, int]) -> Iterator[list[int]]:
    """Ranks in the form of upstream's `ParallelConfig.to_list`."""
    tensor_size, pipeline_size = layout
    for pipeline_rank, tensor_rank in itertools.product(range(pipeline_size), range(tensor_size)):
        yield [tensor_size, tensor_rank, pipeline_size, pipeline_rank]


def share(whole: Tensor, parallel: list[int]) -> Tensor:
    """A rank's cache with its part of `[blocks, layers, heads, ...]`."""
    part = part_of(parallel, LAYERS, HEADS)
    own = whole[(slice(None), *Part(range(LAYERS), range(HEADS)).local(part))]
    cache = memory.allocate(own.shape, own.dtype)
    cache.copy_(own)
    return cache


def random_kv() -> Tensor:
    return torch.randn(BLOCKS, LAYERS, HEADS, BLOCK, HEAD_DIM)


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a decoding worker of its own."""
    monkeypatch.setattr(migration, "_sources", {})


@pytest.mark.parametrize("decoding", LAYOUTS, ids=str)
@pytest.mark.parametrize("context", LAYOUTS, ids=str)
def test_blocks_migrate_between_all_layouts(
    context: tuple[int, int], decoding: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decoding rank gets its own layers and heads of each block, whichever ranks of the
    context stage have them.
    """
    keys, values = random_kv(), random_kv()
    sources = {tuple(rank): (share(keys, rank), share(values, rank)) for rank in ranks(context)}
    wanted, places = [4, 0, 3], [1, 5, 2]

    for own in ranks(decoding):
        monkeypatch.setattr(migration, "_sources", {})
        k_cache, v_cache = share(torch.zeros_like(keys), own), share(torch.zeros_like(values), own)
        for rank, (source_keys, source_values) in sources.items():
            migration.register(
                memory.handle_of(source_keys),
                memory.handle_of(source_values),
                LAYERS,
                HEADS,
                list(rank),
                own,
            )
        migration.migrate_blocks(
            context[1], context[0], wanted, own[2], own[0], own[3], own[1], places, k_cache, v_cache
        )

        for cache, whole in ((k_cache, keys), (v_cache, values)):
            expected = torch.zeros_like(whole)
            expected[places] = whole[wanted]
            assert torch.equal(cache, share(expected, own))


@pytest.mark.process
def test_memory_of_another_process_is_the_same_memory() -> None:
    """A handle is a list of numbers, as a CUDA handle is, and opens the very bytes, with the row of
    zeros behind them.
    """
    tensor = memory.allocate((3, 2), torch.float32)
    parent, child = multiprocessing.Pipe()

    process = multiprocessing.get_context("fork").Process(
        target=fill, args=(memory.handle_of(tensor),)
    )
    process.start()
    process.join()

    assert process.exitcode == 0
    assert torch.equal(tensor, torch.full((3, 2), 7.0))
    assert memory.with_zero_row(tensor).tolist()[3] == [0.0, 0.0]
    parent.close()
    child.close()


def fill(handle: memory.Handle) -> None:
    memory.open_handle(handle).fill_(7.0)


def give_handle(pipe: Connection) -> None:
    tensor = memory.allocate((BLOCKS, LAYERS, HEADS, BLOCK, HEAD_DIM), torch.float32)
    pipe.send(memory.handle_of(tensor))
    pipe.recv()


@pytest.mark.process
def test_blocks_of_a_dead_worker_do_not_migrate() -> None:
    """Its memory is still mapped here; a GPU's would be gone, and what happens to requests must not
    differ.
    """
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=give_handle, args=(child,))
    process.start()
    handle = parent.recv()
    migration.register(handle, handle, LAYERS, HEADS, [1, 0, 1, 0], [1, 0, 1, 0])
    own = share(random_kv(), [1, 0, 1, 0])
    migration.migrate_blocks(1, 1, [0], 1, 1, 0, 0, [0], own, own)

    process.kill()
    process.join()

    with pytest.raises(RuntimeError, match="gone"):
        migration.migrate_blocks(1, 1, [0], 1, 1, 0, 0, [0], own, own)
    with pytest.raises(OSError, match="No such"):
        memory.open_handle(handle)
    parent.close()
    child.close()


def test_a_new_context_worker_takes_the_place_of_the_old_one() -> None:
    """Registering again is how a context stage that came back becomes known."""
    one = [1, 0, 1, 0]
    old, new = share(random_kv(), one), share(random_kv(), one)
    own = share(torch.zeros(BLOCKS, LAYERS, HEADS, BLOCK, HEAD_DIM), one)

    for source in (old, new):
        migration.register(
            memory.handle_of(source), memory.handle_of(source), LAYERS, HEADS, one, one
        )
    migration.migrate_blocks(1, 1, [2], 1, 1, 0, 0, [3], own, own)

    assert torch.equal(own[3], new[2])


def test_no_file_is_left_behind() -> None:
    """The memory has no name in any file system."""
    tensor = memory.allocate((2, 2), torch.float32)

    path = bytes(memory.handle_of(tensor)).decode().split('"')[3]

    assert Path(path).is_symlink()
    assert os.readlink(path).endswith("(deleted)")


def test_swapping_out_and_in_brings_the_same_blocks_back() -> None:
    """Swap space is one place per block, in any order."""
    cache_k, cache_v = random_kv(), random_kv()
    swap_k, swap_v = torch.zeros_like(cache_k), torch.zeros_like(cache_v)
    before_k, before_v = cache_k.clone(), cache_v.clone()

    migration.swap([1, 4], [5, 0], False, cache_k, cache_v, swap_k, swap_v)
    cache_k[[1, 4]] = 0
    cache_v[[1, 4]] = 0
    migration.swap([5, 0], [2, 3], True, cache_k, cache_v, swap_k, swap_v)

    assert torch.equal(cache_k[[2, 3]], before_k[[1, 4]])
    assert torch.equal(cache_v[[2, 3]], before_v[[1, 4]])
