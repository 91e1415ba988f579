"""Traffic classes over real sockets: what one process sends to a node, by whichever of its
parts.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from kvrs.config.sections import TransferSettings
from kvrs.errors import TransferError
from kvrs.protocol.frames import Bytes
from kvrs.protocol.pages import TrafficClass
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLink, SendingLinks, groups, split
from kvrs.transfer.peers import HeldPages, Peer, PullRequest, StoreCode
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.server import PageServer
from kvrs.transfer.stream import SocketStream, page_socket
from tests.transfer.storing import (
    ENGINE,
    N0,
    N1,
    PAGE_BYTES,
    SECRET,
    A,
    B,
    Sink,
    StoringAgent,
    agent_store,
    content,
    range_of,
    tags,
    until,
)

pytestmark = pytest.mark.network

RECOVERY, HANDOFF, CHECKPOINT = TrafficClass


@asynccontextmanager
async def serving_too(
    h: StoringAgent, settings: TransferSettings
) -> AsyncIterator[tuple[PagePuller, Peer]]:
    """The engine of `h` holds pages of stream B, which a peer of the agent can pull."""
    held = Sink(
        own=ENGINE,
        visible={tag: content(B, index) for index, tag in enumerate(tags(B, 0, 1000))},
    )
    server = PageServer(held, SECRET, settings, h.links)
    neighbour = PagePuller(lambda: h.sink.own, SECRET, settings, asyncio.get_running_loop().time)
    try:
        yield neighbour, Peer(ENGINE.instance, N0, "127.0.0.1", await server.start("127.0.0.1", 0))
    finally:
        await neighbour.close()
        await server.close()


@contextmanager
def stream_to_nowhere() -> Iterator[SocketStream]:
    """For a transfer that is open and sends nothing."""
    with page_socket("127.0.0.1") as sock:
        yield SocketStream(sock, 10.0)


@pytest.mark.parametrize("traffic", [HANDOFF, RECOVERY])
async def test_on_a_slow_link_a_handoff_overtakes_a_checkpoint(traffic: TrafficClass) -> None:
    """It has the link for itself from its first page to its last, though the checkpoint was there
    before.
    """
    settings = TransferSettings(link_bytes_per_s=800_000.0, stall_timeout_s=10.0)
    async with agent_store(settings=settings) as h:
        await h.offer(A)
        async with serving_too(h, settings) as (neighbour, peer):
            into = [memoryview(bytearray(PAGE_BYTES)) for _ in range(40)]
            await neighbour.pull(peer, PullRequest(tags(B, 0, 1)), into[:1], None)
            storing = asyncio.create_task(h.pusher.store(h.peer, [range_of(A, 0, 100)]))
            await until(lambda: len(h.sink.visible) >= 3)
            before = len(h.sink.visible)

            pulled = await neighbour.pull(
                peer, PullRequest(tags(B, 0, 40), traffic=traffic), into, None
            )
            meanwhile = len(h.sink.visible) - before

            assert (pulled.full_pages, pulled.error) == (40, None)
            assert not storing.done()
            assert await storing == [HeldPages(StoreCode.OK, 100)]
    # What was under way when the pull began, and until its question was there; an even share would
    # be 40.
    assert meanwhile <= 20


async def test_on_a_slow_link_a_probe_overtakes_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A probe measures what a recovery would get, and not what checkpoints leave: these give way to
    recoveries.
    """
    monkeypatch.setattr("kvrs.transfer.puller.PROBE_BYTES", 80 * PAGE_BYTES)
    settings = TransferSettings(link_bytes_per_s=800_000.0, stall_timeout_s=10.0)
    async with agent_store(settings=settings) as h:
        await h.offer(A)
        async with serving_too(h, settings) as (neighbour, peer):
            into = [memoryview(bytearray(PAGE_BYTES))]
            await neighbour.pull(peer, PullRequest(tags(B, 0, 1)), into, None)
            storing = asyncio.create_task(h.pusher.store(h.peer, [range_of(A, 0, 200)]))
            await until(lambda: len(h.sink.visible) >= 3)
            before = len(h.sink.visible)

            await neighbour.probe(peer)
            meanwhile = len(h.sink.visible) - before

            assert N0 in neighbour.links()
            assert await storing == [HeldPages(StoreCode.OK, 200)]
    # An even share would be 80.
    assert meanwhile <= 30


