"""Pages that a peer sends into an engine's pool, over a socket: what is kept, found, reported and
given up.
"""

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch

from kvrs.errors import TransferError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.page_messages import (
    CheckpointClaim,
    HeldPages,
    Identity,
    PullRequest,
    StoreCode,
)
from kvrs.protocol.tags import Tag, page_tags, root_tag
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Peer, StoredPages
from kvrs.transfer.pusher import PagePusher
from kvrs.transfer.send_faults import SendingFaults
from kvrs.transfer.server import PageServer
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.pages import EnginePages
from kvrs_engine.engine.ranks.cells import WholePages, memory_bytes
from kvrs_engine.engine.replicas import PeerReplicas
from kvrs_engine.engine.staging import PagePool
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.replicas import ReplicaBook
from tests.transfer.storing import SECRET, SETTINGS

pytestmark = pytest.mark.network

GEOMETRY = KvGeometry(layers=2, kv_heads=2, head_dim=4, dtype_bytes=4, page_size_tokens=4)
PAGES = 12
A = StreamId("a")


def kv_pool() -> PagePool:
    return KvPool(GEOMETRY, PAGES, torch.device("cpu"))


def rank_memory() -> PagePool:
    memory = torch.zeros(memory_bytes(GEOMETRY, PAGES), dtype=torch.uint8)
    return WholePages(GEOMETRY, PAGES, memory)


def tags(stream: StreamId, count: int) -> list[Tag]:
    family = int.from_bytes(stream.encode())
    return page_tags(root_tag("model"), [family] * GEOMETRY.page_size_tokens * count, 4)


def content(tag: Tag) -> bytes:
    return random.Random(bytes(tag)).randbytes(GEOMETRY.page_bytes)


def identity(name: str) -> Identity:
    return Identity(
        InstanceId(name),
        NodeId(name),
        1,
        "model",
        GEOMETRY.page_bytes,
        GEOMETRY.page_cells,
    )


@dataclass
class Receiver:
    pages: PageManager
    pool: PagePool
    book: ReplicaBook
    pusher: PagePusher
    peer: Peer
    faults: SendingFaults
    now_s: float = 0.0

    async def offer(self, stream: StreamId, count: int) -> HeldPages:
        claim = CheckpointClaim(stream, 0, 1)
        return await self.pusher.offer(self.peer, claim, 1 << 20, tags(stream, count))

    async def send(self, stream: StreamId, span: range) -> HeldPages:
        chosen = tags(stream, span.stop)[span.start :]
        views = [memoryview(content(tag)) for tag in chosen]
        stored = StoredPages(CheckpointClaim(stream, 0, 1), span.start, tuple(chosen), views)
        (held,) = await self.pusher.store(self.peer, [stored])
        return held

    async def assert_has(self, found: Sequence[Tag]) -> None:
        """Their bytes are in the pool."""
        source = EnginePages(self.pages, self.pool, lambda: None)
        async with source.pinned(PullRequest(tuple(found))) as pinned:
            assert [bytes(page) for page in pinned.pages] == [content(tag) for tag in found]


@asynccontextmanager
async def receiver(pool: PagePool, share: float = 0.5) -> AsyncIterator[Receiver]:
    pages = PageManager(PAGES, GEOMETRY.page_size_tokens)
    faults, links = SendingFaults(), SendingLinks(SETTINGS, SendingFaults(), NodeId("d1"))
    book = ReplicaBook(pages, share, lambda: found.now_s)
    own = identity("d1")

    class Source(EnginePages):
        def identity(self) -> Identity:
            return own

    server = PageServer(Source(pages, pool, lambda: None), SECRET, SETTINGS, links)
    server.keep(PeerReplicas(book, pool, lambda: None))
    client = identity("d0")
    sending = SendingLinks(SETTINGS, faults, client.node)
    pusher = PagePusher(lambda: client, SECRET, SETTINGS, sending)
    peer = Peer(own.instance, own.node, "127.0.0.1", await server.start("127.0.0.1", 0))
    found = Receiver(pages, pool, book, pusher, peer, faults)
    try:
        yield found
    finally:
        await pusher.close()
        await server.close()
        pages.check()


@pytest.mark.parametrize("pool", [kv_pool, rank_memory])
async def test_pages_of_a_peer_are_found_and_reported(pool: Callable[[], PagePool]) -> None:
    async with receiver(pool()) as each:
        assert await each.offer(A, 0) == HeldPages(StoreCode.OK, 0)
        assert await each.send(A, range(2)) == HeldPages(StoreCode.OK, 2)
        assert await each.send(A, range(2, 5)) == HeldPages(StoreCode.OK, 5)
        assert await each.offer(A, 5) == HeldPages(StoreCode.OK, 5)
        assert each.book.changed() == {A: 5}
        each.now_s = 5.0
        assert each.book.changed() == {}
        await each.assert_has(tags(A, 5))


async def test_a_stream_that_comes_here_has_them_as_its_own() -> None:
    async with receiver(kv_pool()) as each:
        await each.offer(A, 0)
        await each.send(A, range(4))
        found = each.pages.match(tags(A, 4))
        assert len(found) == 4
        assert len(each.pages.replicas) == 0
        each.pages.release(found)
        assert await each.offer(A, 4) == HeldPages(StoreCode.OK, 4)


async def test_own_streams_take_the_room_and_the_loss_is_reported() -> None:
    async with receiver(kv_pool()) as each:
        await each.offer(A, 0)
        await each.send(A, range(4))
        each.now_s = 5.0
        assert each.book.changed() == {}
        own = each.pages.allocate(PAGES - 2)
        assert own is not None
        assert each.book.changed() == {A: 2}
        assert each.pages.replicas.dropped == 2
        await each.assert_has(tags(A, 2))
        each.pages.release(own)
        assert await each.send(A, range(2, 4)) == HeldPages(StoreCode.OK, 4)


@pytest.mark.parametrize("pool", [kv_pool, rank_memory])
async def test_a_damaged_page_is_not_kept(pool: Callable[[], PagePool]) -> None:
    async with receiver(pool()) as each:
        await each.offer(A, 0)
        await each.send(A, range(1))
        each.faults.corrupt(4)  # More often than it is tried.
        with pytest.raises(TransferError):
            await each.send(A, range(1, 4))
        assert await each.offer(A, 1) == HeldPages(StoreCode.OK, 1)
        assert each.pages.free_pages == PAGES
        await each.assert_has(tags(A, 1))


async def test_an_instance_without_room_for_replicas_says_so() -> None:
    async with receiver(kv_pool(), share=0.01) as each:
        assert await each.offer(A, 0) == HeldPages(StoreCode.FULL, 0)
