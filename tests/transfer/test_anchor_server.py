"""The agent's memory of instances and weights: what is handed out, to which process, and when it is
given back. Sockets, files and locks are real.
"""

import fcntl
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from kvrs.ids import InstanceId
from kvrs.transfer.anchors.client import AnchorClient, NoAgentError
from kvrs.transfer.anchors.ledger import HEADER_BYTES, read_header
from kvrs.transfer.anchors.messages import SOCKET, AnchorError
from kvrs.transfer.anchors.server import AnchorServer
from kvrs.transfer.store.directory import StoreDirectory

SECRET, OLDER = b"a secret of the tests, long enough", b"an older secret, also long enough"
E0, E1 = InstanceId("e0"), InstanceId("e1")
KIND, OTHER = "a" * 32, "b" * 32
pytestmark = pytest.mark.process

SIZE, PAGES_AT = 1 << 20, 3 * 4096


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    with StoreDirectory(tmp_path / "store") as directory:
        yield directory
        for name in directory.names():
            directory.unlink(name)


@contextmanager
def serving(directory: StoreDirectory, orphan_s: float = 60.0) -> Iterator[AnchorServer]:
    server = AnchorServer(directory, [E0, E1], [SECRET, OLDER], orphan_s=orphan_s, reserved_bytes=0)
    server.start()
    try:
        yield server
    finally:
        server.close()


def client(directory: StoreDirectory, secret: bytes = SECRET, wait_s: float = 0.1) -> AnchorClient:
    return AnchorClient(directory.path, secret, wait_s)


@contextmanager
def memory(
    directory: StoreDirectory, start: int, kind: str = KIND, name: InstanceId = E0
) -> Iterator[tuple[bool, int]]:
    """Attached memory, until the block ends as the process would."""
    is_new, fd = client(directory).memory(name, start, kind, SIZE)
    try:
        yield is_new, fd
    finally:
        os.close(fd)


def files(directory: StoreDirectory) -> set[str]:
    return {name for name in directory.names() if name != SOCKET}


def open_files(directory: StoreDirectory) -> list[str]:
    """Memory files of the directory that this process has open."""
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [link for link in links if link.startswith(f"{directory.path.resolve()}/memory-")]


def test_memory_is_zero_at_first_and_found_again(directory: StoreDirectory) -> None:
    """By the next process of the instance, not by another instance."""
    with serving(directory):
        with memory(directory, 1) as (is_new, fd):
            assert is_new
            assert os.pread(fd, SIZE, PAGES_AT) == bytes(SIZE - PAGES_AT)
            os.pwrite(fd, b"KV", PAGES_AT)
        with memory(directory, 2) as (is_new, fd):
            assert not is_new
            assert os.pread(fd, 2, PAGES_AT) == b"KV"
        with memory(directory, 1, name=E1) as (is_new, _):
            assert is_new


@pytest.mark.parametrize(
    "name",
    ["memory-", "memory-e0-1.0", os.fsdecode(b"memory-\xff"), "weights-?"],
    ids=["no instance", "an older format", "not UTF-8", "no key"],
)
def test_a_stray_file_with_such_a_name_is_an_orphan(directory: StoreDirectory, name: str) -> None:
    """No instance has it, and in a directory that is closed to others it is a left-over."""
    os.close(directory.open(name, os.O_RDWR | os.O_CREAT))
    with serving(directory, orphan_s=1.0) as server, memory(directory, 1) as (is_new, _):
        assert is_new
        server.end_orphans(0.0)
        assert files(directory) == {name, "memory-e0"}
        server.end_orphans(1.0)
        assert files(directory) == {"memory-e0"}


def test_descriptors_are_not_inherited(directory: StoreDirectory) -> None:
    with serving(directory), memory(directory, 1) as (_, fd):
        assert not os.get_inheritable(fd)


def test_memory_in_use_is_left_to_its_process_which_is_fenced(directory: StoreDirectory) -> None:
    """A process that was stopped still writes when it wakes up: its successor gets other memory,
    and the header tells it to end.
    """
    with serving(directory), memory(directory, 1) as (_, old), memory(directory, 2) as (is_new, _):
        assert is_new
        os.pwrite(old, b"late", PAGES_AT)
        assert read_header(os.pread(old, HEADER_BYTES, 0)) == (KIND, 2)
        with memory(directory, 3) as (again, fd):
            assert again
            assert os.pread(fd, 4, PAGES_AT) == bytes(4)
    assert files(directory) == {"memory-e0"}


