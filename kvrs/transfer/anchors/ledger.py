"""The ledger of an instance's memory: a record for each page, and for each stream that runs how far
its pages go.

The order of writes makes a SIGKILL at any moment harmless:

1. A page's record is written after its last token was computed or has arrived, and cleared before
   the page is given to another sequence. A page with a record is not written.
2. A record is one store of up to 64 bytes under a seal, which covers the number of its page. One
   that was torn, or moved, has a wrong seal.
3. A record has the checksum of its page. A page is adopted only if the checksum is that of what
   lies there.
4. A stream's row names its last full page; the pages before it are found by the tags of their
   parents, so that a row is written once per page.

Only the process that serves the instance writes here. It reads the epoch in the header before each
batch: another one there means that a later process has the instance.
"""

import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from kvrs.ids import StreamId
from kvrs.protocol.frames import checksum
from kvrs.protocol.tags import TAG_BYTES, Tag
from kvrs.transfer.anchors.regions import HEADER_BYTES, read_epoch

log = logging.getLogger(__name__)

_RECORD = struct.Struct("<16s16sQQ")  # tag, tag of the page before, number of the write, checksum
_ROW = struct.Struct("<16sIH")  # tag of the last full page, pages, bytes of the stream's id
_SEAL = struct.Struct("<Q")
_RECORD_BYTES = 64
_ROW_BYTES = 192
_NOTE_BYTES = 4096
_LONGEST_ID_BYTES = _ROW_BYTES - _ROW.size - _SEAL.size
_NO_RECORD = bytes(_RECORD_BYTES)
_NO_ROW = bytes(_ROW_BYTES)
assert _RECORD.size + _SEAL.size <= _RECORD_BYTES
assert TAG_BYTES == 16


@dataclass(frozen=True, slots=True)
class LedgerLayout:
    """Behind the header: a note of the process to its successor, rows of streams, records."""

    pages: int
    rows: int

    @property
    def rows_at(self) -> int:
        return HEADER_BYTES + _NOTE_BYTES

    @property
    def records_at(self) -> int:
        return self.rows_at + self.rows * _ROW_BYTES

    @property
    def size_bytes(self) -> int:
        return self.records_at + self.pages * _RECORD_BYTES


@dataclass(frozen=True, slots=True)
class KeptPages:
    """Pages that a process left, with their tags, the longest kept first, and of each stream the
    tags of its leading full pages.
    """

    pages: list[tuple[int, Tag]] = field(default_factory=list)
    streams: dict[StreamId, list[Tag]] = field(default_factory=dict)
    damaged: int = 0  # Records that were torn, or whose page is another one.


