"""Regions, leases, seals and the passing of descriptors: what the store's segments, the memory of
instances and the memory of ranks rely on. Files, locks and sockets are real.
"""

import asyncio
import mmap
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import KvrsError
from kvrs.transfer import shared_memory
from kvrs.transfer.sealed import SealedBlocks, kind_of, sealed, unsealed
from kvrs.transfer.shared_memory import (
    Region,
    close_all,
    connect_in,
    foreign_user,
    in_threads,
    listen_in,
    lock,
    map_file,
    receive,
    reserve,
    rights,
)

pytestmark = pytest.mark.process

SIZE = 4 * mmap.PAGESIZE


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_reserved_and_shared_by_all_that_map_it() -> None:
    """And exists as long as one of them has it."""
    region = Region.anonymous("region", SIZE)
    other = map_file(os.dup(region.descriptor))
    region.memory[:2] = b"KV"

    assert os.fstat(region.descriptor).st_blocks * 512 >= SIZE == region.size_bytes
    region.close()
    region.memory.close()
    assert other[:2] == b"KV"


def test_a_region_leaves_no_descriptor() -> None:
    """Closed once or twice, or dropped; what shares it keeps its own."""
    before = descriptors()
    region = Region.anonymous("region", 1)
    shared = region.shared()
    region.close()
    region.close()
    assert os.fstat(shared.descriptor).st_size == mmap.PAGESIZE == shared.size_bytes

    del region, shared

    assert descriptors() == before


def test_a_region_is_lent_to_be_read() -> None:
    region = Region.anonymous("region", SIZE)
    fd = region.open()
    assert not os.get_inheritable(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        map_file(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)  # It was closed all the same.


def test_whole_pages_of_a_range_are_given_back() -> None:
    """Also where another process has them mapped; the rest stays."""
    region = Region.anonymous("region", SIZE)
    region.memory[:] = b"x" * SIZE

    region.drop(1, SIZE - 1)

    kept = b"x" * mmap.PAGESIZE
    assert region.memory[:] == kept + bytes(SIZE - 2 * mmap.PAGESIZE) + kept
    region.drop()
    assert region.memory[:] == bytes(SIZE)


def test_memory_that_is_not_there_is_refused_with_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the start, not when a page of it is touched. Nothing is left of it."""
    before = descriptors()
    with pytest.raises(KvrsError, match=rf"no room for {1 << 60} bytes of shared memory \(much\)"):
        Region.anonymous("much", 1 << 60)

    def refuse(fd: int, first: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(KvrsError, match=rf"no room for {SIZE} .*: No space left on device"):
        Region.anonymous("much", SIZE)
    assert descriptors() == before


def test_what_a_range_has_already_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit of a control group the kernel would end the process."""
    with (tmp_path / "file").open("w+b") as file:
        reserve(file.fileno(), 0, SIZE)
        monkeypatch.setattr(shared_memory, "free_in_groups", lambda: mmap.PAGESIZE)
        reserve(file.fileno(), 0, SIZE)
        reserve(file.fileno(), SIZE, mmap.PAGESIZE)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            reserve(file.fileno(), 0, 2 * SIZE)
        assert os.fstat(file.fileno()).st_size == SIZE + mmap.PAGESIZE


# Leases.


def test_a_lease_ends_with_its_last_process(tmp_path: Path) -> None:
    """A map keeps it, and so does a child that is killed."""
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))

    def opened() -> int:
        return os.open(path, os.O_RDWR)

    holder, other = opened(), opened()
    assert lock(holder)
    assert lock(holder)
    assert not lock(other)
    mapped = map_file(holder)
    assert not lock(other, 0.05)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    mapped.close()
    assert not lock(other)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lock(other)
    os.close(other)


def test_a_lease_that_ends_meanwhile_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    holder, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert lock(holder)
    ends = threading.Timer(0.1, os.close, [holder])
    ends.start()
    assert lock(other, 60.0)
    ends.join()
    os.close(other)


# Seals.


@given(st.binary(max_size=40), st.integers(0, 7), st.integers(0, 7))
def test_facts_are_read_where_they_were_written(facts: bytes, number: int, other: int) -> None:
    """A block that was copied to another place has a wrong seal."""
    blocks = SealedBlocks(memoryview(bytearray(8 * 64 + 5)), 5, 64)
    assert all(blocks.is_clear(each) and blocks.read(each) is None for each in range(8))

    blocks.write(number, facts)
    assert blocks.read(number) == facts
    if other != number:
        blocks.at(other)[:] = blocks.at(number)
        assert blocks.read(other) is None
    blocks.clear(number)
    assert blocks.is_clear(number)


@given(st.binary(max_size=40), st.binary(max_size=40), st.data())
def test_a_write_that_a_kill_cuts_is_no_fact(old: bytes, new: bytes, data: st.DataObject) -> None:
    """It begins over a block that was cleared, or over an older one."""
    is_cleared = data.draw(st.booleans())
    block = bytearray(64)
    if not is_cleared:
        block[: len(sealed(old))] = sealed(old)
    whole = sealed(new)
    written = data.draw(st.integers(0, len(whole)))
    block[:written] = whole[:written]

    read = unsealed(bytes(block))

    assert read in (None, new) or (read == old and not is_cleared)