def test_a_process_that_is_dying_is_waited_for(directory: StoreDirectory) -> None:
    """Its memory is torn down before its locks end."""
    with serving(directory):
        _, fd = client(directory).memory(E0, 1, KIND, SIZE)
        os.pwrite(fd, b"KV", PAGES_AT)
        pid = os.fork()
        if pid == 0:
            time.sleep(0.3)
            os._exit(0)
        os.close(fd)
        try:
            with memory(directory, 2) as (is_new, again):
                assert not is_new
                assert os.pread(again, 2, PAGES_AT) == b"KV"
        finally:
            os.waitpid(pid, 0)


@pytest.mark.parametrize("how", ["model", "size", "torn header", "torn epoch", "empty"])
def test_memory_of_another_kind_is_not_adopted(directory: StoreDirectory, how: str) -> None:
    with serving(directory):
        with memory(directory, 1) as (_, fd):
            os.pwrite(fd, b"KV", PAGES_AT)
            if how in ("torn header", "torn epoch"):
                os.pwrite(fd, b"?", 9 if how == "torn header" else 1027)
            if how in ("size", "empty"):
                os.truncate(fd, SIZE - 1 if how == "size" else 0)

        with memory(directory, 2, OTHER if how == "model" else KIND) as (is_new, fd):
            assert is_new
            assert read_header(os.pread(fd, HEADER_BYTES, 0)) is not None
            assert os.pread(fd, 2, PAGES_AT) == bytes(2)


def test_an_earlier_start_is_refused(directory: StoreDirectory) -> None:
    """A process that was started before the one that has the memory, and comes late."""
    with serving(directory), memory(directory, 5):
        with pytest.raises(AnchorError, match="attached by start 5; allowed: a later start, not 4"):
            client(directory).memory(E0, 4, KIND, SIZE)
        with pytest.raises(AnchorError, match="attached by start 5; allowed: a later start, not 5"):
            client(directory).memory(E0, 5, KIND, SIZE)


def test_an_instance_of_another_node_is_refused(directory: StoreDirectory) -> None:
    with serving(directory), pytest.raises(AnchorError, match="'x' is not on this node; allowed"):
        client(directory).memory(InstanceId("x"), 1, KIND, SIZE)


def test_more_than_there_is_is_refused_with_bytes(directory: StoreDirectory) -> None:
    """And nothing is left of it."""
    wanted = directory.free_bytes() + (1 << 30)
    with serving(directory):
        with pytest.raises(AnchorError, match=rf"memory of 'e0': {wanted} bytes; allowed"):
            client(directory).memory(E0, 1, KIND, wanted)
        assert files(directory) == set()


def test_only_the_secrets_of_the_cluster_are_served(directory: StoreDirectory) -> None:
    with serving(directory):
        with pytest.raises(NoAgentError, match="refuses"):
            client(directory, b"another secret, which is long too").memory(E0, 1, KIND, SIZE)
        assert files(directory) == set()
        _, fd = client(directory, OLDER).memory(E0, 1, KIND, SIZE)
        os.close(fd)


@pytest.mark.parametrize(
    "sent",
    [b"", b"x", bytes(64), Random(0).randbytes(4096)],
    ids=["nothing", "a byte", "zeros", "noise"],
)
def test_nonsense_gets_no_answer(directory: StoreDirectory, sent: bytes) -> None:
    """And other clients are served."""
    with serving(directory):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(directory.path / SOCKET))
            assert len(stranger.recv(100)) == 32
            stranger.send(sent or b"\0")
            stranger.settimeout(60)
            assert stranger.recv(100) == b""
        with memory(directory, 1) as (is_new, _):
            assert is_new


def test_a_file_that_others_may_open_is_refused_by_name(directory: StoreDirectory) -> None:
    with serving(directory):
        with memory(directory, 1):
            pass
        os.chmod(directory.path / "memory-e0", 0o644)
        before = open_files(directory)
        with pytest.raises(AnchorError, match=r"memory-e0 in .*others may use it"):
            client(directory).memory(E0, 2, KIND, SIZE)
        assert open_files(directory) == before == []


def test_the_next_agent_finds_memory_and_processes_again(directory: StoreDirectory) -> None:
    """Nothing of the agent lasts but files: a process that serves meanwhile keeps its memory."""
    with serving(directory):
        _, fd = client(directory).memory(E0, 1, KIND, SIZE)
        _, other = client(directory).memory(E1, 1, KIND, SIZE)
        os.close(other)
    with pytest.raises(NoAgentError):
        client(directory).memory(E0, 2, KIND, SIZE)
    os.pwrite(fd, b"KV", PAGES_AT)

    with serving(directory, orphan_s=1.0) as server:
        server.end_orphans(10.0)
        server.end_orphans(11.5)
        assert files(directory) == {"memory-e0"}
        os.close(fd)
        with memory(directory, 2) as (is_new, fd):
            assert not is_new
            assert os.pread(fd, 2, PAGES_AT) == b"KV"