async def test_on_a_slow_link_a_recovery_overtakes_a_handoff() -> None:
    """The class of a pull travels with its question."""
    settings = TransferSettings(link_bytes_per_s=800_000.0, stall_timeout_s=10.0)
    async with agent_store(settings=settings) as h:
        await h.offer(A)
        async with serving_too(h, settings) as (neighbour, peer):
            slow, quick = (
                [memoryview(bytearray(PAGE_BYTES)) for _ in range(count)] for count in (100, 40)
            )
            asked = PullRequest(tags(B, 0, 100))
            handing_off = asyncio.create_task(neighbour.pull(peer, asked, slow, None))
            await until(lambda: bytes(slow[2]) == content(B, 2))

            recovery = PullRequest(tags(B, 0, 40), traffic=RECOVERY)
            recovered = await neighbour.pull(peer, recovery, quick, None)
            meanwhile = sum(bytes(page) == content(B, index) for index, page in enumerate(slow))

            assert (recovered.full_pages, (await handing_off).full_pages) == (40, 100)
    # An even share would be 40.
    assert meanwhile <= 3 + 20


async def test_without_a_limit_a_checkpoint_waits_for_a_handoff_and_keeps_its_agent() -> None:
    """However long that takes, in the middle of a page too: single bytes show the agent that its
    peer is there.
    """
    async with agent_store(
        settings=TransferSettings(stall_timeout_s=0.2),
        agent_settings=TransferSettings(stall_timeout_s=2.0),
    ) as h:
        # Slow until the first pages are there, so that the others are on their way when the
        # hand-off begins.
        h.links.faults.hold(N1, 400_000.0, asyncio.get_running_loop().time() + 60)
        storing = asyncio.create_task(h.pusher.store(h.peer, [range_of(A, 0, 100)]))
        await until(lambda: len(h.sink.visible) >= 3)
        with stream_to_nowhere() as stream, h.links.to(N1).sending(stream, HANDOFF):
            h.links.faults.clear()
            await asyncio.sleep(2.6)
            meanwhile = (storing.done(), len(h.sink.visible))

        assert await storing == [HeldPages(StoreCode.OK, 100)]
        assert h.sink.begun == 1
    assert meanwhile[0] is False
    assert meanwhile[1] < 50


async def test_a_sender_that_is_cancelled_leaves_the_line() -> None:
    """Its turn is not waited for, and not kept."""
    faults = SendingFaults()
    link = SendingLink(faults, N1, None, stall_timeout_s=10.0)
    faults.hold(N1, 0, asyncio.get_running_loop().time() + 3600)
    waiting = [asyncio.create_task(link.turn(traffic, 500)) for traffic in TrafficClass]
    await asyncio.sleep(0)
    assert link._turns.has_waiting

    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)

    assert not link._turns.has_waiting


async def test_a_fault_that_ends_lets_go_who_waits() -> None:
    """By itself at its time, or because it is cleared."""
    faults = SendingFaults()
    link = SendingLink(faults, N1, None, stall_timeout_s=0.4)
    faults.hold(N1, 0, asyncio.get_running_loop().time() + 0.05)
    assert await link.turn(HANDOFF, 7) == 7

    faults.hold(N1, 0, asyncio.get_running_loop().time() + 3600)
    waiting = asyncio.create_task(link.turn(CHECKPOINT, 7))
    await asyncio.sleep(0)
    faults.clear()

    assert await waiting == 7


async def test_who_waits_at_a_link_that_is_cut_gives_up() -> None:
    """Its peer, which receives nothing, gives up too."""
    faults = SendingFaults()
    link = SendingLink(faults, N1, None, stall_timeout_s=0.1)
    faults.hold(N1, 0, asyncio.get_running_loop().time() + 3600)

    with pytest.raises(TransferError, match="cut"):
        await link.turn(HANDOFF, 7)


def test_within_a_node_there_is_no_limit_and_elsewhere_one_per_node() -> None:
    """All that is sent to a node shares one link."""
    links = SendingLinks(TransferSettings(link_bytes_per_s=5.0), SendingFaults(), N0)

    assert links.to(N1) is links.to(N1)
    assert (links.to(N0)._usual_bytes_per_s, links.to(N1)._usual_bytes_per_s) == (None, 5.0)


def test_buffers_are_split_anywhere_without_a_copy() -> None:
    """Every byte goes out once, in order."""
    buffers: list[Bytes] = [b"abc", memoryview(b"defg"), b"h"]

    for size in range(9):
        first, rest = split(buffers, size)
        assert b"".join(first) == b"abcdefgh"[:size]
        assert b"".join(rest) == b"abcdefgh"[size:]
        assert all(first) or size == 0


def test_pages_are_gathered_by_bytes_and_by_number() -> None:
    """Large ones go one by one, small ones a few hundred at a time, none is left out."""
    for page_bytes in (16, 4096, 1 << 20, 3 << 20):
        page = memoryview(bytearray(page_bytes))
        gathered = list(groups([page] * 600))

        assert [index for group in gathered for index, _ in group] == list(range(600))
        assert max(len(group) for group in gathered) == max(1, min(256, (1 << 20) // page_bytes))
    assert list(groups([])) == []
