"""The ledger in front of an instance's pages: a record per page, and per running stream the extent
of its pages.

The order of writes makes a SIGKILL at any moment harmless:

1. A page's record is written after its last token was computed or has arrived, and cleared before
   the page is given to another sequence. A page with a record is not written.
2. A record is one store of up to 64 bytes under a seal (see `sealed`). A torn or moved record has
   a wrong seal.
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

from kvrs.ids import StreamId
from kvrs.protocol.frames import checksum
from kvrs.protocol.pages import TAG_BYTES, Tag
from kvrs.transfer.shared_memory.sealed import MORE_BYTES, SealedBlocks, sealed, unsealed

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
EPOCH_AT = 1024
FORMAT = 2  # Format number of a ledger; pages behind a ledger of another format are not adopted.
# Tag of the page, tag of the page before it in the sequence, number of the write, checksum of the
# page.
_RECORD = struct.Struct("<16s16sQQ")
# Tag of the stream's last full page, number of its full pages; the stream's id follows.
_ROW = struct.Struct("<16sI")
_RECORD_BYTES = 64
_ROW_BYTES = 192
_NOTE_BYTES = 4096
_LONGEST_ID_BYTES = _ROW_BYTES - _ROW.size - MORE_BYTES
assert _RECORD.size + MORE_BYTES <= _RECORD_BYTES
assert TAG_BYTES == 16


def header_of(kind: str, epoch: int) -> bytes:
    return sealed(kind.encode()).ljust(EPOCH_AT, b"\0") + epoch_block(epoch)


def epoch_block(epoch: int) -> bytes:
    return sealed(epoch.to_bytes(8, "little"))


def read_header(block: "bytes | memoryview") -> tuple[str, int] | None:
    """Read the kind of the memory, and the epoch of the last process that attached it; None: the
    header is incomplete.
    """
    kind, epoch = unsealed(block), unsealed(block[EPOCH_AT:HEADER_BYTES])
    if kind is None or epoch is None:
        return None
    return kind.decode(), int.from_bytes(epoch, "little")


@dataclass(frozen=True, slots=True)
class LedgerLayout:
    """Layout behind the header: a note of the process for its successor, rows of streams, records,
    then pages.
    """

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
        """Size of the ledger; the pages begin behind it."""
        end = self.records_at + self.pages * _RECORD_BYTES
        return -(-end // HEADER_BYTES) * HEADER_BYTES


@dataclass(frozen=True, slots=True)
class KeptPages:
    """Pages that an earlier process left: each page's number and tag, the oldest write first, and
    the tags of each stream's leading full pages.
    """

    pages: list[tuple[int, Tag]] = field(default_factory=list)
    streams: dict[StreamId, list[Tag]] = field(default_factory=dict)
    # Number of records that were incomplete, or whose checksum was not that of their page.
    damaged: int = 0


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
        assert memory.nbytes >= layout.size_bytes
        self._header = memory[:HEADER_BYTES]
        self._note = SealedBlocks(memory, HEADER_BYTES, _NOTE_BYTES)
        self._rows = SealedBlocks(memory, layout.rows_at, _ROW_BYTES)
        self._records = SealedBlocks(memory, layout.records_at, _RECORD_BYTES)
        self._layout = layout
        self._epoch = epoch_block(epoch)
        self._page = page
        self._writes = 0
        self._free_rows = list(range(layout.rows - 1, -1, -1))
        self._row_of: dict[StreamId, int] = {}
        # Adopted streams of the process before that this process does not run yet; their rows may
        # be reused.
        self._left: dict[StreamId, None] = {}

    @property
    def is_current(self) -> bool:
        """True while no later process has attached the instance's memory."""
        return self._header[EPOCH_AT : EPOCH_AT + len(self._epoch)] == self._epoch

    # The scheduler calls the methods below for pages, and then for streams.

    def record(self, page: int, tag: Tag, parent: Tag) -> None:
        """Record that the page holds the tokens of `tag`, behind the page of `parent`. The caller
        does so once the page is no longer written.
        """
        self._writes += 1
        facts = _RECORD.pack(tag, parent, self._writes, checksum(self._page(page)))
        self._records.write(page, facts)

    def clear(self, page: int) -> None:
        """Clear the page's record. The caller does so before the page is written again."""
        self._records.clear(page)

    def note_stream(self, stream: StreamId, pages: int, last: Tag) -> None:
        """Note that the stream's first full pages are recorded, up to the one with tag `last`."""
        name, row = stream.encode(), self._row_of.get(stream)
        if row is None:
            if len(name) > _LONGEST_ID_BYTES or (row := self._take_row()) is None:
                return
            self._row_of[stream] = row
        self._left.pop(stream, None)
        self._rows.write(row, _ROW.pack(last, pages) + name)

    def end_stream(self, stream: StreamId) -> None:
        row = self._row_of.pop(stream, None)
        if row is not None:
            self._left.pop(stream, None)
            self._rows.clear(row)
            self._free_rows.append(row)

    # A process calls the methods below at its start and at its end.

    def adopt(self) -> KeptPages:
        """Verify the pages of the process before, and return the correct ones; records of the
        others are cleared.
        """
        found: dict[Tag, tuple[int, int, Tag]] = {}
        damaged = 0
        for page in range(self._layout.pages):
            if self._records.is_clear(page):
                continue
            if (facts := self._records.read(page)) is not None:
                tag, parent, write, page_checksum = _RECORD.unpack(facts)
                if tag not in found and checksum(self._page(page)) == page_checksum:
                    found[Tag(tag)] = write, page, Tag(parent)
                    continue
            damaged += 1
            self.clear(page)
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
        """Clear all records and rows that the process before has left."""
        for row in range(self._layout.rows):
            self._rows.clear(row)
        for page in range(self._layout.pages):
            self.clear(page)

    def drop(self) -> None:
        """Clear the header: no process can adopt the pages, and this process ends before its next
        batch.
        """
        self._header[:] = bytes(HEADER_BYTES)

    def write_note(self, note: bytes) -> None:
        """Write facts for the next process, which then need not determine them again."""
        self._note.write(0, note)

    def read_note(self) -> bytes | None:
        """Return the note that the process before has written; None: there is no complete note."""
        return self._note.read(0)

    def _adopt_rows(self, parents: dict[Tag, Tag]) -> dict[StreamId, list[Tag]]:
        streams: dict[StreamId, list[Tag]] = {}
        self._free_rows.clear()
        for row in range(self._layout.rows - 1, -1, -1):
            if (facts := self._rows.read(row)) is not None:
                last, pages = _ROW.unpack_from(facts)
                stream = StreamId(facts[_ROW.size :].decode())
                chain = _chain(Tag(last), pages, parents)
                if chain is not None and stream not in streams:
                    streams[stream] = chain
                    self._row_of[stream] = row
                    self._left[stream] = None
                    continue
            self._rows.clear(row)
            self._free_rows.append(row)
        return streams

    def _take_row(self) -> int | None:
        if not self._free_rows and self._left:
            self.end_stream(next(iter(self._left)))
        return self._free_rows.pop() if self._free_rows else None


def _chain(last: Tag, pages: int, parents: dict[Tag, Tag]) -> list[Tag] | None:
    """Return the tags of a stream's first `pages` pages, of which `last` is the last; None: one of
    them was not kept.
    """
    chain: list[Tag] = []
    tag = last
    while len(chain) < pages:
        if tag not in parents:
            return None
        chain.append(tag)
        tag = parents[tag]
    # The first page's parent is the root of model and tenant, which is no page.
    return chain[::-1] if chain and tag not in parents else None
