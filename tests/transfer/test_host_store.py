"""Checkpoints in memory that outlives the process: pages that were stored are served, to any peer
and after any restart.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.frames import checksum
from kvrs.protocol.pages import (
    CheckpointClaim,
    HeldPages,
    Identity,
    PullRequest,
    StoreCode,
    Tag,
    page_tags,
    root_tag,
)
from kvrs.transfer.peers import PinnedPages
from kvrs.transfer.store.directory import StoreDirectory
from kvrs.transfer.store.host import HostStore, PageKind

S, T = StreamId("s"), StreamId("t")
AGENT = InstanceId("agent-n0")
PAGE_BYTES = 4096
LEASE_S = 10.0
OK, FULL = StoreCode.OK, StoreCode.FULL


def engine(fingerprint: str = "model", page_bytes: int = PAGE_BYTES) -> Identity:
    return Identity(InstanceId("e0"), NodeId("n0"), 1, fingerprint, page_bytes)


def tags(family: int, pages: int) -> tuple[Tag, ...]:
    return tuple(page_tags(root_tag("model"), [family] * pages, 1))


def page(tag: Tag, page_bytes: int = PAGE_BYTES) -> bytes:
    return (tag * -(-page_bytes // len(tag)))[:page_bytes]


class StoreHost:
    """A directory for stores, one process after the other, and their clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 0.0
        self._lives = ExitStack()

    def open(self, capacity_pages: int = 8) -> HostStore:
        directory = self._lives.enter_context(StoreDirectory(self.path))
        size = capacity_pages * PAGE_BYTES
        return HostStore(AGENT, NodeId("n0"), directory, size, LEASE_S, lambda: self.now_s)

    def kill(self) -> None:
        """The process is gone, and its lock with it."""
        self._lives.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StoreHost]:
    host = StoreHost(tmp_path / "store")
    yield host
    host.kill()


def put(
    store: HostStore, stream: StreamId, first: int, some: tuple[Tag, ...], attempt: int = 1
) -> HeldPages:
    incoming = store.begin(CheckpointClaim(stream, 0, attempt), first, some)
    for index, view in enumerate(incoming.views):
        if view is not None:
            view[:] = page(some[index])
            incoming.commit(index, checksum(view))
    return incoming.end()


def filled(host: StoreHost, pages: int, capacity_pages: int = 8) -> HostStore:
    store = host.open(capacity_pages)
    store.adopt(engine())
    assert store.offer(CheckpointClaim(S, 0, 1), pages * PAGE_BYTES, ()) == HeldPages(OK, 0)
    assert put(store, S, 0, tags(1, pages)) == HeldPages(OK, pages)
    return store


@contextmanager
def pinned(store: HostStore, request: PullRequest) -> Iterator[PinnedPages]:
    """Nothing is awaited for pages of a store."""
    pages = store.pinned(request)
    with asyncio.Runner() as runner:
        yield runner.run(pages.__aenter__())
        runner.run(pages.__aexit__(None, None, None))


def read(store: HostStore, some: tuple[Tag, ...]) -> int:
    """How many leading pages there are; they are right."""
    with pinned(store, PullRequest(some)) as found:
        assert [bytes(view) for view in found.pages] == [
            page(tag) for tag in some[: len(found.pages)]
        ]
        return len(found.pages)


def test_a_file_that_took_the_place_of_another_is_not_lent_for_it(host: StoreHost) -> None:
    """Pages of a new kind have files of the same names; the old ones are still pinned."""
    store = filled(host, 2)
    with pinned(store, PullRequest(tags(1, 2))) as found:
        region, (_, offset) = found.region, found.offsets
        assert region is not None
        store.release([S], 0.0)
        store.adopt(engine("other"))
        store.offer(CheckpointClaim(T, 0, 1), PAGE_BYTES, ())
        put(store, T, 0, tags(2, 1))

        fd = region.open()
        assert os.pread(fd, PAGE_BYTES, offset) == page(tags(1, 2)[1])
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", offset)
        os.close(fd)


def test_what_is_reserved_are_whole_pages(host: StoreHost) -> None:
    """A page that has room for one byte less is no room."""
    store = host.open(capacity_pages=2)
    store.adopt(engine())

    assert store.offer(CheckpointClaim(S, 0, 1), PAGE_BYTES + 1, ()).code is OK
    assert store.offer(CheckpointClaim(T, 0, 1), 1, ()).code is FULL


