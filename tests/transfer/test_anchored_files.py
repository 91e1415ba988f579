"""Memory of instances and weights: who attaches it, and when the agent gives it back. Files and
locks are real.
"""

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrs.ids import InstanceId
from kvrs.transfer.anchors import (
    HEADER_BYTES,
    AnchoredFiles,
    AnchorError,
    NoAgentError,
    read_header,
)
from kvrs.transfer.store.directory import StoreDirectory

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
def attaching(directory: StoreDirectory) -> Iterator[AnchoredFiles]:
    """The files as a process of an instance opens them."""
    with AnchoredFiles.of_agent(directory.path, wait_s=0.1, reserved_bytes=0) as files:
        yield files


@contextmanager
def memory(
    directory: StoreDirectory, start: int, kind: str = KIND, name: InstanceId = E0
) -> Iterator[tuple[bool, int]]:
    """Attached memory, until the block ends as the process would."""
    with attaching(directory) as files:
        is_new, fd = files.memory(name, start, kind, SIZE)
    try:
        yield is_new, fd
    finally:
        os.close(fd)


def names(directory: StoreDirectory) -> set[str]:
    return {name for name in directory.names() if name != "attaching"}


def open_files(directory: StoreDirectory) -> list[str]:
    """Files of the directory that this process has open."""
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [link for link in links if link.startswith(f"{directory.path.resolve()}/")]


def test_memory_is_zero_at_first_and_found_again(directory: StoreDirectory) -> None:
    """By the next process of the instance, not by another instance."""
    with memory(directory, 1) as (is_new, fd):
        assert is_new
        assert os.pread(fd, SIZE, PAGES_AT) == bytes(SIZE - PAGES_AT)
        os.pwrite(fd, b"KV", PAGES_AT)
    with memory(directory, 2) as (is_new, fd):
        assert not is_new
        assert os.pread(fd, 2, PAGES_AT) == b"KV"
    with memory(directory, 1, name=E1) as (is_new, _):
        assert is_new


def test_nothing_of_it_is_inherited_or_open_to_others(directory: StoreDirectory) -> None:
    """Whatever the umask is; and nothing else stays open."""
    before = open_files(directory)
    with memory(directory, 1) as (_, fd):
        assert not os.get_inheritable(fd)
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert len(open_files(directory)) == len(before) + 1


@pytest.mark.parametrize(
    "name",
    ["memory-", "memory-e0-1.0", os.fsdecode(b"memory-\xff"), "weights-?"],
    ids=["no instance", "an older format", "not UTF-8", "no key"],
)
def test_a_stray_file_with_such_a_name_is_an_orphan(directory: StoreDirectory, name: str) -> None:
    """No instance has it, and in a directory that is closed to others it is a left-over."""
    os.close(directory.open_own(name, os.O_RDWR | os.O_CREAT))
    agent = AnchoredFiles(directory)
    with memory(directory, 1) as (is_new, _):
        assert is_new
        agent.end_orphans(1.0, 0.0)
        assert names(directory) == {name, "memory-e0"}
        agent.end_orphans(1.0, 1.0)
        assert names(directory) == {"memory-e0"}


def test_memory_in_use_is_left_to_its_process_which_is_fenced(directory: StoreDirectory) -> None:
    """A process that was stopped still writes when it wakes up: its successor gets other memory,
    and the header tells it to end.
    """
    with memory(directory, 1) as (_, old), memory(directory, 2) as (is_new, _):
        assert is_new
        os.pwrite(old, b"late", PAGES_AT)
        assert read_header(os.pread(old, HEADER_BYTES, 0)) == (KIND, 2)
        with memory(directory, 3) as (again, fd):
            assert again
            assert os.pread(fd, 4, PAGES_AT) == bytes(4)
    assert names(directory) == {"memory-e0"}


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A process that does this and ends, which is killed with the block."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_processes_attach_one_after_another(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed meanwhile makes way, and what it had begun is made anew."""
    made, at_work = directory.path / "memory-e0", os.posix_fallocate

    def stop(fd: int, first: int, size: int) -> None:
        at_work(fd, first, size)
        time.sleep(60)

    with monkeypatch.context() as patched, attaching(directory) as files:
        patched.setattr(os, "posix_fallocate", stop)
        with child(lambda: files.memory(E0, 1, KIND, SIZE)) as pid:
            patched.undo()
            while not (made.exists() and made.stat().st_size == SIZE):
                time.sleep(0.005)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(files.memory, E0, 2, KIND, SIZE)
                with pytest.raises(TimeoutError):
                    waiting.result(0.2)
                AnchoredFiles(directory).end_orphans(0.0, 0.0)
                assert made.exists()
                os.kill(pid, signal.SIGKILL)
                is_new, fd = waiting.result(60)
    assert is_new
    assert read_header(os.pread(fd, HEADER_BYTES, 0)) == (KIND, 2)
    os.close(fd)


