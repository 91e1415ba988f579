"""The ledger of a process that is killed at any moment, and the part of it that is adopted."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.ids import StreamId
from kvrs.protocol.pages import page_tags, root_tag
from kvrs.transfer.anchors import LedgerLayout, PageLedger, header_of

PAGE_BYTES = 64
LAYOUT = LedgerLayout(pages=8, rows=3)
ROOT = root_tag("model")
TAGS = page_tags(ROOT, list(range(8)), 1)
S, T, U, V = (StreamId(name) for name in "STUV")


class Memory:
    """Pages and a ledger, as shared memory has them: a process can be killed at any byte."""

    def __init__(self, layout: LedgerLayout = LAYOUT) -> None:
        self.layout = layout
        self.ledger = bytearray(layout.size_bytes)
        header = header_of("0" * 32, epoch=5)
        self.ledger[: len(header)] = header
        self.pages = bytearray(layout.pages * PAGE_BYTES)

    def attach(self, epoch: int = 5) -> PageLedger:
        return PageLedger(memoryview(self.ledger), self.layout, epoch, self.page)

    def page(self, number: int) -> memoryview:
        return memoryview(self.pages)[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]

    def write(self, ledger: PageLedger, page: int, index: int) -> None:
        """The page gets the content of the index-th page of the history."""
        ledger.clear(page)
        self.page(page)[:] = bytes([index + 1]) * PAGE_BYTES
        ledger.record(page, TAGS[index], TAGS[index - 1] if index else ROOT)


def test_whole_pages_are_adopted_oldest_first_and_streams_with_their_pages() -> None:
    memory = Memory()
    ledger = memory.attach()
    for page, index in ((3, 0), (1, 1), (6, 2)):
        memory.write(ledger, page, index)
    ledger.note_stream(S, 3, TAGS[2])
    ledger.note_stream(T, 1, TAGS[0])

    kept = memory.attach(6).adopt()

    assert kept.pages == [(3, TAGS[0]), (1, TAGS[1]), (6, TAGS[2])]
    assert kept.streams == {S: TAGS[:3], T: TAGS[:1]}
    assert kept.damaged == 0


def test_a_page_that_was_given_away_is_not_adopted() -> None:
    """Nor a stream that had it: the rest of its history is not found from the root on."""
    memory = Memory()
    ledger = memory.attach()
    memory.write(ledger, 0, 0)
    memory.write(ledger, 1, 1)
    ledger.note_stream(S, 2, TAGS[1])

    ledger.clear(0)
    kept = memory.attach(6).adopt()

    assert (kept.pages, kept.streams) == ([(1, TAGS[1])], {})


LIES: dict[str, Callable[[Memory], None]] = {
    "the page changed": lambda memory: _flip(memory.pages, 2 * PAGE_BYTES + 7),
    "the tag changed": lambda memory: _flip(memory.ledger, LAYOUT.records_at + 2 * 64 + 2),
    "the parent changed": lambda memory: _flip(memory.ledger, LAYOUT.records_at + 2 * 64 + 20),
    "the record was copied": lambda memory: _copy(memory.ledger, 2, 5),
    "a record of nothing": lambda memory: _flip(memory.ledger, LAYOUT.records_at + 4 * 64 + 3),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_record_that_lies_is_not_adopted(lie: str) -> None:
    """Another page, tag, parent or place than was sealed; what is true stays."""
    memory = Memory()
    ledger = memory.attach()
    memory.write(ledger, 0, 0)
    memory.write(ledger, 2, 1)

    LIES[lie](memory)
    kept = memory.attach(6).adopt()

    assert kept.damaged == 1
    assert (0, TAGS[0]) in kept.pages
    assert set(kept.pages) <= {(0, TAGS[0]), (2, TAGS[1])}
    # It was cleared, so that nothing takes it up later.
    assert memory.attach(7).adopt().damaged == 0


def _flip(memory: bytearray, at: int) -> None:
    memory[at] ^= 0x40


def _copy(memory: bytearray, source: int, target: int) -> None:
    start, end = (LAYOUT.records_at + number * 64 for number in (source, target))
    memory[end : end + 64] = memory[start : start + 64]


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20),
    st.integers(0, 20),
    st.integers(0, 64),
)
def test_a_kill_at_any_byte_leaves_only_true_records(
    writes: list[tuple[int, int]], killed_in: int, killed_at: int
) -> None:
    """The process dies while it writes a record, of which the first bytes are there."""
    memory = Memory()
    ledger = memory.attach()
    holding: dict[int, int] = {}
    for number, (page, index) in enumerate(writes):
        before = bytes(memory.ledger)
        memory.write(ledger, page, index)
        holding[page] = index
        if number == killed_in:
            start = LAYOUT.records_at + page * 64
            cleared = before[:start] + bytes(64) + before[start + 64 :]
            torn = memory.ledger[start : start + killed_at]
            memory.ledger[:] = cleared
            memory.ledger[start : start + killed_at] = torn
            break

    kept = memory.attach(6).adopt()

    assert len({tag for _, tag in kept.pages}) == len(kept.pages)
    for page, tag in kept.pages:
        assert tag == TAGS[holding[page]]
        assert bytes(memory.page(page)) == bytes([holding[page] + 1]) * PAGE_BYTES


def test_a_row_that_was_torn_leaves_its_stream_out() -> None:
    memory = Memory()
    ledger = memory.attach()
    memory.write(ledger, 0, 0)
    ledger.note_stream(S, 1, TAGS[0])
    ledger.note_stream(T, 1, TAGS[0])
    _flip(memory.ledger, LAYOUT.rows_at + 18)

    assert memory.attach(6).adopt().streams == {T: TAGS[:1]}


def test_a_stream_that_ended_leaves_no_row() -> None:
    memory = Memory()
    ledger = memory.attach()
    memory.write(ledger, 0, 0)
    ledger.note_stream(S, 1, TAGS[0])
    ledger.end_stream(S)
    ledger.end_stream(T)

    assert memory.attach(6).adopt().streams == {}


def test_rows_of_the_process_before_make_room_for_streams_that_run() -> None:
    """They are kept as long as there is room: it may be killed again before their streams come
    back.
    """
    memory = Memory()
    ledger = memory.attach()
    memory.write(ledger, 0, 0)
    for stream in (S, T, U):
        ledger.note_stream(stream, 1, TAGS[0])
    ledger = memory.attach(6)
    ledger.adopt()

    assert set(memory.attach(7).adopt().streams) == {S, T, U}
    ledger.note_stream(V, 1, TAGS[0])

    kept = memory.attach(7).adopt().streams
    assert V in kept
    assert len(kept) == 3


def test_an_id_that_is_too_long_for_a_row_is_left_out() -> None:
    memory = Memory()
    ledger = memory.attach()
    memory.write(ledger, 0, 0)
    ledger.note_stream(StreamId("x" * 1000), 1, TAGS[0])

    assert memory.attach(6).adopt().streams == {}


def test_a_note_is_read_whole_or_not_at_all() -> None:
    memory = Memory()
    ledger = memory.attach()
    assert ledger.read_note() is None

    ledger.write_note(b"measured")
    assert memory.attach(6).read_note() == b"measured"
    _flip(memory.ledger, 4096 + 10)
    assert memory.attach(6).read_note() is None


def test_a_process_sees_that_a_later_one_has_attached() -> None:
    memory = Memory()

    assert memory.attach(5).is_current
    assert not memory.attach(4).is_current
