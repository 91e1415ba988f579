"""Faults on purpose in what a page server sends, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import pytest

from kvrs.config.sections import TransferSettings
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.pages import TAG_BYTES, Tag
from kvrs.transfer.limiter import LinkRate, SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer, PinnedPages, PullRequest, PullResult
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.server import PageServer

pytestmark = pytest.mark.network

PAGE_BYTES = 4096
SECRET = b"only for the tests"
N0, N1 = NodeId("n0"), NodeId("n1")
SERVER = Identity(InstanceId("p0"), N0, epoch=1, fingerprint="model", page_bytes=PAGE_BYTES)
CLIENT = Identity(InstanceId("d1"), N1, epoch=1, fingerprint="model", page_bytes=PAGE_BYTES)


class Pages:
    """Pages of zeros, as many as are asked for."""

    def __init__(self) -> None:
        self.memory = bytearray(PAGE_BYTES)
        self.in_use = 0

    def identity(self) -> Identity:
        return SERVER

    @asynccontextmanager
    async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
        self.in_use += 1
        try:
            yield PinnedPages([memoryview(self.memory) for _ in request.tags])
        finally:
            self.in_use -= 1


class Pair:
    def __init__(self, server: PageServer, puller: PagePuller, pages: Pages, port: int) -> None:
        self.server, self.puller, self.pages = server, puller, pages
        self._peer = Peer(SERVER.instance, SERVER.node, "127.0.0.1", port)

    async def pull(self, count: int) -> PullResult:
        tags = tuple(Tag(index.to_bytes(TAG_BYTES)) for index in range(count))
        return await self.puller.pull(
            self._peer, PullRequest(tags), [memoryview(bytearray(PAGE_BYTES)) for _ in tags], None
        )


@asynccontextmanager
async def pair(
    client: Identity = CLIENT, server_s: float = 10.0, puller_s: float = 10.0
) -> AsyncIterator[Pair]:
    pages = Pages()
    settings = TransferSettings(stall_timeout_s=server_s)
    server = PageServer(pages, SECRET, settings, SendingLinks(settings, SendingFaults(), N0))
    puller = PagePuller(
        lambda: client,
        SECRET,
        TransferSettings(stall_timeout_s=puller_s),
        asyncio.get_running_loop().time,
    )
    port = await server.start("127.0.0.1", 0)
    try:
        yield Pair(server, puller, pages, port)
    finally:
        await puller.close()
        await server.close()


async def test_damaged_pages_do_not_count_and_the_memory_they_came_from_is_whole() -> None:
    """The bit is flipped in a copy, after the checksum: the puller notices, and the next pull is
    right.
    """
    async with pair() as ends:
        ends.server.faults.corrupt(1)

        damaged, whole = await ends.pull(3), await ends.pull(3)

    assert damaged.full_pages == 0
    assert damaged.error is not None
    assert (whole.full_pages, whole.error) == (3, None)
    assert not any(ends.pages.memory)


async def test_a_cut_link_is_silent_and_the_puller_gives_up() -> None:
    """The puller gets neither an answer nor an end, until its stall timeout."""
    async with pair(puller_s=1.0) as ends:
        ends.server.faults.hold(N1, 0, asyncio.get_running_loop().time() + 60)

        result = await ends.pull(2)
        ends.server.faults.clear()

        assert result.full_pages == 0
        assert result.error is not None
        assert (await ends.pull(2)).full_pages == 2


async def test_a_cut_link_carries_nothing_to_a_puller_that_waits_longer() -> None:
    """Pages are not held for it: the connection ends, or pins would last as long as the cut."""
    async with pair(server_s=0.1) as ends:
        ends.server.faults.hold(N1, 0, asyncio.get_running_loop().time() + 60)

        result = await ends.pull(2)

        assert (result.full_pages, ends.pages.in_use) == (0, 0)


async def test_a_short_cut_ends_by_itself_within_one_pull() -> None:
    """A cut that the puller outwaits costs time and nothing else."""
    async with pair() as ends:
        ends.server.faults.hold(N1, 0, asyncio.get_running_loop().time() + 0.1)

        assert (await ends.pull(2)).full_pages == 2


async def test_an_open_connection_feels_a_new_rate_and_other_nodes_do_not() -> None:
    """The rate is asked for at every piece, not when the connection is made."""
    async with pair() as ends, pair(SERVER) as neighbours:
        quick = await ends.pull(4)
        for faults in (ends.server.faults, neighbours.server.faults):
            faults.hold(N1, 8 * PAGE_BYTES, asyncio.get_running_loop().time() + 60)

        slow, neighbour = await ends.pull(4), await neighbours.pull(4)

    assert quick.full_pages == slow.full_pages == neighbour.full_pages == 4
    # Half a second is what the limiter takes at least; within a node there is no link to hold.
    assert slow.seconds > 0.4
    assert neighbour.seconds < slow.seconds


def test_a_hold_ends_at_its_time_and_leaves_the_usual_limit() -> None:
    """It ends by itself."""
    faults = SendingFaults()
    faults.hold(N1, 5.0, until_s=10.0)

    assert faults.rate(N1, 1e6, now_s=9.9) == LinkRate(5.0, until_s=10.0)
    assert faults.rate(N0, 1e6, now_s=9.9) == LinkRate(1e6, until_s=inf)
    assert faults.rate(N1, 1e6, now_s=10.0) == LinkRate(1e6, until_s=inf)


def test_a_later_hold_of_a_link_replaces_the_earlier() -> None:
    """The latest hold of a link replaces earlier ones."""
    faults = SendingFaults()
    faults.hold(N1, 0, until_s=10.0)
    faults.hold(N1, 1.0, until_s=20.0)

    assert faults.rate(N1, None, now_s=8.0) == LinkRate(1.0, until_s=20.0)