class PageLedger:
    """The records of one instance's pages."""

    def __init__(
        self,
        memory: memoryview,
        layout: LedgerLayout,
        epoch: int,
        page: Callable[[int], memoryview],
    ) -> None:
        """`memory` begins with the header; `page` returns a page's bytes."""
        assert memory.nbytes == layout.size_bytes
        self._memory = memory
        self._layout = layout
        self._epoch = epoch
        self._page = page
        self._writes = 0
        self._free_rows = list(range(layout.rows - 1, -1, -1))
        self._rows: dict[StreamId, int] = {}
        self._left: dict[StreamId, None] = {}  # Of `_rows`, those of the process before.

    @property
    def is_current(self) -> bool:
        """No later process has attached the instance's memory."""
        return read_epoch(self._memory[:HEADER_BYTES]) == self._epoch

    # Pages.

    def record(self, page: int, tag: Tag, parent: Tag) -> None:
        """The page holds what the tag names: to be called when it is not written any more."""
        self._writes += 1
        facts = _RECORD.pack(tag, parent, self._writes, checksum(self._page(page)))
        self._record(page)[: len(facts) + _SEAL.size] = facts + _seal(facts, page)

    def clear(self, page: int) -> None:
        """The page holds nothing: to be called before it is written again."""
        self._record(page)[:] = _NO_RECORD

    # Streams.

    def note_stream(self, stream: StreamId, pages: int, last: Tag) -> None:
        """The stream's first full pages are recorded, up to the one tagged `last`."""
        row = self._rows.get(stream)
        if row is None:
            name = stream.encode()
            if len(name) > _LONGEST_ID_BYTES or (row := self._take_row()) is None:
                return
            self._rows[stream] = row
        self._left.pop(stream, None)
        self._write_row(row, stream, pages, last)

    def end_stream(self, stream: StreamId) -> None:
        row = self._rows.pop(stream, None)
        if row is not None:
            self._left.pop(stream, None)
            self._row(row)[:] = _NO_ROW
            self._free_rows.append(row)

    # The process before.

    def adopt(self) -> KeptPages:
        """Verify what the process before has left; what is not whole is cleared."""
        found: dict[Tag, tuple[int, int, Tag]] = {}
        damaged = 0
        for page in range(self._layout.pages):
            record = bytes(self._record(page))
            if record == _NO_RECORD:
                continue
            facts = record[: _RECORD.size]
            sealed = record[_RECORD.size : _RECORD.size + _SEAL.size] == _seal(facts, page)
            tag, parent, write, page_checksum = _RECORD.unpack(facts)
            if not sealed or tag in found or checksum(self._page(page)) != page_checksum:
                damaged += 1
                self.clear(page)
                continue
            found[Tag(tag)] = write, page, Tag(parent)
        self._writes = max((write for write, _, _ in found.values()), default=0)
        kept = KeptPages(
            [(page, tag) for tag, (_, page, _) in sorted(found.items(), key=lambda each: each[1])],
            self._adopt_rows({tag: parent for tag, (_, _, parent) in found.items()}),
            damaged,
        )
        if damaged:
            log.warning("records of pages were damaged", extra={"records": damaged})
        return kept

    def forget(self) -> None:
        """Clear everything that the process before has left."""
        for row in range(self._layout.rows):
            self._row(row)[:] = _NO_ROW
        for page in range(self._layout.pages):
            self.clear(page)

    def drop(self) -> None:
        """The pages are lost: no process can adopt them, and this one ends before its next
        batch.
        """
        self._memory[:HEADER_BYTES] = bytes(HEADER_BYTES)

    def write_note(self, note: bytes) -> None:
        """Facts that the process after this one need not find out again."""
        assert len(note) <= _NOTE_BYTES - 2 * _SEAL.size
        sealed = _SEAL.pack(len(note)) + note
        self._memory[HEADER_BYTES : HEADER_BYTES + len(sealed) + _SEAL.size] = sealed + _SEAL.pack(
            xxh3_64_intdigest(sealed)
        )

    def read_note(self) -> bytes | None:
        """None: there is none that is whole."""
        block = bytes(self._memory[HEADER_BYTES : HEADER_BYTES + _NOTE_BYTES])
        (length,) = _SEAL.unpack_from(block)
        sealed = block[: _SEAL.size + min(length, _NOTE_BYTES)]
        is_whole = block[len(sealed) : len(sealed) + _SEAL.size] == _SEAL.pack(
            xxh3_64_intdigest(sealed)
        )
        return sealed[_SEAL.size :] if is_whole else None

    def _adopt_rows(self, parents: dict[Tag, Tag]) -> dict[StreamId, list[Tag]]:
        streams: dict[StreamId, list[Tag]] = {}
        self._free_rows.clear()
        for row in range(self._layout.rows - 1, -1, -1):
            read = self._read_row(row)
            chain = None if read is None else _chain(read[2], read[1], parents)
            if read is None or chain is None or read[0] in streams:
                self._row(row)[:] = _NO_ROW
                self._free_rows.append(row)
                continue
            streams[read[0]] = chain
            self._rows[read[0]] = row
            self._left[read[0]] = None
        return streams

    def _take_row(self) -> int | None:
        if not self._free_rows and self._left:
            self.end_stream(next(iter(self._left)))
        return self._free_rows.pop() if self._free_rows else None

    def _write_row(self, row: int, stream: StreamId, pages: int, last: Tag) -> None:
        name = stream.encode()
        facts = _ROW.pack(last, pages, len(name)) + name
        self._row(row)[: len(facts) + _SEAL.size] = facts + _seal(facts, row)

    def _read_row(self, row: int) -> tuple[StreamId, int, Tag] | None:
        block = bytes(self._row(row))
        last, pages, length = _ROW.unpack_from(block)
        end = _ROW.size + length
        if length > _LONGEST_ID_BYTES or block[end : end + _SEAL.size] != _seal(block[:end], row):
            return None
        try:
            return StreamId(block[_ROW.size : end].decode()), pages, Tag(last)
        except UnicodeDecodeError:
            return None

    def _record(self, page: int) -> memoryview:
        start = self._layout.records_at + page * _RECORD_BYTES
        return self._memory[start : start + _RECORD_BYTES]

    def _row(self, row: int) -> memoryview:
        start = self._layout.rows_at + row * _ROW_BYTES
        return self._memory[start : start + _ROW_BYTES]


def _seal(facts: bytes, number: int) -> bytes:
    return _SEAL.pack(xxh3_64_intdigest(facts, seed=number + 1))


def _chain(last: Tag, pages: int, parents: dict[Tag, Tag]) -> list[Tag] | None:
    """The tags of a stream's first pages; None: one is not there."""
    chain: list[Tag] = []
    tag = last
    while len(chain) < pages:
        if tag not in parents:
            return None
        chain.append(tag)
        tag = parents[tag]
    # The one before the first page is the root of model and tenant, which is no page.
    return chain[::-1] if chain and tag not in parents else None