def test_the_next_life_has_what_was_whole(host: StoreHost) -> None:
    """Nothing of it is reserved, and its epoch is higher."""
    store = filled(host, 3)
    store.offer(CheckpointClaim(S, 0, 1), 4 * PAGE_BYTES, tags(1, 3))
    arriving = store.begin(CheckpointClaim(S, 0, 1), 3, tags(1, 4)[3:])
    host.kill()

    again = host.open()

    assert store.epoch < again.epoch
    assert again.kind == PageKind("model", PAGE_BYTES)
    assert (again.held_bytes, again.reserved_bytes, again.checkpoints) == (3 * PAGE_BYTES, 0, 0)
    again.adopt(engine())
    assert read(again, tags(1, 4)) == 3
    assert again.offer(CheckpointClaim(S, 0, 1), 4 * PAGE_BYTES, tags(1, 4)) == HeldPages(OK, 3)
    assert put(again, S, 3, tags(1, 4)[3:]) == HeldPages(OK, 4)
    again.check()
    arriving.end()


def test_a_page_that_is_being_overwritten_is_not_there_in_the_next_life(host: StoreHost) -> None:
    """Its old record went before the first new byte came."""
    store = filled(host, 2, capacity_pages=2)
    store.release([S], LEASE_S)
    store.offer(CheckpointClaim(T, 0, 1), 2 * PAGE_BYTES, ())
    half = store.begin(CheckpointClaim(T, 0, 1), 0, tags(2, 1))
    host.kill()

    again = host.open(capacity_pages=2)

    assert half.views[0] is not None
    assert read(again, tags(1, 2)) == 1  # The tail of the old run was given up.


def test_pages_of_another_kind_are_taken_when_nothing_is_reserved(host: StoreHost) -> None:
    """Until then an engine of another model finds an agent of the old one, and is refused."""
    store = filled(host, 2)

    store.adopt(engine("other", 2 * PAGE_BYTES))
    kept = store.kind.fingerprint
    host.now_s = LEASE_S
    store.adopt(engine("other", 2 * PAGE_BYTES))

    assert kept == "model"
    assert (store.kind, store.held_bytes) == (PageKind("other", 2 * PAGE_BYTES), 0)
    store.adopt(engine("a third one"))
    store.offer(CheckpointClaim(T, 0, 1), 2 * PAGE_BYTES, ())
    assert put(store, T, 0, tags(2, 2)) == HeldPages(OK, 2)
    host.kill()
    assert host.open().kind.fingerprint == "a third one"