@given(st.binary(max_size=80))
def test_bytes_of_any_kind_are_no_facts(block: bytes) -> None:
    """Too short ones, and lengths behind the end."""
    assert unsealed(bytes(block)) is None


@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_flipped_bit_is_found(facts: bytes, data: st.DataObject) -> None:
    block = bytearray(sealed(facts))
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    block[bit // 8] ^= 1 << bit % 8
    assert unsealed(bytes(block)) is None


def test_facts_of_a_kind_differ_in_each_part() -> None:
    kinds = {kind_of(*facts) for facts in ((1, 2), (12,), ("1", 2), (1, 2, None))}
    assert len(kinds) == 4
    assert all(len(kind) == 32 for kind in kinds)


# Passing of descriptors.


def pair(kind: socket.SocketKind = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, kind)


def test_descriptors_come_with_their_message() -> None:
    """They are this process's own, and no child has them."""
    region = Region.anonymous("region", SIZE)
    region.memory[:2] = b"KV"
    ours, theirs = pair()
    with ours, theirs:
        assert ours.sendmsg([b"two"], rights([region.descriptor] * 2)) == 3
        view, found = bytearray(16), list[int]()
        assert receive(theirs, view, found, 2) == 3
    assert view[:3] == b"two"
    assert [os.get_inheritable(fd) for fd in found] == [False, False]
    assert all(map_file(os.dup(fd))[:2] == b"KV" for fd in found)
    close_all(found)
    assert found == []


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("sent", [3, 100])
def test_more_descriptors_than_are_awaited_are_refused(kind: socket.SocketKind, sent: int) -> None:
    """However many they are, none of them stays open."""
    before = descriptors()
    ours, theirs = pair(kind)
    with ours, theirs, Path(os.devnull).open() as file:
        ours.sendmsg([b"x"], rights([file.fileno()] * sent))
        found: list[int] = []
        with pytest.raises(OSError, match="more than 2 descriptors"):
            receive(theirs, bytearray(16), found, 2)
        close_all(found)
    assert descriptors() == before


def test_descriptors_add_up_over_messages() -> None:
    """A peer that sends one with each byte is refused, too."""
    ours, theirs = pair()
    found: list[int] = []
    with ours, theirs, Path(os.devnull).open() as file:
        for _ in range(3):
            ours.sendmsg([b"x"], rights([file.fileno()]))
        for _ in range(2):
            receive(theirs, bytearray(1), found, 2)
        with pytest.raises(OSError, match="more than 2 descriptors"):
            receive(theirs, bytearray(1), found, 2)
    close_all(found)


def test_a_message_that_is_cut_is_refused() -> None:
    ours, theirs = pair(socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(b"12345")
        with pytest.raises(OSError, match="a message of more than 4 bytes"):
            receive(theirs, bytearray(4), [], 0)
        ours.send(b"1234")
        assert receive(theirs, bytearray(4), [], 0) == 4


def test_a_socket_is_found_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the path is, and in the place of one that was left. The kernel tells the user at
    the other end.
    """
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    listen_in(directory, "name", socket.SOCK_STREAM).close()
    listener = listen_in(directory, "name", socket.SOCK_STREAM)
    with listener, socket.socket(socket.AF_UNIX) as connection:
        connect_in(directory, "name", connection)
        with listener.accept()[0] as accepted:
            assert foreign_user(accepted) is None
            assert foreign_user(connection) is None
            uid = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
            assert foreign_user(accepted) == f"it is of user {uid}; allowed: user {uid + 1}"


@pytest.mark.parametrize(
    ("where", "cause"), [("nowhere", "No such file"), ("link", "Not a directory")]
)
def test_a_directory_is_not_reached_over_a_link(tmp_path: Path, where: str, cause: str) -> None:
    """Another user could put one there."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = descriptors()
    with pytest.raises(OSError, match=cause):
        listen_in(tmp_path / where, "name", socket.SOCK_STREAM)
    with socket.socket(socket.AF_UNIX) as connection, pytest.raises(OSError, match=cause):
        connect_in(tmp_path / where, "name", connection)
    assert descriptors() == before


# Work in threads.


@pytest.mark.parametrize(("size", "in_loop"), [(1 << 20, True), ((1 << 20) + 1, False)])
async def test_only_much_work_leaves_the_loop(size: int, in_loop: bool) -> None:
    ran: list[threading.Thread] = []

    await in_threads(size, 2 * [lambda: ran.append(threading.current_thread())])

    assert [thread is threading.main_thread() for thread in ran] == [in_loop, in_loop]


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_call_returns_when_its_work_has_ended(times: int) -> None:
    """However often it is cancelled: what it wrote to belongs to others then."""
    begun, go_on = threading.Event(), threading.Event()
    ended, stopped = list[int](), list[int]()

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            begun.set()
            assert go_on.wait(60)
            ended.append(number)

        return run

    call = asyncio.create_task(in_threads(1 << 21, [work(0), work(1)], lambda: stopped.append(1)))
    assert await asyncio.to_thread(begun.wait, 60)
    for _ in range(times):
        call.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
    assert not call.done()
    go_on.set()
    with suppress(asyncio.CancelledError):
        await call

    assert call.cancelled()
    assert sorted(ended) == [0, 1]
    assert stopped == [1]
