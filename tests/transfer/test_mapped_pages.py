"""Pages out of the memory of the own node's agent: a real store, server and puller, over real
sockets and files.
"""

import asyncio
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvrs.config.sections import TransferSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol import frames
from kvrs.protocol.frames import checksum_of
from kvrs.protocol.instance import MEMORY
from kvrs.protocol.pages import (
    TAG_BYTES,
    CheckpointClaim,
    Identity,
    PagePart,
    Part,
    PullRequest,
    Tag,
)
from kvrs.transfer import puller, server
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import (
    PAGES_SOCKET,
    Peer,
    PinnedPages,
    PullResult,
)
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.server import PageServer
from kvrs.transfer.shared_memory import Region
from kvrs.transfer.store.directory import StoreDirectory
from kvrs.transfer.store.host import HostStore
from kvrs.transfer.stream import SocketStream
from tests.transfer.storing import until

pytestmark = [pytest.mark.network, pytest.mark.process]

SECRET, OTHER_SECRET = b"only for the tests", b"that of another cluster"
PAGE_BYTES = 1 << 16
PAGES = 20  # More than is copied without a thread.
CAPACITY_PAGES = 24
N0 = NodeId("n0")
AGENT = InstanceId("agent-n0")
ENGINE = Identity(InstanceId("d0"), N0, 1, "model", PAGE_BYTES)
CELLED = replace(ENGINE, page_cells=16)
S, T = StreamId("s"), StreamId("t")
SETTINGS = TransferSettings(stall_timeout_s=10.0)


def tags(stream: StreamId, count: int) -> tuple[Tag, ...]:
    head = stream.encode().ljust(8)
    return tuple(Tag(head + index.to_bytes(TAG_BYTES - 8)) for index in range(count))


