"""The shared memory of a killed process, and the part of it that the next one takes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvrs.errors import ConfigError
from kvrs.ids import NodeId
from kvrs.protocol.frames import checksum
from kvrs.protocol.pages import Tag, page_tags, root_tag
from kvrs.transfer.store.directory import StoreDirectory, store_directory
from kvrs.transfer.store.host import PageKind, Slab

PAGE_BYTES = 1 << 20
KIND = PageKind("model", PAGE_BYTES)
CAPACITY_BYTES = 8 * PAGE_BYTES
TAGS = page_tags(root_tag("model"), list(range(8)), 1)


def page(number: int) -> bytes:
    return bytes([number + 1]) * PAGE_BYTES


def write(slab: Slab, slot: int, number: int) -> None:
    slab.grow_to(slot + 1)
    slab.clear(slot)
    slab.view(slot)[:] = page(number)
    slab.write_record(slot, TAGS[number], checksum(page(number)))


def at(slot: int, offset: int = 0) -> int:
    """Where a slot is in the file: its record, the checksums of its cells, and at 128 its page."""
    return 4096 + slot * (128 + PAGE_BYTES) + offset


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    with StoreDirectory(tmp_path / "store") as directory:
        yield directory


@pytest.fixture
def left(directory: StoreDirectory) -> StoreDirectory:
    """A process wrote page 0 into slot 5 and page 1 into slot 0, and was killed."""
    slab = Slab.make(directory, KIND, CAPACITY_BYTES)
    write(slab, 5, 0)
    write(slab, 0, 1)
    return directory


def opened(directory: StoreDirectory, pages: int = 8) -> Slab:
    slab = Slab.open(directory, pages * PAGE_BYTES)
    assert slab is not None
    return slab


def adopted(directory: StoreDirectory, pages: int = 8) -> list[tuple[int, Tag]]:
    slab = opened(directory, pages)
    found = slab.adopt()
    for slot, tag in found:
        assert slab.view(slot) == page(TAGS.index(tag))
    return found


def flip(directory: StoreDirectory, offset: int) -> None:
    with (directory.path / "slab").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_whole_pages_are_adopted_oldest_first(left: StoreDirectory) -> None:
    """In the order of their writing, which is the order in which they would have been given up."""
    assert adopted(left) == [(5, TAGS[0]), (0, TAGS[1])]
    assert opened(left).kind == KIND


def test_what_is_written_after_an_adoption_is_younger(left: StoreDirectory) -> None:
    """Also for the process after the next."""
    slab = opened(left)
    slab.adopt()
    write(slab, 2, 2)

    assert [slot for slot, _ in adopted(left)] == [5, 0, 2]


@pytest.mark.parametrize(
    "offset",
    [
        at(0, 128 + 12345),  # In the page of slot 0.
        at(0),  # In the length of its record,
        at(0, 3),  # its tag,
        at(0, 20),  # number,
        at(0, 28),  # checksum of the page,
        at(0, 36),  # those of its cells,
        at(0, 44),  # and in its own checksum.
        at(0, 64 + 7),  # In the checksum of a cell.
    ],
)
def test_a_torn_page_is_not_adopted(left: StoreDirectory, offset: int) -> None:
    """Wherever the flipped bit is."""
    flip(left, offset)

    for _ in range(2):  # Nor by the process after that.
        assert [slot for slot, _ in adopted(left)] == [5]


def test_a_page_whose_record_was_not_written_is_not_adopted(left: StoreDirectory) -> None:
    """A kill while a page is received leaves such a page; the former page of that slot is gone with
    its record.
    """
    slab = opened(left)
    slab.clear(5)
    slab.view(5)[:100] = page(7)[:100]

    assert adopted(left) == [(0, TAGS[1])]


def test_a_page_in_the_place_of_another_is_not_adopted(left: StoreDirectory) -> None:
    """A record is of its slot."""
    with (left.path / "slab").open("r+b") as file:
        file.seek(at(0))
        whole = file.read(128 + PAGE_BYTES)
        file.seek(at(3))
        file.write(whole)

    assert [slot for slot, _ in adopted(left)] == [5, 0]


def test_another_capacity_than_before_keeps_what_fits(left: StoreDirectory) -> None:
    """A slot beyond the capacity must not be used, and its memory is given back. The file keeps its
    length for processes that have it mapped: a read behind its end would end them.
    """
    assert adopted(left, pages=16) == [(5, TAGS[0]), (0, TAGS[1])]
    before, length = left.used_bytes(), (left.path / "slab").stat().st_size

    assert adopted(left, pages=4) == [(0, TAGS[1])]
    assert left.used_bytes() <= before - 2 * PAGE_BYTES
    assert (left.path / "slab").stat().st_size == length
    assert adopted(left) == [(0, TAGS[1])]


def _truncate(path: Path) -> None:
    os.truncate(path, 20)


def _damage(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


def _open_to_others(path: Path) -> None:
    path.chmod(0o644)


def _replace_by_link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("spoil", [_truncate, _damage, _open_to_others, _replace_by_link])
def test_a_file_that_others_may_have_written_is_unlinked(
    left: StoreDirectory, spoil: Callable[[Path], None]
) -> None:
    """Only a file of this user that no other user may open is trusted."""
    spoil(left.path / "slab")

    assert Slab.open(left, CAPACITY_BYTES) is None
    assert not (left.path / "slab").is_symlink()
    assert not (left.path / "slab").exists()


def test_a_slab_of_another_format_is_unlinked(directory: StoreDirectory) -> None:
    """Its pages are of no use, and their memory is."""
    Slab.make(directory, replace(KIND, format=3), CAPACITY_BYTES)

    assert Slab.open(directory, CAPACITY_BYTES) is None
    assert directory.names() == []


def test_a_slab_that_is_not_finished_does_not_replace_another(
    left: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill or an error while pages of a new kind are taken."""

    def refuse(old: str, new: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(left, "rename", refuse)
        with pytest.raises(OSError, match="No space"):
            Slab.make(left, replace(KIND, fingerprint="other"), CAPACITY_BYTES)

    assert adopted(left) == [(5, TAGS[0]), (0, TAGS[1])]
    left.clear()
    assert left.names() == []


def test_memory_grows_as_it_is_used(directory: StoreDirectory) -> None:
    """A store costs what lies in it, and a step."""
    slab = Slab.make(directory, KIND, CAPACITY_BYTES)

    sizes = []
    for slot in range(5):
        slab.grow_to(slot + 1)
        sizes.append(directory.used_bytes() // PAGE_BYTES)

    assert sizes == [3, 3, 3, 6, 6]


def test_memory_that_is_not_there_is_asked_for_again(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write into memory that the system does not have kills the process; so it is asked for
    beforehand.
    """
    slab = Slab.make(directory, KIND, CAPACITY_BYTES)

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="No space left"):
            slab.grow_to(1)
    write(slab, 0, 0)

    assert adopted(directory) == [(0, TAGS[0])]


def test_memory_beyond_the_limit_of_a_control_group_is_not_touched(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would end the agent with all that it holds. What lies there already is not asked
    for twice.
    """
    slab = Slab.make(directory, KIND, CAPACITY_BYTES)
    write(slab, 0, 0)
    monkeypatch.setattr("kvrs.transfer.shared_memory.free_in_groups", lambda: PAGE_BYTES)
    monkeypatch.setattr("kvrs.transfer.store.directory.free_in_groups", lambda: PAGE_BYTES)

    with pytest.raises(OSError, match="Cannot allocate memory"):
        slab.grow_to(5)
    again = opened(directory)
    again.adopt()
    again.grow_to(1)

    assert directory.used_bytes() // PAGE_BYTES == 3
    assert directory.free_bytes() == PAGE_BYTES


# The directory.


def test_names_tell_clusters_and_nodes_apart() -> None:
    """And nothing of the secret."""
    one, other = b"secret of a cluster", b"secret of another one"
    names = {
        store_directory("/shm", secret, NodeId(node))
        for secret in (one, other)
        for node in ("n0", "n1", "../n0")
    }

    assert len(names) == 6
    assert {name.parent for name in names} == {Path("/shm")}
    assert all(len(name.name.split("-")[1]) == 16 for name in names)


def test_a_directory_is_closed_to_others(directory: StoreDirectory) -> None:
    """And so are its files, whatever the umask."""
    Slab.make(directory, KIND, CAPACITY_BYTES).grow_to(1)

    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in [directory.path, *directory.path.iterdir()]
    }

    assert modes == {"store": 0o700, "slab": 0o600}


def _others_may_read(path: Path) -> None:
    path.mkdir(0o755)


def _a_file(path: Path) -> None:
    path.write_text("")


def _a_link(path: Path) -> None:
    path.with_name("target").mkdir(0o700)
    path.symlink_to(path.with_name("target"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            _others_may_read,
            "others may use it (mode bits 055); allowed: a directory of this user, mode 0700",
        ),
        (_a_file, "Not a directory"),
        (_a_link, "Not a directory"),
    ],
)
def test_a_directory_that_is_not_ours_is_refused(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    """Any user may write into /dev/shm; files of others under our name are not touched."""
    make(tmp_path / "store")

    with pytest.raises(ConfigError) as caught:
        StoreDirectory(tmp_path / "store")

    assert caught.value.faults == [f"backup.directory: {tmp_path}/store: {reason}"]


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its mode."""
    (tmp_path / "store").mkdir(0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
        StoreDirectory(tmp_path / "store")


def test_a_missing_base_is_named(tmp_path: Path) -> None:
    """The directory is made, what it is made in is not."""
    with pytest.raises(ConfigError, match="missing/store: No such file or directory"):
        StoreDirectory(tmp_path / "missing" / "store")


def test_two_agents_do_not_share_a_directory(tmp_path: Path) -> None:
    """The second one is refused; after the first has ended, in any way, the next one can open
    it.
    """
    first = StoreDirectory(tmp_path / "store")

    with pytest.raises(ConfigError, match="in use; allowed: one agent per node and cluster"):
        StoreDirectory(tmp_path / "store")
    os.close(first.fd)
    StoreDirectory(tmp_path / "store").__exit__(None, None, None)


def test_the_end_removes_what_was_made_and_nothing_else(left: StoreDirectory) -> None:
    """A file of another origin is left alone."""
    (left.path / "note").write_text("mine")

    left.clear()

    assert [path.name for path in left.path.iterdir()] == ["note"]