@pytest.mark.parametrize("how", ["model", "size", "torn header", "torn epoch", "empty"])
def test_memory_of_another_kind_is_not_adopted(directory: StoreDirectory, how: str) -> None:
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
    with memory(directory, 5), attaching(directory) as files:
        for start in (4, 5):
            with pytest.raises(
                AnchorError, match=f"by start 5; allowed: a later start, not {start}"
            ):
                files.memory(E0, start, KIND, SIZE)


def test_more_than_there_is_is_refused_with_bytes(directory: StoreDirectory) -> None:
    """And nothing is left of it. What is free counts without the room for checkpoints."""
    free = directory.free_bytes()
    for wanted, reserved in ((free + (1 << 30), 0), (1 << 20, free)):
        files = AnchoredFiles(directory, reserved_bytes=reserved)
        with pytest.raises(AnchorError, match=rf"memory of 'e0': {wanted} bytes; allowed"):
            files.memory(E0, 1, KIND, wanted)
        with pytest.raises(AnchorError, match=rf"weights: {wanted} bytes; allowed"):
            files.weights(KIND, wanted)
    assert names(directory) == set()


@pytest.mark.parametrize("mode", [0o644, 0o620])
def test_a_file_that_others_may_open_is_refused_by_name(
    directory: StoreDirectory, mode: int
) -> None:
    with memory(directory, 1):
        pass
    os.chmod(directory.path / "memory-e0", mode)
    before = open_files(directory)
    with pytest.raises(AnchorError, match=r"memory-e0 in .*others"), memory(directory, 2):
        pass
    assert open_files(directory) == before


def test_a_directory_that_others_may_use_is_no_agents(directory: StoreDirectory) -> None:
    """Nothing is read or made in it."""
    os.chmod(directory.path, 0o755)
    with pytest.raises(AnchorError, match="others may use it"), attaching(directory):
        pass
    os.chmod(directory.path, 0o700)


def test_without_a_directory_there_is_no_agent(tmp_path: Path) -> None:
    """An agent that starts in time is waited for; one that ended took its memory away."""
    path = tmp_path / "store"

    def late() -> StoreDirectory:
        time.sleep(0.2)
        return StoreDirectory(path)

    nowhere = AnchoredFiles.of_agent(path, 0.05, 0)
    with pytest.raises(NoAgentError, match="No such file"), nowhere:
        pass
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(late)
        with AnchoredFiles.of_agent(path, 60.0, 0) as files, made.result() as agent:
            AnchoredFiles(agent).clear()
            os.rmdir(path)
            with pytest.raises(NoAgentError, match="has ended"):
                files.memory(E0, 1, KIND, SIZE)


def test_the_next_agent_finds_memory_and_processes_again(directory: StoreDirectory) -> None:
    """Nothing of the agent lasts but files: a process that serves meanwhile keeps its memory."""
    with memory(directory, 1, name=E1):
        pass
    with memory(directory, 1) as (_, fd):
        os.pwrite(fd, b"KV", PAGES_AT)
        agent = AnchoredFiles(directory)
        agent.end_orphans(1.0, 10.0)
        agent.end_orphans(1.0, 11.5)
        assert names(directory) == {"memory-e0"}
    with memory(directory, 2) as (is_new, fd):
        assert not is_new
        assert os.pread(fd, 2, PAGES_AT) == b"KV"


def test_memory_that_is_used_in_time_is_no_orphan(directory: StoreDirectory) -> None:
    agent = AnchoredFiles(directory)
    with memory(directory, 1):
        agent.end_orphans(10.0, 0.0)
    agent.end_orphans(10.0, 5.0)
    with memory(directory, 2):
        agent.end_orphans(10.0, 14.0)
    agent.end_orphans(10.0, 16.0)
    agent.end_orphans(10.0, 25.0)
    assert names(directory)
    agent.end_orphans(10.0, 26.5)
    assert not names(directory)