def content(tag: Tag) -> bytes:
    return bytes(tag) * (PAGE_BYTES // TAG_BYTES)


@dataclass
class Node:
    """An agent's store and server, and the puller of an engine."""

    store: HostStore
    server: PageServer
    puller: PagePuller
    peer: Peer  # As engines of the node know the agent.

    @property
    def mapped_only(self) -> Peer:
        """Nothing listens at its port."""
        return replace(self.peer, port=1)

    @property
    def sent_only(self) -> Peer:
        return replace(self.peer, directory=None)

    def put(
        self,
        stream: StreamId,
        count: int = PAGES,
        page: Callable[[Tag], bytes] = content,
    ) -> None:
        claim = CheckpointClaim(stream, 0, 1)
        self.store.offer(claim, count * PAGE_BYTES, ())
        incoming = self.store.begin(claim, 0, tags(stream, count))
        for index, view in enumerate(incoming.views):
            if view is not None:
                view[:] = page(tags(stream, count)[index])
                incoming.commit(index, frames.checksum(view))
        assert incoming.end().pages == count

    async def pull(
        self, peer: Peer, count: int = PAGES, stream: StreamId = S
    ) -> tuple[PullResult, list[bytes]]:
        """The result, and the bytes of the pages that count."""
        views = [memoryview(bytearray(PAGE_BYTES)) for _ in range(count)]
        asked = PullRequest(tags(stream, count))
        async with asyncio.timeout(60):
            result = await self.puller.pull(peer, asked, views, None)
        return result, [bytes(view) for view in views[: result.full_pages]]

    def sent_bytes_measured(self) -> bool:
        """True if pages came through a socket."""
        return N0 in self.puller.links()


@asynccontextmanager
async def node(
    tmp_path: Path,
    engine: Identity = ENGINE,
    secret: bytes = SECRET,
    settings: TransferSettings = SETTINGS,
    store_class: type[HostStore] = HostStore,
    kind: Identity = ENGINE,
) -> AsyncIterator[Node]:
    with StoreDirectory(tmp_path / "store") as directory:
        store = store_class(
            AGENT, N0, directory, CAPACITY_PAGES * PAGE_BYTES, 3600.0, time.monotonic
        )
        links = SendingLinks(settings, SendingFaults(), N0)

        server = PageServer(store, SECRET, settings, links)
        server.keep(store)
        port = await server.start("127.0.0.1", 0)
        server.lend(directory.path)
        puller = PagePuller(lambda: engine, secret, SETTINGS, time.monotonic)
        peer = Peer(AGENT, N0, "127.0.0.1", port, directory.path)
        store.adopt(kind)
        try:
            yield Node(store, server, puller, peer)
        finally:
            await puller.close()
            await server.close()
            store.check()
            store.clear()


async def test_pages_are_the_same_over_both_ways(tmp_path: Path) -> None:
    """Out of memory, where nothing listens at the port, and through a socket; twice, so that files
    which are mapped already are used.
    """
    async with node(tmp_path) as each:
        each.put(S)

        first, pages = await each.pull(each.mapped_only)
        again, same = await each.pull(each.mapped_only)
        assert not each.sent_bytes_measured()
        sent, received = await each.pull(each.sent_only)

    assert (first.full_pages, first.gone, first.error) == (PAGES, False, None)
    assert (again.full_pages, sent.full_pages) == (PAGES, PAGES)
    assert pages == same == received == [content(tag) for tag in tags(S, PAGES)]
    assert first.bytes == sent.bytes == PAGES * PAGE_BYTES


async def test_what_the_agent_does_not_hold_is_gone(tmp_path: Path) -> None:
    """The pages before it are there, and nothing is asked for through a socket."""
    async with node(tmp_path) as each:
        each.put(S, 3)

        result, pages = await each.pull(each.mapped_only, 5)
        none, _ = await each.pull(each.mapped_only, 5, T)

    assert (result.full_pages, result.gone, result.error) == (3, True, None)
    assert pages == [content(tag) for tag in tags(S, 3)]
    assert (none.full_pages, none.gone, none.error) == (0, True, None)


async def test_a_pull_in_several_batches_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few pages are pinned at a time."""
    monkeypatch.setattr(puller, "_BATCH_BYTES", 3 * PAGE_BYTES)
    async with node(tmp_path) as each:
        each.put(S)

        whole, pages = await each.pull(each.mapped_only)
        short, _ = await each.pull(each.mapped_only, PAGES + 2)

    assert (whole.full_pages, whole.gone) == (PAGES, False)
    assert pages == [content(tag) for tag in tags(S, PAGES)]
    assert (short.full_pages, short.gone) == (PAGES, True)


async def test_nothing_stays_pinned_after_a_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots can be taken for other pages, although the connection stands."""
    monkeypatch.setattr(puller, "_IDLE_S", 60.0)
    async with node(tmp_path, settings=TransferSettings(stall_timeout_s=60.0)) as each:
        each.put(S)
        await each.pull(each.mapped_only)
        each.store.release([S], 0.0)

        async with asyncio.timeout(60):
            while True:
                with suppress(AssertionError):
                    each.put(T, CAPACITY_PAGES)
                    break
                await asyncio.sleep(0.005)


class Interrupted:
    """Calls `act` in one of the threads that copy, once `after` pages were copied."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, after: int, act: Callable[[], None]
    ) -> None:
        self._checksum = checksum_of
        self._left = after
        self._act = act
        monkeypatch.setattr(puller, "checksum_of", self._count)

    def _count(self, page: frames.Bytes, part: PagePart | None) -> int:
        if threading.current_thread() is not threading.main_thread():
            self._left -= 1
            if self._left == 0:
                self._act()
        return self._checksum(page, part)


async def test_a_page_that_is_evicted_while_it_is_copied_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that outlasts the stall timeout loses its pins. What was overwritten then does not
    count, and the rest is asked for through a socket.
    """
    unpinned, evicted = threading.Event(), threading.Event()

    class Watched(HostStore):
        @asynccontextmanager
        async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
            try:
                async with super().pinned(request) as found:
                    yield found
            finally:
                unpinned.set()

    def wait() -> None:
        assert evicted.wait(60)

    Interrupted(monkeypatch, 4, wait)
    slow = TransferSettings(stall_timeout_s=0.5)
    async with node(tmp_path, settings=slow, store_class=Watched) as each:
        each.put(S)
        pulling = asyncio.create_task(each.pull(each.peer))
        assert await asyncio.to_thread(unpinned.wait, 60)
        each.store.release([S], 0.0)
        each.put(T)
        evicted.set()
        result, pages = await pulling

    assert 0 < result.full_pages < PAGES
    assert pages == [content(tag) for tag in tags(S, result.full_pages)]
    assert (result.gone, result.error) == (True, None)


@pytest.mark.parametrize(
    ("engine", "secret", "why"),
    [
        (replace(ENGINE, fingerprint="other"), SECRET, "fingerprints differ"),
        (replace(ENGINE, page_bytes=4096), SECRET, "page_bytes differ"),
        (ENGINE, OTHER_SECRET, "another secret"),
    ],
    ids=["model", "page size", "secret"],
)
async def test_memory_of_others_is_refused(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    engine: Identity,
    secret: bytes,
    why: str,
) -> None:
    """Before a descriptor is sent; the port refuses it as well."""
    async with node(tmp_path, engine, secret) as each:
        each.put(S)
        with caplog.at_level(logging.WARNING):
            result, _ = await each.pull(each.peer)

    assert (result.full_pages, result.gone) == (0, False)
    assert why in str(result.error)
    assert why in causes(caplog)[0]
    assert not slab_mapped(tmp_path / "store", mode="r--s")


async def test_a_process_of_another_user_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel's word on the user, before the first byte."""
    async with node(tmp_path) as each:
        each.put(S)
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.setblocking(False)
            stranger.connect(str(tmp_path / "store" / PAGES_SOCKET))
            async with asyncio.timeout(60):
                assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
        result, _ = await each.pull(each.mapped_only)
        monkeypatch.undo()

    assert result.full_pages == 0


@pytest.mark.parametrize("lie", ["file is larger", "file is smaller", "page is behind the end"])
async def test_sizes_are_checked_before_anything_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    """A read behind the end of a file would end the engine. The pages are sent instead."""

    class LyingRegion(Region):
        def __init__(self, region: Region, more: int) -> None:
            super().__init__(os.dup(region.descriptor), region.memory)
            self.size_bytes += more

    class LyingStore(HostStore):
        @asynccontextmanager
        async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
            async with super().pinned(request) as found:
                if lie == "page is behind the end":
                    assert found.region is not None
                    last = found.region.size_bytes - PAGE_BYTES + 1
                    yield replace(found, offsets=[*found.offsets[:-1], last])
                    return
                more = PAGE_BYTES if lie == "file is larger" else -PAGE_BYTES
                assert found.region is not None
                yield replace(found, region=LyingRegion(found.region, more))

    async with node(tmp_path, store_class=LyingStore) as each:
        each.put(S)
        if lie != "page is behind the end":
            monkeypatch.setattr(mmap, "mmap", None)
        with caplog.at_level(logging.WARNING):
            result, pages = await each.pull(each.peer)

    assert (result.full_pages, result.error) == (PAGES, None)
    assert pages == [content(tag) for tag in tags(S, PAGES)]
    assert "MAPPED" in causes(caplog)[0]


async def test_descriptors_without_a_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The number of files is that of the descriptors; none of them stays open."""
    send = SocketStream.send_with

    async def twice(stream: SocketStream, descriptors: list[int], message: bytes) -> None:
        await send(stream, [*descriptors, *descriptors], message)

    monkeypatch.setattr(SocketStream, "send_with", twice)
    async with node(tmp_path) as each:
        each.put(S)
        before = len(os.listdir("/proc/self/fd"))
        with caplog.at_level(logging.WARNING):
            result, _ = await each.pull(each.mapped_only)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)

    assert result.full_pages == 0
    assert "more than 1 descriptors" in causes(caplog)[0]


async def test_without_a_socket_pages_are_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent in another container, or of an older version. The log says so once."""
    async with node(tmp_path) as each:
        each.put(S)
        elsewhere = replace(each.peer, directory=tmp_path / "another host")
        with caplog.at_level(logging.WARNING):
            result, pages = await each.pull(elsewhere)
            await each.pull(elsewhere)

    assert result.full_pages == PAGES
    assert pages == [content(tag) for tag in tags(S, PAGES)]
    assert causes(caplog) == ["cannot connect to 'agent-n0': No such file or directory"]


async def test_injected_faults_act_on_pages_of_the_own_node(tmp_path: Path) -> None:
    """Memory knows none of them, so the pages are sent meanwhile."""
    async with node(tmp_path) as each:
        each.put(S)
        each.server.faults.corrupt(1)

        damaged, _ = await each.pull(each.peer)
        whole, _ = await each.pull(each.mapped_only)

    assert (damaged.full_pages, damaged.error) == (0, "checksum of page 0 is wrong")
    assert whole.full_pages == PAGES


async def test_a_page_that_was_damaged_at_rest_is_not_restored(tmp_path: Path) -> None:
    """Over either way the checksum is that of the page when it was stored."""
    async with node(tmp_path) as each:
        each.put(S)
        path = tmp_path / "store" / "slab"
        stored = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(stored.index(content(tags(S, PAGES)[2])))
            file.write(b"X")

        result, pages = await each.pull(each.peer)

    assert (result.full_pages, result.error) == (2, "checksum of page 2 is wrong")
    assert pages == [content(tag) for tag in tags(S, 2)]


PART = PagePart(4, 4, Part(range(1, 3), range(1, 2)))


def stored_cells(tag: Tag) -> list[bytes]:
    """A page of which no two cells are alike."""
    cell = PAGE_BYTES // PART.page_cells
    return [bytes([at + 1]) * (cell - TAG_BYTES) + tag for at in range(PART.page_cells)]


async def pull_part(each: Node, peer: Peer, count: int) -> tuple[PullResult, list[bytes]]:
    views = [memoryview(bytearray(PART.bytes_of(PAGE_BYTES))) for _ in range(count)]
    async with asyncio.timeout(60):
        result = await each.puller.pull(peer, PullRequest(tags(S, count), part=PART), views, None)
    return result, [bytes(view) for view in views[: result.full_pages]]


@pytest.mark.parametrize("count", [2, PAGES], ids=["few", "many"])
async def test_of_a_part_only_its_cells_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Out of memory and through a socket they are the same, and their checksums come from when the
    pages were stored: nothing else of a page is read.
    """
    due = [b"".join(stored_cells(tag)[at] for at in (5, 9)) for tag in tags(S, count)]
    async with node(tmp_path, CELLED, kind=CELLED) as each:
        each.put(S, count, lambda tag: b"".join(stored_cells(tag)))
        # Would be called to compute one.
        monkeypatch.setattr(server, "_checksum", None)
        monkeypatch.setattr(server, "checksum_of", None)
        copied, pages = await pull_part(each, each.mapped_only, count)
        sent, same = await pull_part(each, each.sent_only, count)

    assert pages == same == due
    assert copied.bytes == sent.bytes == count * PAGE_BYTES // 8


async def test_a_part_of_which_a_cell_was_damaged_at_rest_is_not_restored(tmp_path: Path) -> None:
    """Nor is the page adopted by the next agent."""
    async with node(tmp_path, CELLED, kind=CELLED) as each:
        each.put(S, page=lambda tag: b"".join(stored_cells(tag)))
        path = tmp_path / "store" / "slab"
        stored = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(stored.index(stored_cells(tags(S, PAGES)[2])[9]))
            file.write(b"X")
        copied, _ = await pull_part(each, each.mapped_only, PAGES)
        sent, _ = await pull_part(each, each.sent_only, PAGES)

    assert (copied.full_pages, sent.full_pages) == (2, 2)
    assert sent.error == "checksum of page 2 is wrong"


async def test_tails_are_sent(tmp_path: Path) -> None:
    """Bytes behind the tokens of a partial page are not for others."""
    async with node(tmp_path) as each:
        each.put(S, 2)
        views = [memoryview(bytearray(PAGE_BYTES)) for _ in range(2)]
        tail = memoryview(bytearray(PAGE_BYTES))
        asked = PullRequest(tags(S, 2), handoff=S, tail_index=2)
        result = await each.puller.pull(each.peer, asked, views, tail)

    assert (result.full_pages, result.tail) == (2, False)


@pytest.mark.parametrize("back", [False, True], ids=["other", "the first again"])
async def test_pages_of_another_kind_leave_no_stale_file(tmp_path: Path, back: bool) -> None:
    """An agent that takes over another model has a new file under the old name. One that comes
    back to the first model has the same identity as before, and yet another file.
    """
    other = replace(ENGINE, fingerprint="other")
    async with node(tmp_path) as each:
        each.put(S)
        await each.pull(each.mapped_only)
        each.store.release([S], 0.0)
        each.store.adopt(other)
        if back:
            each.store.adopt(ENGINE)
        else:
            each.puller._mapper._pool._identity = lambda: other
        each.put(T)

        result, pages = await each.pull(each.mapped_only, PAGES, T)

    assert result.full_pages == PAGES
    assert pages == [content(tag) for tag in tags(T, PAGES)]


async def test_files_are_mapped_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that ends gives its memory back, although engines go on."""
    monkeypatch.setattr(puller, "_IDLE_S", 0.05)
    async with node(tmp_path) as each:
        each.put(S)
        await each.pull(each.mapped_only)

        await until(lambda: not slab_mapped(tmp_path / "store", mode="r--s"))


async def test_memory_is_a_link_of_its_own(tmp_path: Path) -> None:
    """Copies say nothing of the node's network, and the other way round."""
    async with node(tmp_path) as each:
        each.put(S)
        await each.pull(each.mapped_only)
        assert set(each.puller.links()) == {MEMORY}

        await each.pull(each.sent_only)
        assert set(each.puller.links()) == {MEMORY, N0}


async def test_memory_is_measured_before_anything_was_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a minute, and only where the agent hands out its memory."""
    monkeypatch.setattr(puller, "_PROBE_BYTES", 1 << 20)
    async with node(tmp_path) as each:
        await each.puller.probe(replace(each.peer, directory=tmp_path / "another host"))
        assert MEMORY not in each.puller.links()

        await each.puller.probe(each.peer)
        measured = each.puller.links()[MEMORY]
        await each.puller.probe(each.peer)

        assert measured.bytes_per_s > 0
        assert each.puller.links()[MEMORY].age_s >= measured.age_s


def causes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why pages were sent, by the log."""
    return [vars(record)["cause"] for record in caplog.records if record.msg == "pages are sent"]


def slab_mapped(directory: Path, mode: str) -> list[str]:
    """Lines of this process's maps of that mode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{directory}/slab" in line and f" {mode} " in line]
