"""Pages between a device and host buffers. The device is a CPU here, on which the same copies run
at once.
"""

import asyncio

import pytest
import torch

from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.pages import root_tag
from kvrs.transfer.peers import PullRequest
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.pages import EnginePages
from kvrs_engine.engine.staging import Staged, StagingArea
from kvrs_engine.scheduling.pages import PageManager

GEOMETRY = KvGeometry(layers=2, kv_heads=2, head_dim=4, dtype_bytes=4, page_size_tokens=4)
PAGES = 8


def filled_pool(dtype_bytes: int = 4, *, buffered: bool) -> KvPool:
    """Every page has bytes of its own; with `buffered` they travel as beside a GPU."""
    geometry = KvGeometry(
        layers=2, kv_heads=2, head_dim=4, dtype_bytes=dtype_bytes, page_size_tokens=4
    )
    pool = KvPool(geometry, PAGES, torch.device("cpu"))
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    if buffered:
        pool._area = StagingArea(pool._bytes)
    return pool


@pytest.mark.parametrize("dtype_bytes", [2, 4])
@pytest.mark.parametrize("buffered", [False, True])
async def test_pages_that_are_saved_and_restored_are_the_same_bits(
    dtype_bytes: int, buffered: bool
) -> None:
    """To other places of the pool; and those beyond the count are left alone."""
    pool = filled_pool(dtype_bytes, buffered=buffered)
    before = pool.tensor.clone()

    saved = pool.stage([1, 2, 3])
    await saved.save()
    assert {view.nbytes for view in saved.views} == {pool.geometry.page_bytes}
    arrived = pool.stage([5, 6, 7])
    for view, source in zip(arrived.views[:2], saved.views, strict=False):
        view[:] = source
    await arrived.restore(2)
    for staged in (saved, arrived):
        staged.free()

    # By their bits: random bytes would make NaNs, which equal nothing.
    assert pool.tensor[[5, 6]].view(torch.uint8).equal(before[[1, 2]].view(torch.uint8))
    assert pool.tensor[[0, 1, 2, 3, 4, 7]].equal(before[[0, 1, 2, 3, 4, 7]])


def test_buffers_are_used_again_and_never_twice_at_a_time() -> None:
    """The buffers are as many as are in use at once, however often pages travel."""
    pool = filled_pool(buffered=True)
    assert pool._area is not None
    first, second = pool.stage([0, 1]), pool.stage([1, 2])
    addresses = {buffer.data_ptr() for staged in (first, second) for buffer in staged._buffers}
    assert len(addresses) == 4
    first.free()
    first.free()  # Harmless.
    second.free()

    again = [pool.stage([3, 4]) for _ in range(3)]

    reused = {buffer.data_ptr() for staged in again for buffer in staged._buffers}
    assert reused > addresses
    assert len(reused) == 6


async def test_pages_that_cannot_be_staged_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a GPU may have no memory left to pin: the caller gets nothing, and the pages are
    released for others.
    """
    pages, pool = PageManager(PAGES, 4), filled_pool(buffered=True)
    source = EnginePages(pages, pool, released=lambda: None)
    allocated, tag = pages.allocate(1), root_tag("m", "page")
    assert allocated is not None
    pages.register(allocated[0], tag)
    pages.release(allocated)

    def take(self: StagingArea, count: int) -> list[torch.Tensor]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(StagingArea, "take", take)
    with pytest.raises(RuntimeError, match="out of memory"):
        await source.pinned(PullRequest((tag,))).__aenter__()

    assert pages.free_pages == PAGES


def test_on_a_cpu_nothing_is_copied() -> None:
    """Received pages lie in the pool already."""
    pool = filled_pool(buffered=False)

    staged = Staged([3], pool._bytes)
    staged.views[0][:] = bytes(pool.geometry.page_bytes)
    asyncio.run(staged.restore(1))

    assert not pool.tensor[3].any()
