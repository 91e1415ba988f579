"""The contract of page ports, over sockets: the store of an agent, and the pools of an engine on a
CPU, of one beside a GPU, of one on ranks and of a stage of DistServe.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ray.exceptions import RayActorError

from kvrs.config.sections import TransferSettings
from kvrs.errors import TransferError
from kvrs.ids import StreamId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.pages import Identity, Tag
from kvrs.transfer.peers import HeldPages, PageSink, PageSource, PullRequest, PullResult, StoreCode
from kvrs.transfer.store.directory import StoreDirectory
from kvrs.transfer.store.host import HostStore
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.pages import EnginePages
from kvrs_engine.engine.ranks.cells import WholePages, memory_bytes
from kvrs_engine.engine.replicas import PeerReplicas
from kvrs_engine.engine.staging import PagePool, StagingArea
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.replicas import ReplicaBook
from tests.distserve_patches.ranks import Stage
from tests.transfer.storing import (
    AGENT,
    ENGINE,
    PAGE_BYTES,
    SETTINGS,
    A,
    PagePort,
    content,
    page_port,
    range_of,
    tags,
    until,
)

pytestmark = pytest.mark.network

GEOMETRY = KvGeometry(layers=4, kv_heads=4, head_dim=8, dtype_bytes=4, page_size_tokens=4)
CLIENT = replace(ENGINE, page_cells=GEOMETRY.page_cells)
OWN = replace(AGENT, fingerprint=ENGINE.fingerprint, page_bytes=PAGE_BYTES, page_cells=16)
PAGES = 24
OK = StoreCode.OK


@dataclass
class Port:
    """The pages behind a port."""

    source: PageSource
    sink: PageSink
    in_use: Callable[[], int]  # Pages and host buffers that a transfer has.
    pages: PageManager | None = None
    pool: PagePool | None = None
    close: Callable[[], None] = lambda: None

    async def hold(self, stream: StreamId, tokens: int) -> tuple[Tag, ...]:
        """A prefill leaves its pages, the last of them partial, and its tokens under a lease."""
        assert self.pages is not None
        assert self.pool is not None
        full_pages = tokens // GEOMETRY.page_size_tokens
        own, found = self.pages.allocate(full_pages + 1), tags(stream, 0, full_pages)
        assert own is not None
        staged = self.pool.stage(own)
        for index, view in enumerate(staged.views):
            view[:] = content(stream, index)
        await staged.restore(len(own))
        staged.free()
        for page, tag in zip(own, found, strict=False):
            self.pages.register(page, tag)
        self.pages.retain(stream, own, tokens, until_s=1.0)
        self.pages.release(own)
        return found


class OwnPages(EnginePages):
    """The pages of a pool, with an owner."""

    def identity(self) -> Identity:
        return OWN


def over(pool: PagePool, staged: Callable[[], int] = lambda: 0) -> Port:
    pages = PageManager(PAGES, GEOMETRY.page_size_tokens)
    book = ReplicaBook(pages, 0.75, lambda: 0.0)

    def in_use() -> int:
        pages.check()
        return PAGES - pages.free_pages + staged()

    source = OwnPages(pages, pool, lambda: None)
    return Port(source, PeerReplicas(book, pool, lambda: None), in_use, pages, pool)


def agent(directory: Path) -> Port:
    home, size = StoreDirectory(directory), PAGES * PAGE_BYTES
    store = HostStore(OWN.instance, OWN.node, home, size, 3600.0, lambda: 0.0)

    def in_use() -> int:
        """Users of slots besides the reservation, which has each leading page once."""
        store.check()
        if store._shelf is None:
            return 0
        book = store._shelf.book
        return sum(book._slots.users) - sum(book.streams().values())

    def close() -> None:
        store.clear()
        home.__exit__(None, None, None)

    return Port(store, store, in_use, close=close)


def engine(directory: Path) -> Port:
    return over(KvPool(GEOMETRY, PAGES, torch.device("cpu")))


def beside_a_gpu(directory: Path) -> Port:
    pool = KvPool(GEOMETRY, PAGES, torch.device("cpu"))
    area = pool._area = StagingArea(pool._bytes)
    made: list[torch.Tensor] = []
    take = area.take

    def counted(count: int) -> list[torch.Tensor]:
        made.extend(buffers := take(count))
        return buffers

    area.take = counted  # type: ignore[method-assign]
    return over(pool, lambda: len({id(each) for each in made}) - len(area._free))


def ranks(directory: Path) -> Port:
    memory = torch.zeros(memory_bytes(GEOMETRY, PAGES), dtype=torch.uint8)
    return over(WholePages(GEOMETRY, PAGES, memory))


def distserve(directory: Path) -> Port:
    stage = Stage(GEOMETRY, PAGES, 2, 2)
    return over(stage.pool, lambda: stage.pool.slots.in_use)


Make = Callable[[Path], Port]
POOLS: list[Make] = [engine, beside_a_gpu, ranks, distserve]


@asynccontextmanager
async def serving(port: Port, settings: TransferSettings = SETTINGS) -> AsyncIterator[PagePort]:
    async with page_port(port.source, port.sink, CLIENT, settings=settings) as h:
        yield h
    assert port.in_use() == 0
    port.close()


async def pull(h: PagePort, request: PullRequest) -> tuple[PullResult, list[bytes]]:
    views = [memoryview(bytearray(PAGE_BYTES)) for _ in request.tags]
    tail = None if request.tail_index is None else memoryview(bytearray(PAGE_BYTES))
    result = await h.puller.pull(h.peer, request, views, tail)
    whole = [bytes(view) for view in views[: result.full_pages]]
    return result, [*whole, *([bytes(tail)] if tail is not None and result.tail else [])]


@pytest.mark.parametrize("make", [agent, *POOLS])
async def test_what_was_stored_is_what_is_pulled(make: Make, tmp_path: Path) -> None:
    """Bit for bit, over one connection each; what is not there is gone."""
    async with serving(make(tmp_path / "store")) as h:
        before = await h.offer(A)
        stored = await h.pusher.store(h.peer, [range_of(A, 0, 3)])
        grown = await h.pusher.store(h.peer, [range_of(A, 3, 2)])
        again = await h.offer(A, known=5)
        result, pages = await pull(h, PullRequest(tags(A, 0, 7)))

        assert h.pusher.pushed_bytes == 5 * PAGE_BYTES
        assert (before, stored, grown) == (HeldPages(OK, 0), [HeldPages(OK, 3)], [HeldPages(OK, 5)])
        assert again == HeldPages(OK, 5)
        assert (result.full_pages, result.gone, result.error) == (5, True, None)
        assert pages == [content(A, index) for index in range(5)]


@pytest.mark.parametrize("make", [agent, *POOLS])
async def test_a_damaged_page_never_becomes_visible(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does any that follows it; the sender is answered and sends the rest again."""
    async with serving(make(tmp_path / "store")) as h:
        await h.offer(A)
        await h.pusher.store(h.peer, [range_of(A, 0, 2)])
        h.links.faults.corrupt(4)  # All three, and one that is sent over a new connection.

        with pytest.raises(TransferError):
            await h.pusher.store(h.peer, [range_of(A, 2, 3)])

        assert "checksum of page 2 of 'a' is wrong" in caplog.text
        _, pages = await pull(h, PullRequest(tags(A, 0, 5)))
        assert pages == [content(A, index) for index in range(2)]
        assert await h.offer(A, known=5) == HeldPages(OK, 2)
        assert await h.pusher.store(h.peer, [range_of(A, 2, 3)]) == [HeldPages(OK, 5)]


