"""An agent's store in a dictionary, behind a real page server, and what a test needs to speak to
it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from kvrs.config.sections import TransferSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.pages import TAG_BYTES, Tag
from kvrs.transfer.checkpoint_sender import PagePusher
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import (
    CheckpointClaim,
    HeldPages,
    Identity,
    PageSink,
    PageSource,
    Peer,
    PinnedPages,
    PullRequest,
    StoreCode,
    StoredPages,
)
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.server import PageServer

PAGE_BYTES = 4096
SECRET = b"only for the tests"
N0, N1 = NodeId("n0"), NodeId("n1")
AGENT = Identity(InstanceId("agent-n1"), N1, epoch=4, fingerprint="", page_bytes=1)
ENGINE = Identity(InstanceId("d0"), N0, epoch=3, fingerprint="model", page_bytes=PAGE_BYTES)
A, B = StreamId("a"), StreamId("b")
SETTINGS = TransferSettings(stall_timeout_s=10.0)


def tag(stream: StreamId, index: int) -> Tag:
    return Tag(stream.encode().ljust(8)[:8] + index.to_bytes(TAG_BYTES - 8))


def tags(stream: StreamId, first: int, count: int) -> tuple[Tag, ...]:
    return tuple(tag(stream, index) for index in range(first, first + count))


def content(stream: StreamId, index: int) -> bytes:
    """The bytes of one page; no two pages are alike."""
    return tag(stream, index) * (PAGE_BYTES // TAG_BYTES)


def claim(stream: StreamId, attempt: int = 1) -> CheckpointClaim:
    return CheckpointClaim(stream, owner_epoch=0, attempt=attempt)


def range_of(stream: StreamId, first: int, count: int) -> StoredPages:
    pages = [memoryview(content(stream, index)) for index in range(first, first + count)]
    return StoredPages(claim(stream), first, tags(stream, first, count), pages)


@dataclass
class Arriving:
    sink: "Sink"
    stream: StreamId
    first_page: int
    tags: tuple[Tag, ...]
    views: list[memoryview | None]
    memory: list[bytearray]
    ended: bool = False

    def commit(self, index: int, checksum: int) -> None:
        assert not self.ended
        assert self.views[index] is not None
        self.sink.visible[self.tags[index]] = bytes(self.memory[index])
        self.sink.streams[self.stream][self.first_page + index] = self.tags[index]

    async def settle(self) -> None:
        """Each page is visible since it came."""

    def end(self) -> HeldPages:
        assert not self.ended
        self.ended = True
        self.sink.arriving -= 1
        return HeldPages(
            self.sink.refused.get(self.stream, StoreCode.OK), self.sink.leading(self.stream)
        )


@dataclass
class Sink:
    """Stores what is offered, unless refused by the test, and serves it again."""

    own: Identity = AGENT
    refused: dict[StreamId, StoreCode] = field(default_factory=dict)
    visible: dict[Tag, bytes] = field(default_factory=dict)
    streams: dict[StreamId, dict[int, Tag]] = field(default_factory=dict)
    reserved: dict[CheckpointClaim, int] = field(default_factory=dict)
    arriving: int = 0
    begun: int = 0

    def leading(self, stream: StreamId) -> int:
        pages = self.streams.get(stream, {})
        return next(index for index in range(len(pages) + 1) if index not in pages)

    def adopt(self, client: Identity) -> None:
        if not self.reserved:
            self.own = replace(
                self.own,
                fingerprint=client.fingerprint,
                page_bytes=client.page_bytes,
                page_cells=client.page_cells,
            )

    def offer(
        self, claim: CheckpointClaim, reserved_bytes: int, tags: tuple[Tag, ...]
    ) -> HeldPages:
        if (code := self.refused.get(claim.stream, StoreCode.OK)) is StoreCode.OK:
            self.reserved[claim] = reserved_bytes
            pages = self.streams.setdefault(claim.stream, {})
            pages |= {index: tag for index, tag in enumerate(tags) if tag in self.visible}
        return HeldPages(code, self.leading(claim.stream))

    def begin(self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]) -> Arriving:
        self.arriving += 1
        self.begun += 1
        pages = self.streams.setdefault(claim.stream, {})
        wanted = claim.stream not in self.refused and first_page <= self.leading(claim.stream)
        memory = [bytearray(PAGE_BYTES) for _ in tags]
        views = [
            memoryview(page) if wanted and first_page + index not in pages else None
            for index, page in enumerate(memory)
        ]
        return Arriving(self, claim.stream, first_page, tags, views, memory)

    def identity(self) -> Identity:
        return self.own

    @asynccontextmanager
    async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
        held: list[memoryview] = []
        for wanted in request.tags:
            if wanted not in self.visible:
                break
            held.append(memoryview(self.visible[wanted]))
        yield PinnedPages(held)

    def assert_whole(self) -> None:
        """Every visible page is that of its tag."""
        for own, page in self.visible.items():
            assert page == bytes(own) * (PAGE_BYTES // TAG_BYTES)


@dataclass
class PagePort:
    """The page port of a process, and another process that sends pages there and fetches them."""

    server: PageServer
    links: SendingLinks  # The sender's.
    pusher: PagePusher
    puller: PagePuller
    peer: Peer

    async def offer(self, stream: StreamId, known: int = 0) -> HeldPages:
        return await self.pusher.offer(
            self.peer, claim(stream), 12 * PAGE_BYTES, tags(stream, 0, known)
        )


@dataclass
class StoringAgent(PagePort):
    """An engine's sending side and an agent."""

    sink: Sink


@asynccontextmanager
async def page_port(
    source: PageSource,
    sink: PageSink,
    engine: Identity = ENGINE,
    secret: bytes = SECRET,
    settings: TransferSettings = SETTINGS,
    own_settings: TransferSettings = SETTINGS,
) -> AsyncIterator[PagePort]:
    own = SendingLinks(own_settings, SendingFaults(), N1)
    server = PageServer(source, SECRET, own_settings, own)
    server.keep(sink)
    links = SendingLinks(settings, SendingFaults(), engine.node)
    pusher = PagePusher(lambda: engine, secret, settings, links)
    puller = PagePuller(lambda: engine, secret, settings, time.monotonic)
    peer = Peer(AGENT.instance, N1, "127.0.0.1", await server.start("127.0.0.1", 0))
    try:
        yield PagePort(server, links, pusher, puller, peer)
    finally:
        await pusher.close()
        await puller.close()
        await server.close()


@asynccontextmanager
async def agent_store(
    engine: Identity = ENGINE,
    secret: bytes = SECRET,
    settings: TransferSettings = SETTINGS,
    agent_settings: TransferSettings = SETTINGS,
) -> AsyncIterator[StoringAgent]:
    sink = Sink()
    async with page_port(sink, sink, engine, secret, settings, agent_settings) as port:
        yield StoringAgent(port.server, port.links, port.pusher, port.puller, port.peer, sink)
    assert sink.arriving == 0
    sink.assert_whole()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