@pytest.mark.parametrize("pages", [0, 2])
def test_a_kind_that_cannot_be_written_down_is_not_taken(
    host: StoreHost, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """The memory is full of what others keep there: the engine comes again, and meanwhile nothing
    has changed.
    """
    store = filled(host, pages) if pages else host.open()
    store.release([S], LEASE_S)
    before = store.kind, store.held_bytes

    def refuse(old: str, new: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store._directory, "rename", refuse)
        with pytest.raises(OSError, match="No space"):
            store.adopt(engine("other", 2 * PAGE_BYTES))

    assert (store.kind, store.held_bytes) == before
    assert read(store, tags(1, 2)) == 2 if pages else not store.kind.page_bytes
    store.adopt(engine("other", 2 * PAGE_BYTES))
    assert store.offer(CheckpointClaim(T, 0, 1), 2 * PAGE_BYTES, ()) == HeldPages(OK, 0)


def test_who_reads_old_pages_keeps_them_until_he_is_done(host: StoreHost) -> None:
    """Their memory is given back after that."""
    store = filled(host, 2)

    def open_slabs() -> int:
        links = [Path("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
        found = [link.readlink() for link in links if link.is_symlink()]
        return sum(str(target).startswith(f"{host.path}/slab") for target in found)

    before = open_slabs()
    with pinned(store, PullRequest(tags(1, 2))) as found:
        store.release([S], LEASE_S)
        store.adopt(engine("other"))

        assert [bytes(view) for view in found.pages] == [page(tag) for tag in tags(1, 2)]
        assert open_slabs() == 2 * before
    del found
    assert open_slabs() == before


def test_room_that_the_system_does_not_have_is_no_room(
    host: StoreHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is answered FULL, others are not affected; room that comes free is used."""
    store = host.open()
    store.adopt(engine())
    store.offer(CheckpointClaim(S, 0, 1), 2 * PAGE_BYTES, ())

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, store.watched() as changes:
        patched.setattr(os, "posix_fallocate", refuse)
        assert put(store, S, 0, tags(1, 2)) == HeldPages(FULL, 0)
        assert changes.take() == ([S], [S])
    store.check()

    assert put(store, S, 0, tags(1, 2)) == HeldPages(OK, 2)


def test_a_watcher_hears_of_all_streams_and_then_of_those_that_changed(host: StoreHost) -> None:
    """Each watcher by itself."""
    store = filled(host, 2)
    with store.watched() as early:
        first = early.take()
        store.offer(CheckpointClaim(T, 0, 1), 4 * PAGE_BYTES, ())
        store.offer(CheckpointClaim(StreamId("u"), 0, 1), 9 * PAGE_BYTES, ())
        with store.watched() as late:
            assert set(late.take()[0]) == {S, T}
            put(store, T, 0, tags(2, 1))
            assert late.take() == ([T], [])
        second = early.take()
        host.now_s = LEASE_S
        store.expire()

        assert first == ([S], [])
        assert (set(second[0]), second[1]) == ({T, "u"}, ["u"])
        assert set(early.take()[0]) == {S, T}
        assert early.take() == ([], [])


def test_who_found_room_after_all_was_not_denied_it(host: StoreHost) -> None:
    """Prefill makes its offer too early, then decode for the same stream: a watcher gets the last
    answer.
    """
    store = filled(host, 6)
    with store.watched() as changes:
        changes.take()

        assert store.offer(CheckpointClaim(T, 0, 1), 4 * PAGE_BYTES, ()).code is FULL
        store.release([S], LEASE_S)
        assert store.offer(CheckpointClaim(T, 0, 1), 4 * PAGE_BYTES, ()).code is OK

        assert changes.take()[1] == []
        assert store.offer(CheckpointClaim(T, 0, 2), 9 * PAGE_BYTES, ()).code is FULL
        assert store.offer(CheckpointClaim(T, 0, 1), 4 * PAGE_BYTES, ()).code is StoreCode.FENCED
        assert changes.take()[1] == [T]


def test_an_offer_is_weighed_against_all_leases_only_where_it_would_be_refused(
    host: StoreHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its restart an agent gets an offer for every stream at once: each looking at all others
    would take seconds.
    """
    store = filled(host, 6)
    assert store._shelf is not None
    looks: list[float] = []
    expire = store._shelf.book.expire

    def look(now_s: float) -> list[StreamId]:
        looks.append(now_s)
        return expire(now_s)

    monkeypatch.setattr(store._shelf.book, "expire", look)
    assert store.offer(CheckpointClaim(T, 0, 1), 2 * PAGE_BYTES, ()) == HeldPages(OK, 0)
    assert looks == []
    assert store.offer(CheckpointClaim(StreamId("u"), 0, 1), PAGE_BYTES, ()).code is FULL

    host.now_s = LEASE_S
    assert store.offer(CheckpointClaim(StreamId("u"), 0, 1), 8 * PAGE_BYTES, ()) == HeldPages(OK, 0)
    assert looks == [0.0, LEASE_S]
    store.check()


async def test_memory_is_got_before_it_is_needed(host: StoreHost) -> None:
    """So that the event loop does not wait for it."""
    store = host.open(capacity_pages=4096)
    growing = asyncio.create_task(store.grow_ahead())
    store.adopt(engine())
    try:
        await asyncio.sleep(0)
        slab = host.path / "slab"
        assert slab.stat().st_blocks * 512 < 1 << 20
        store.offer(CheckpointClaim(S, 0, 1), PAGE_BYTES, ())
        while slab.stat().st_blocks * 512 < 1 << 22:
            assert not growing.done()
            await asyncio.sleep(0.001)
    finally:
        growing.cancel()
        await asyncio.gather(growing, return_exceptions=True)


def test_the_clean_end_leaves_nothing(host: StoreHost) -> None:
    """Not even the directory."""
    store = filled(host, 2)

    store.clear()
    host.kill()

    assert not host.path.exists()