def test_an_agent_that_ends_takes_everything_away(directory: StoreDirectory) -> None:
    """A process keeps what it has mapped."""
    with memory(directory, 1) as (_, fd):
        write_weights(directory)
        AnchoredFiles(directory).clear()
        assert directory.names() == []
        assert os.pwrite(fd, b"KV", PAGES_AT) == 2


# Weights.


def write_weights(directory: StoreDirectory) -> None:
    to_read, to_write = begun(directory)
    os.pwrite(to_write, b"weights", 0)
    os.close(to_write)
    with attaching(directory) as files:
        files.commit(KIND)
    os.close(to_read)


def begun(directory: StoreDirectory) -> tuple[int, int]:
    """Descriptors to read and to write weights that are new."""
    with attaching(directory) as files:
        to_read, to_write = files.weights(KIND, 8192)
    assert to_write is not None
    return to_read, to_write


def test_weights_are_written_once_and_read_by_all(directory: StoreDirectory) -> None:
    """Their descriptors cannot be mapped to be written."""
    write_weights(directory)
    with attaching(directory) as files:
        for _ in range(2):
            fd, to_write = files.weights(KIND, 8192)
            assert to_write is None
            assert os.pread(fd, 7, 0) == b"weights"
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            os.close(fd)


def test_weights_that_a_process_can_still_write_are_not_committed(
    directory: StoreDirectory,
) -> None:
    """A map counts, also when its descriptor is closed."""
    to_read, to_write = begun(directory)
    mapped = mmap.mmap(to_write, 8192)
    os.close(to_write)
    with attaching(directory) as files:
        with pytest.raises(AnchorError, match="can still write these weights"):
            files.commit(KIND)
        mapped.close()
        files.commit(KIND)
    os.close(to_read)


def test_weights_that_are_written_wait_for_their_commit(directory: StoreDirectory) -> None:
    """Another process that asks meanwhile does not begin them again."""
    to_read, to_write = begun(directory)
    os.pwrite(to_write, b"weights", 0)
    os.close(to_write)
    with attaching(directory) as files, ThreadPoolExecutor(1) as pool:
        other = pool.submit(files.weights, KIND, 8192)
        with pytest.raises(TimeoutError):
            other.result(0.2)
        files.commit(KIND)
        fd, second = other.result(30)
    assert second is None
    assert os.pread(fd, 7, 0) == os.pread(to_read, 7, 0) == b"weights"
    os.close(fd)
    os.close(to_read)


def test_a_writer_that_dies_makes_room_for_the_next(directory: StoreDirectory) -> None:
    """Half of the weights are never read."""
    to_read, to_write = begun(directory)
    os.pwrite(to_write, b"half", 0)
    os.close(to_write)
    os.close(to_read)
    to_read, to_write = begun(directory)
    assert os.pread(to_read, 4, 0) == bytes(4)
    os.close(to_write)
    os.close(to_read)


def test_weights_that_an_agent_took_away_are_not_committed(directory: StoreDirectory) -> None:
    to_read, to_write = begun(directory)
    os.close(to_write)
    AnchoredFiles(directory).clear()
    with attaching(directory) as files, pytest.raises(NoAgentError):
        files.commit(KIND)
    os.close(to_read)


def test_weights_of_another_size_are_refused(directory: StoreDirectory) -> None:
    write_weights(directory)
    refused = pytest.raises(AnchorError, match="has 8192 bytes; allowed: 4096")
    with attaching(directory) as files, refused:
        files.weights(KIND, 4096)


def test_no_name_leads_out_of_the_directory(directory: StoreDirectory) -> None:
    with attaching(directory) as files:
        to_read, to_write = files.weights("../a", 8192)
        _, fd = files.memory(InstanceId("../b"), 1, KIND, SIZE)
    assert to_write is not None
    assert names(directory) == {"weights-..%2Fa.new", "memory-..%2Fb"}
    for each in (to_read, to_write, fd):
        os.close(each)


def test_weights_that_are_mapped_nowhere_are_orphans_too(directory: StoreDirectory) -> None:
    agent = AnchoredFiles(directory)
    write_weights(directory)
    fd, _ = agent.weights(KIND, 8192)
    agent.end_orphans(1.0, 0.0)
    agent.end_orphans(1.0, 5.0)
    assert names(directory) == {f"weights-{KIND}"}
    os.close(fd)
    agent.end_orphans(1.0, 6.0)
    agent.end_orphans(1.0, 7.0)
    assert names(directory) == set()