@pytest.mark.parametrize("end", ["cancel", "close"])
@pytest.mark.parametrize("make", [agent, *POOLS])
async def test_a_sender_that_leaves_in_the_middle_leaves_nothing_behind(
    make: Make, tmp_path: Path, end: str
) -> None:
    """Nothing half arrived is visible, and the pages and buffers are free."""
    port = make(tmp_path / "store")
    async with serving(port, TransferSettings(link_bytes_per_s=10_000.0)) as h:
        await h.offer(A)
        storing = asyncio.create_task(h.pusher.store(h.peer, [range_of(A, 0, 12)]))
        await until(lambda: port.in_use() > 0)

        if end == "cancel":
            storing.cancel()
        else:
            await h.pusher.close()
        (outcome,) = await asyncio.gather(storing, return_exceptions=True)
        await until(lambda: port.in_use() == 0)

        assert isinstance(outcome, asyncio.CancelledError if end == "cancel" else TransferError)
        result, pages = await pull(h, PullRequest(tags(A, 0, 12)))
        assert result.full_pages < 12
        assert pages == [content(A, index) for index in range(result.full_pages)]


@pytest.mark.parametrize("make", POOLS)
async def test_a_tail_goes_behind_all_pages_and_without_what_lies_behind_its_tokens(
    make: Make, tmp_path: Path
) -> None:
    """Which may be of another tenant."""
    port = make(tmp_path)
    async with serving(port) as h:
        found = await port.hold(A, 10)
        whole, pages = await pull(h, PullRequest(found, A, 2))
        lost, _ = await pull(h, PullRequest((*found[:1], *tags(A, 7, 1)), A, 2))

    tail, due = (
        np.frombuffer(each, np.uint8).reshape(-1, GEOMETRY.page_size_tokens, 32)
        for each in (pages[2], content(A, 2))
    )
    assert (whole.full_pages, whole.tail, whole.error) == (2, True, None)
    assert pages[:2] == [content(A, 0), content(A, 1)]
    assert np.array_equal(tail[:, :2], due[:, :2])
    assert not tail[:, 2:].any()
    assert (lost.full_pages, lost.tail, lost.gone) == (1, False, True)


@pytest.mark.parametrize("how", ["dead", "full", "cancelled"])
async def test_pages_that_cannot_be_read_are_free(how: str) -> None:
    """The caller gets nothing, and pages and room are released for others."""
    stage = Stage(GEOMETRY, PAGES, 2, delay_s=0.02)
    port = over(stage.pool, lambda: stage.pool.slots.in_use - taken)
    taken = 0
    found = await port.hold(A, 10)
    if how == "full":
        taken = len(stage.pool.slots.take(63))
    if how == "dead":
        stage.failure = RayActorError()
    stage.calls.clear()

    pinning = asyncio.ensure_future(port.source.pinned(PullRequest(found)).__aenter__())
    if how == "cancelled":
        while not stage.calls:
            await asyncio.sleep(0)
        pinning.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else TransferError):
        await pinning

    assert port.in_use() == 0
