"""The shared memory of a killed process, and the part of it that the next one takes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrs.errors import ConfigError
from kvrs.ids import NodeId
from kvrs.protocol.frames import checksum
from kvrs.protocol.tags import Tag, page_tags, root_tag
from kvrs.transfer.store.directory import StoreDirectory, StoreState, store_directory
from kvrs.transfer.store.segments import Segments, SlotLayout

PAGE_BYTES = 1 << 20
LAYOUT = SlotLayout(PAGE_BYTES, slots=8, fingerprint="model")  # Four slots in each of two segments.
TAGS = page_tags(root_tag("model"), list(range(8)), 1)


def page(number: int) -> bytes:
    return bytes([number + 1]) * PAGE_BYTES


def write(segments: Segments, slot: int, number: int) -> None:
    segments.grow_to(slot + 1)
    segments.clear(slot)
    segments.view(slot)[:] = page(number)
    segments.write_record(slot, TAGS[number], checksum(page(number)))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StoreDirectory]:
    with StoreDirectory(tmp_path / "store") as directory:
        yield directory


@pytest.fixture
def left(directory: StoreDirectory) -> StoreDirectory:
    """A process wrote page 0 into slot 5 and page 1 into slot 0, and was killed."""
    segments = Segments(directory, LAYOUT)
    write(segments, 5, 0)
    write(segments, 0, 1)
    return directory


def adopted(directory: StoreDirectory, layout: SlotLayout = LAYOUT) -> list[tuple[int, Tag]]:
    segments = Segments(directory, layout)
    found = segments.adopt()
    for slot, tag in found:
        assert segments.view(slot) == page(TAGS.index(tag))
    return found


def flip(directory: StoreDirectory, segment: int, offset: int) -> None:
    with (directory.path / f"segment-{segment}").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_whole_pages_are_adopted_oldest_first(left: StoreDirectory) -> None:
    """In the order of their writing, which is the order in which they would have been given up."""
    assert adopted(left) == [(5, TAGS[0]), (0, TAGS[1])]


def test_what_is_written_after_an_adoption_is_younger(left: StoreDirectory) -> None:
    """Also for the process after the next."""
    segments = Segments(left, LAYOUT)
    segments.adopt()
    write(segments, 2, 2)

    assert [slot for slot, _ in adopted(left)] == [5, 0, 2]


@pytest.mark.parametrize(
    ("segment", "offset", "kept"),
    [
        (0, LAYOUT.pages_at + 12345, [5]),  # In the page of slot 0.
        (0, 4096 + 3, [5]),  # In its record's tag,
        (0, 4096 + 20, [5]),  # number,
        (0, 4096 + 28, [5]),  # checksum of the page,
        (0, 4096 + 36, [5]),  # those of its cells,
        (0, 4096 + 44, [5]),  # and in its own checksum.
        (0, LAYOUT.cells_at + 7, [5]),  # In the checksum of a cell.
        (0, 10, [5]),  # In the header of its segment.
        (1, LAYOUT.pages_at + PAGE_BYTES, [0]),
    ],
)
def test_a_torn_page_is_not_adopted(
    left: StoreDirectory, segment: int, offset: int, kept: list[int]
) -> None:
    """Wherever the flipped bit is."""
    flip(left, segment, offset)

    assert [slot for slot, _ in adopted(left)] == kept
    assert [slot for slot, _ in adopted(left)] == kept  # Nor by the process after that.


def test_a_page_whose_record_was_not_written_is_not_adopted(left: StoreDirectory) -> None:
    """A kill while a page is received leaves such a page; the former page of that slot is gone with
    its record.
    """
    segments = Segments(left, LAYOUT)
    segments.adopt()
    segments.clear(5)
    segments.view(5)[:100] = page(7)[:100]

    assert adopted(left) == [(0, TAGS[1])]


@pytest.mark.parametrize(
    "layout",
    [
        SlotLayout(PAGE_BYTES, 8, "other model"),
        SlotLayout(PAGE_BYTES // 2, 16, "model"),
        SlotLayout(PAGE_BYTES, 512, "model"),
        SlotLayout(PAGE_BYTES, 8, "model", page_cells=4),
    ],
)
def test_segments_of_another_layout_are_unlinked(left: StoreDirectory, layout: SlotLayout) -> None:
    """Their pages are of no use, and their memory is."""
    assert adopted(left, layout) == []
    assert left.segments() == []


def test_less_capacity_than_before_keeps_what_fits(left: StoreDirectory) -> None:
    """A slot beyond the capacity must not be used."""
    assert adopted(left, SlotLayout(PAGE_BYTES, 5, "model")) == [(0, TAGS[1])]
    assert adopted(left, SlotLayout(PAGE_BYTES, 4, "model")) == [(0, TAGS[1])]
    assert left.segments() == [0]


def _truncate(path: Path) -> None:
    os.truncate(path, LAYOUT.segment_bytes - 1)


def _open_to_others(path: Path) -> None:
    path.chmod(0o644)


def _replace_by_link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("spoil", [_truncate, _open_to_others, _replace_by_link])
def test_a_file_that_others_may_have_written_is_unlinked(
    left: StoreDirectory, spoil: Callable[[Path], None]
) -> None:
    """Only files of this user that no other user may open are trusted."""
    spoil(left.path / "segment-0")

    assert adopted(left) == [(5, TAGS[0])]
    assert left.segments() == [1]


def test_memory_grows_as_it_is_used(directory: StoreDirectory) -> None:
    """A store costs what lies in it, and a step."""
    segments = Segments(directory, LAYOUT)

    sizes = []
    for slot in range(5):
        segments.grow_to(slot + 1)
        sizes.append(directory.used_bytes() // PAGE_BYTES)

    assert sizes == [4, 4, 4, 4, 8]


def test_memory_that_is_not_there_is_asked_for_again(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write into memory that the system does not have kills the process; so it is asked for
    beforehand.
    """
    segments = Segments(directory, LAYOUT)

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="No space left"):
            segments.grow_to(1)
    write(segments, 0, 0)

    assert adopted(directory) == [(0, TAGS[0])]


