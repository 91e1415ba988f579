"""Records of several tenants in one book, and what the book says it holds."""

import gc
import tracemalloc

import msgspec
import pytest

from kvrs.ids import StreamId
from kvrs.protocol.mirror import AckStatus, StreamEvent, StreamHeader, StreamState, pack_ids
from kvrs.proxy.mirror.book import RecordBook
from kvrs.proxy.mirror.records import Record, RecordRole

HEADER = StreamHeader(b"d" * 32, 7, (None, None, None), 0.0, 0.0)


def record(key: str, tenant: str, *, complete: bool = False, at_s: float = 0.0) -> Record:
    header = msgspec.structs.replace(HEADER, tenant=tenant)
    made = Record(key, StreamId(key), header, 0.0, "a-1", 0, touched_s=at_s)
    made.state = StreamState(complete=complete)
    return made


def keep(book: RecordBook, key: str, tenant: str, now_s: float, *, complete: bool = False) -> bool:
    """A stream that ran here, and whose client has all of it or has left."""
    made = record(key, tenant, complete=complete)
    if not book.own(made, now_s):
        return False
    book.end(made, now_s)
    return True


def test_throw_away_keys_evict_no_interrupted_stream_of_another_tenant() -> None:
    """A tenant evicts its own oldest ones; where it has none, its new record is refused."""
    book = RecordBook(max_records=20)
    assert keep(book, "mine", "a", 0.0)

    taken = [keep(book, f"b{n}", "b", 10.0 + 6.0 * n) for n in range(100)]
    others = [keep(book, f"{n}", f"t{n}", 700.0) for n in range(100)]

    assert all(taken)
    assert not any(others)
    assert list(book.records) == ["mine", *(f"b{n}" for n in range(81, 100))]


def test_open_streams_of_one_tenant_take_all_of_the_book_and_end_no_stream() -> None:
    """New records are refused until one of its streams has all of its tokens."""
    book = RecordBook(max_records=20)
    assert keep(book, "mine", "a", 0.0)
    running = [record(f"b{n}", "b") for n in range(20)]

    opened = [book.own(each, 10.0) for each in running]
    assert opened == [True] * 19 + [False]
    assert not book.own(record("a", "a", at_s=1.0), 1.0)
    running[0].state = StreamState(complete=True)
    book.end(running[0], 10.0)

    assert book.own(record("a", "a"), 11.0)
    assert {"mine", "a"} < set(book.records)


def test_finished_records_go_before_interrupted_ones_and_the_oldest_first() -> None:
    book = RecordBook(max_records=6)
    assert keep(book, "b0", "b", 0.0, complete=True)
    assert keep(book, "a-interrupted", "a", 1.0)
    for n in range(4):
        assert keep(book, f"a{n}", "a", 2.0 + n, complete=True)

    for n in range(4):
        assert keep(book, f"c{n}", "c", 20.0 + n)

    assert list(book.records) == ["a-interrupted", "a3", "c0", "c1", "c2", "c3"]
    assert keep(book, "c4", "c", 30.0)
    assert list(book.records) == ["a-interrupted", "c0", "c1", "c2", "c3", "c4"]
    assert keep(book, "c5", "c", 40.0)
    assert list(book.records) == ["a-interrupted", "c1", "c2", "c3", "c4", "c5"]


def test_a_mirror_keeps_the_streams_of_tenants_apart_too() -> None:
    """The mark of the tenant comes with the record."""
    book = RecordBook(max_records=4)
    statuses = []
    for n in range(5):
        sent = record(f"a{n}", "a")
        sent.role = RecordRole.MIRRORED
        statuses.append(book.receive(sent.update(0.0), "p", 6.0).ack.status)
    other = record("b", "b")
    refused = book.receive(other.update(0.0), "p", 20.0).ack.status

    newer = record("a5", "a")
    newer.role = RecordRole.MIRRORED
    stored = book.receive(newer.update(0.0), "p", 20.0).ack.status

    assert statuses == [AckStatus.STORED] * 4 + [AckStatus.FULL]
    assert (refused, stored) == (AckStatus.FULL, AckStatus.STORED)
    assert list(book.records) == ["a1", "a2", "a3", "a5"]


def test_room_for_a_prompt_is_taken_before_it_is_known() -> None:
    """So that requests that come together do not all find room for prompts that have none."""
    book = RecordBook(max_bytes=1 << 20)
    opened = []
    for n in range(8):
        made = record(f"{n}", "a")
        made.reserve_prompt(100_000)
        opened.append(book.own(made, 0.0))

    assert opened == [True, True, *[False] * 6]
    first = book.records["0"]
    book.set_prompt(first, pack_ids(range(50_000)))
    assert book.size_bytes == sum(each.size_bytes for each in book.records.values())
    assert first.size_bytes < 210_000


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_book_says_what_it_holds(is_packed: bool) -> None:
    """Compared with what is allocated, for large prompts and for many small events."""
    for prompt_tokens, events, records in ((200_000, 10, 10), (100, 500, 50), (1, 1, 500)):
        gc.collect()
        tracemalloc.start()
        book = RecordBook()
        for n in range(records):
            _fill(book, n, prompt_tokens, events)
        if is_packed:
            for _ in book.pack(6.0):
                """Nobody else wants a turn."""
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()

        assert 0.8 < held / book.size_bytes < 1.2, (prompt_tokens, events, held / book.size_bytes)


def _fill(book: RecordBook, number: int, prompt_tokens: int, events: int) -> None:
    header = msgspec.structs.replace(HEADER, digest=number.to_bytes(32, "big"), tenant=f"{number}")
    made = Record(f"{number:064}", StreamId(f"{number:032}"), header, 0.0, "proxy-0-abcdef", 0)
    assert book.own(made, 0.0)
    made.head = b"{" + b"h" * 100
    book.set_prompt(made, pack_ids(range(prompt_tokens)))
    for n in range(events):
        data = b"%d" % n + b"x" * 200
        book.add(made, StreamEvent(1000 + n, pack_ids([70_000 + n]), data))
    made.state = StreamState(finish_reason="stop", complete=True)
    book.end(made, 0.0)