def test_memory_that_is_used_in_time_is_no_orphan(directory: StoreDirectory) -> None:
    with serving(directory, orphan_s=10.0) as server:
        with memory(directory, 1):
            server.end_orphans(0.0)
        server.end_orphans(5.0)
        with memory(directory, 2):
            server.end_orphans(14.0)
        server.end_orphans(16.0)
        server.end_orphans(25.0)
        assert files(directory)
        server.end_orphans(26.5)
        assert not files(directory)


# Weights.


def write_weights(directory: StoreDirectory, key: str = KIND) -> None:
    to_read, to_write = client(directory).weights(key, 8192)
    assert to_write is not None
    os.pwrite(to_write, b"weights", 0)
    os.close(to_write)
    client(directory).commit(key)
    os.close(to_read)


def test_weights_are_written_once_and_read_by_all(directory: StoreDirectory) -> None:
    """Their descriptors cannot be mapped to be written."""
    with serving(directory):
        write_weights(directory)
        for _ in range(2):
            fd, to_write = client(directory).weights(KIND, 8192)
            assert to_write is None
            assert os.pread(fd, 7, 0) == b"weights"
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            os.close(fd)


def test_an_agent_that_is_slow_to_close_its_copies_refuses_no_commit(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close

    def close_late(fd: int) -> None:
        if threading.current_thread().name.startswith("anchors"):
            time.sleep(0.1)
        close(fd)

    monkeypatch.setattr(os, "close", close_late)
    with serving(directory):
        write_weights(directory)
        assert files(directory) == {f"weights-{KIND}"}


def begun(directory: StoreDirectory) -> tuple[int, int]:
    """Descriptors to read and to write weights that are new."""
    to_read, to_write = client(directory).weights(KIND, 8192)
    assert to_write is not None
    return to_read, to_write


def test_weights_that_a_process_can_still_write_are_not_committed(
    directory: StoreDirectory,
) -> None:
    """A map counts, also when its descriptor is closed."""
    with serving(directory):
        to_read, to_write = begun(directory)
        mapped = mmap.mmap(to_write, 8192)
        os.close(to_write)
        with pytest.raises(AnchorError, match="can still write these weights"):
            client(directory).commit(KIND)
        mapped.close()
        client(directory).commit(KIND)
        os.close(to_read)


def test_weights_that_are_written_wait_for_their_commit(directory: StoreDirectory) -> None:
    """Another process that asks meanwhile does not begin them again."""
    with serving(directory):
        to_read, to_write = begun(directory)
        os.pwrite(to_write, b"weights", 0)
        os.close(to_write)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(client(directory).weights, KIND, 8192)
            with pytest.raises(TimeoutError):
                other.result(0.2)
            client(directory).commit(KIND)
            fd, second = other.result(30)
        assert second is None
        assert os.pread(fd, 7, 0) == os.pread(to_read, 7, 0) == b"weights"
        os.close(fd)
        os.close(to_read)


def test_a_writer_that_dies_makes_room_for_the_next(directory: StoreDirectory) -> None:
    """Half of the weights are never read."""
    with serving(directory):
        to_read, to_write = begun(directory)
        os.pwrite(to_write, b"half", 0)
        os.close(to_write)
        os.close(to_read)
        to_read, to_write = begun(directory)
        assert os.pread(to_read, 4, 0) == bytes(4)
        os.close(to_write)
        os.close(to_read)


def test_weights_of_another_size_are_refused(directory: StoreDirectory) -> None:
    with serving(directory):
        write_weights(directory)
        with pytest.raises(AnchorError, match="has 8192 bytes; allowed: 4096"):
            client(directory).weights(KIND, 4096)


def test_a_key_is_no_path(directory: StoreDirectory) -> None:
    with serving(directory), pytest.raises(NoAgentError):
        client(directory).weights("../" + "a" * 29, 8192)


def test_weights_that_nobody_maps_are_orphans_too(directory: StoreDirectory) -> None:
    with serving(directory, orphan_s=1.0) as server:
        write_weights(directory)
        fd, _ = client(directory).weights(KIND, 8192)
        server.end_orphans(0.0)
        server.end_orphans(5.0)
        assert files(directory) == {f"weights-{KIND}"}
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        server.end_orphans(6.0)
        server.end_orphans(7.0)
        assert files(directory) == set()