def test_memory_beyond_the_limit_of_a_control_group_is_not_touched(
    directory: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would end the agent with all that it holds. What lies there already is not asked
    for twice.
    """
    fills = Segments(directory, LAYOUT)
    fills.grow_to(1)
    monkeypatch.setattr("kvrs.transfer.shared_memory.regions.free_in_groups", lambda: PAGE_BYTES)
    monkeypatch.setattr("kvrs.transfer.store.directory.free_in_groups", lambda: PAGE_BYTES)

    with pytest.raises(OSError, match="Cannot allocate memory"):
        fills.grow_to(5)

    assert directory.used_bytes() // PAGE_BYTES == 4
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
    Segments(directory, LAYOUT).grow_to(1)
    directory.save_state(StoreState(1))

    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in [directory.path, *directory.path.iterdir()]
    }

    assert modes == {"store": 0o700, "segment-0": 0o600, "state": 0o600}


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


@pytest.mark.parametrize("state", [b"", b"{", b'{"epoch":"x"}', b"\xff"])
def test_a_state_that_cannot_be_read_counts_as_none(
    directory: StoreDirectory, state: bytes
) -> None:
    """Then the pages cannot be identified, and none is adopted."""
    (directory.path / "state").write_bytes(state)
    (directory.path / "state").chmod(0o600)

    assert directory.load_state() is None


def test_the_end_removes_what_was_made_and_nothing_else(left: StoreDirectory) -> None:
    """A file of another origin is left alone."""
    (left.path / "note").write_text("mine")
    left.save_state(StoreState(1))

    left.clear()

    assert [path.name for path in left.path.iterdir()] == ["note"]
