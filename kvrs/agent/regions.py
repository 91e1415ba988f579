"""Host memory of a node's engines: rows are read from the regions of living and dead engines.

An engine passes descriptors of its memory, which only it writes, and of the ledger with the
contents of each row (`transfer/rows/ledger.py`). Both are open for reading only, so an agent cannot
damage an engine. The memory is read by `pread`: a truncated file gives a short row, where a mapping
would kill the agent. Each row that is read is compared with its checksum, if it has one
(`RowChecksums`).

An engine is dead when its lock on the ledger is gone. The kernel takes that lock away with the
engine's process, also where a child of it still has its sockets and descriptors open.

Checksums of rows, by which an agent finds bytes that have changed behind the ledger: by faulty
memory, or by a copy that went to a wrong place.

A thread (`regions.py`) makes the checksum of a row soon after the row is complete, within a share
of one core. It belongs to the sequence that the ledger had before and after the bytes were read, so
a row that is written again has none until the next one is made. From then on each read of the row
is compared with it. A row that differs is refused: it is neither listed nor served until it is
written again.

The agent makes checksums, not the engine: no thread of the engine reads rows, and the engine's
memory of them would be as damaged as the rows. What changes before its checksum is not found.
"""

import fcntl
import logging
import os
import stat
import struct
import threading
import time
import weakref
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

from xxhash import xxh3_128

from kvrs.errors import TransferError
from kvrs.protocol.rows import (
    CHECKSUM_BYTES,
    MAX_REGIONS,
    RegionInfo,
    RegionReport,
    RowFrame,
    Space,
    checksum,
)
from kvrs.transfer.rows.ledger import ORDERED, LedgerView
from kvrs.transfer.rows.tags import RowTagger

log = logging.getLogger(__name__)


class RowChecksums:
    """The checksum of each row of a region, and the sequence that it belongs to. Any thread may
    call its methods.
    """

    def __init__(self, rows: int) -> None:
        self._sequences = array("Q", bytes(8 * rows))
        self._checksums = bytearray(CHECKSUM_BYTES * rows)
        # Sequence of each refused row.
        self._refused: dict[int, int] = {}
        self._lock = threading.Lock()

    def has(self, row: int, sequence: int) -> bool:
        return self._sequences[row] >= sequence

    def is_refused(self, row: int, sequence: int) -> bool:
        return self._refused.get(row) == sequence

    def agrees(self, row: int, sequence: int, checksum: bytes) -> bool:
        """Compare a row with its checksum, or take this one if the row has none at this sequence.
        Return False, and refuse the row from here on, if they differ.
        """
        at = row * CHECKSUM_BYTES
        with self._lock:
            known = self._sequences[row]
            if known < sequence:
                self._sequences[row] = sequence
                self._checksums[at : at + CHECKSUM_BYTES] = checksum
            elif known == sequence and self._checksums[at : at + CHECKSUM_BYTES] != checksum:
                self._refused[row] = sequence
                return False
        return True


def checksum_of(memory: int, at: int, size: int, piece: memoryview) -> bytes | None:
    """Return the checksum of bytes of a file, read in pieces; None: the file is shorter."""
    summed, end = xxh3_128(), at + size
    while at < end:
        part = piece[: end - at]
        if os.preadv(memory, [part], at) != len(part):
            return None
        summed.update(part)
        at += len(part)
    return summed.digest()


# Seconds for which the index of a living engine's rows is used before it is updated.
_FRESH_S = 0.02
# Time without reads after which a dead engine's memory is released.
ADOPTED_S = 30.0
# Pause between two looks for rows without a checksum, and so about the least age of one.
_LOOK_S = 0.1
_RETRY_S = 10.0  # Pause behind a bug.
# CPU time of the thread that makes checksums between two pauses.
_SLICE_S = 0.002
# Bytes that it reads at a time: they stay in the processor's cache until they are summed.
_PIECE_BYTES = 1 << 18
# Bytes of rows that one look takes up, so that rows of running streams never wait for long.
_LOOK_BYTES = 64 << 20
_FLOCK = struct.Struct("hhqqi4x")


class EngineRegion:
    """One engine's rows. Its methods may be called by any thread; its descriptors are closed with
    the object.
    """

    def __init__(self, info: RegionInfo, memory: int, ledger: int, tagger: RowTagger) -> None:
        """Take over the descriptors, even at an error.

        Raises:
            TransferError: the files are not a region and a ledger as `info` describes them.
        """
        self.info = info
        self._memory, self._ledger_file = memory, ledger
        for descriptor in (memory, ledger):
            weakref.finalize(self, os.close, descriptor).atexit = False
        self._ledger = LedgerView(ledger)
        _check(info, memory, self._ledger)
        self._rows: dict[bytes, tuple[int, int]] = {}
        self._sequences: list[int] = [0] * info.rows
        self._keys: list[bytes] = [b""] * info.rows
        self.checksums = RowChecksums(info.rows)
        # Sequence of each complete row that `without_checksum` has not returned yet.
        self._due: dict[int, int] = {}
        # Number of complete rows without a checksum when the engine died, and of refused rows.
        self.unchecked = self.refused = 0
        # Rows of a dead engine that were compared with their checksums after its death.
        self._compared: set[int] = set()
        # Sequence and tag of each row that was read with its tag: the tag holds as long as the
        # sequence.
        self._tagger, self._known_tags = tagger, dict[int, tuple[int, bytes]]()
        self._fresh_until_s = 0.0
        self._lock = threading.Lock()
        self.died_s: float | None = None
        self.used_s: float | None = None

    @property
    def epoch(self) -> bytes:
        return self._ledger.epoch

    @property
    def is_closed(self) -> bool:
        """True once the engine has withdrawn its rows, which are then no longer served."""
        return self._ledger.is_closed

    @property
    def report(self) -> RegionReport:
        return RegionReport.of(
            self.info, is_alive=self.died_s is None, unchecked_rows=self.unchecked
        )

    def is_alive(self) -> bool:
        """Return whether the engine's process exists."""
        if self.died_s is not None:
            return False
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
        found = fcntl.fcntl(self._ledger_file, fcntl.F_GETLK, asked)
        kind: int = _FLOCK.unpack(found)[0]
        return kind != fcntl.F_UNLCK

    def is_over(self, now_s: float) -> bool:
        """Return whether the memory can be released: the engine is dead, and has left no rows or no
        row was read for `ADOPTED_S`.
        """
        if self.died_s is None:
            return False
        return not self._rows or now_s - max(self.died_s, self.used_s or 0.0) > ADOPTED_S

    def adopt(self, now_s: float) -> int:
        """Note the engine's death, after which no row changes; return the number of complete rows
        by its ledger.
        """
        with self._lock:
            self._refresh()
            self.died_s = now_s
            self.unchecked = sum(not self.checksums.has(*each) for each in self._rows.values())
            return len(self._rows)

    def held(self, keys: Sequence[bytes], now_s: float) -> list[bool]:
        """Return for each key whether the region has its row."""
        with self._lock:
            self._look(now_s)
            return [key in self._rows for key in keys]

    def protected(self, now_s: float) -> list[bytes]:
        """Return keys of the rows that running streams need."""
        with self._lock:
            self._look(now_s)
            keys = [self._keys[row] for row in self._ledger.protected()]
            return [key for key in keys if key in self._rows]

    def read(
        self, key: bytes, buffer: memoryview, now_s: float, *, tagged: bool = True
    ) -> tuple[RowFrame, bytes, memoryview] | None:
        """Read a row into the buffer; return ROW, its tag and its bytes, or if not `tagged` CHECKED
        and its checksum. None: the region does not have the row, the engine has overwritten it
        meanwhile, or it differs from its checksum and is refused.
        """
        with self._lock:
            self._look(now_s)
            row, sequence = self._rows.get(key, (0, 0))
        if not sequence:
            return None
        self.used_s = now_s
        size = os.preadv(self._memory, [buffer], row * self.info.row_bytes)
        # A dead engine's row is checked too: the engine may have died while it wrote the row.
        if size != self.info.row_bytes or not self._ledger.still(row, sequence):
            return None
        found = checksum(buffer)
        if not self.checksums.agrees(row, sequence, found):
            self._refuse(key, row, sequence)
            return None
        if not tagged:
            return RowFrame.CHECKED, found, buffer
        if self.died_s is not None:
            self._compared.add(row)
        known = self._known_tags.get(row, (0, b""))
        if known[0] != sequence:
            known = self._known_tags[row] = (
                sequence,
                self._tagger.make(self.info.space, key, buffer),
            )
        return RowFrame.ROW, known[1], buffer

    def take_over(self, former: "EngineRegion") -> None:
        """Keep the checksums of this region's rows from before its engine connected again."""
        if former.info.rows == self.info.rows:
            self.checksums, self.refused = former.checksums, former.refused

    def _refuse(self, key: bytes, row: int, sequence: int) -> None:
        with self._lock:
            if self._rows.get(key) != (row, sequence):
                return
            del self._rows[key]
            self.refused += 1
        # The first lines say all that is to be known; thousands would hide others.
        if not self.refused & (self.refused - 1):
            log.error(
                "a row has changed since its checksum was made, and is refused: faulty memory?",
                extra={"engine": self.info.engine, "row": row, "refused_rows": self.refused},
            )

    def without_checksum(self, most: int, now_s: float) -> list[tuple[int, int]]:
        """Return numbers and sequences of complete rows whose checksums are to be made, at most
        `most`, those that running streams need first. No row is returned twice.
        """
        with self._lock:
            self._look(now_s)
            if not self._due:
                return []
            first = [row for row in self._ledger.protected() if row in self._due]
            rows = first[:most] or [*islice(self._due, most)]
            return [(row, self._due.pop(row)) for row in rows]

    def sum_row(self, row: int, sequence: int, piece: memoryview) -> bytes | None:
        """Return the checksum of a row; None: the row has one, or has been written since."""
        size = self.info.row_bytes
        if self.checksums.has(row, sequence) or not self._ledger.still(row, sequence):
            return None
        found = checksum_of(self._memory, row * size, size, piece)
        return found if self._ledger.still(row, sequence) else None

    def place(self, key: bytes, now_s: float) -> tuple[bytes, int, int] | None:
        """Return tag, descriptor and offset of a row that can be sent from the file, because it
        cannot change any more: a dead engine's row that has a tag from an earlier read, and was
        compared with its checksum since the death. None: any other row. The reader compares what is
        sent with the tag.
        """
        row, sequence = self._rows.get(key, (0, 0))
        made_at, tag = self._known_tags.get(row, (0, b""))
        if row not in self._compared or not sequence or made_at != sequence:
            return None
        whole = os.fstat(self._memory).st_size == self.info.rows * self.info.row_bytes
        if not whole or not self._ledger.still(row, sequence):
            return None
        self.used_s = now_s
        return tag, self._memory, row * self.info.row_bytes

    def _look(self, now_s: float) -> None:
        if self.died_s is None:
            if not ORDERED:
                self._rows.clear()
            elif now_s >= self._fresh_until_s:
                self._refresh()
                self._fresh_until_s = now_s + _FRESH_S

    def _refresh(self) -> None:
        """Update the index of rows: read the entries whose sequence has changed."""
        sequences = self._ledger.sequences()
        for row in changed(self._sequences, sequences):
            if self._rows.get(old := self._keys[row], (-1, 0))[0] == row:
                del self._rows[old]
            self._due.pop(row, None)
            if (entry := self._ledger.entry(row)) is not None:
                self._keys[row], sequences[row] = entry
                if not self.checksums.is_refused(row, entry[1]):
                    self._rows[entry[0]] = row, entry[1]
                    self._due[row] = entry[1]
        self._sequences = sequences


def changed(before: Sequence[int], after: Sequence[int]) -> Iterator[int]:
    if before != after:
        for row, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                yield row


def _check(info: RegionInfo, memory: int, ledger: LedgerView) -> None:
    found = os.fstat(memory)
    if not stat.S_ISREG(found.st_mode):
        raise TransferError("region: not a file in memory")
    if (ledger.rows, ledger.row_bytes) != (info.rows, info.row_bytes):
        raise TransferError(
            f"region: {info.rows} rows of {info.row_bytes} bytes, its ledger has {ledger.rows} "
            f"of {ledger.row_bytes}"
        )
    if found.st_size != (size := info.rows * info.row_bytes):
        raise TransferError(f"region: {found.st_size} bytes; allowed: {size}")
    if fcntl.fcntl(memory, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        raise TransferError("region: writable; allowed: a descriptor for reading")


class Regions:
    """All regions of a node. Any thread may call its methods."""

    def __init__(self) -> None:
        self._regions: list[EngineRegion] = []
        self._refused_before = 0  # Refused rows of regions that have been released.
        # Pairs of namespaces whose difference was logged.
        self._told: set[frozenset[bytes]] = set()
        self._lock = threading.Lock()

    @property
    def are_held(self) -> bool:
        return bool(self._regions)

    @property
    def refused_rows(self) -> int:
        """Number of rows that were refused since the agent's start."""
        with self._lock:
            return self._refused_before + sum(each.refused for each in self._regions)

    def held(self) -> list[EngineRegion]:
        with self._lock:
            return list(self._regions)

    def add(self, region: EngineRegion) -> None:
        """Serve a region, which replaces one with the same epoch: its engine has connected again.

        Raises:
            TransferError: too many regions.
        """
        with self._lock:
            known = [each for each in self._regions if each.epoch == region.epoch]
            if len(self._regions) - len(known) >= MAX_REGIONS:
                raise TransferError(f"{MAX_REGIONS} regions are held already")
            self._tell_differences(region)
            for each in known:
                region.take_over(each)
                self._regions.remove(each)
            self._regions.append(region)

    def of(self, space: Space) -> list[EngineRegion]:
        """Return the regions of a space, dead engines' first: these no longer change."""
        with self._lock:
            found = [each for each in self._regions if each.info.space == space]
        return sorted(found, key=lambda each: each.died_s is None)

    def protected(self, now_s: float) -> dict[Space, list[bytes]]:
        """Return keys of the rows that running streams need, or needed when their engine died."""
        regions = self.held()
        found: dict[Space, dict[bytes, None]] = {}
        for each in regions:
            found.setdefault(each.info.space, {}).update(dict.fromkeys(each.protected(now_s)))
        return {space: list(keys) for space, keys in found.items()}

    def reports(self) -> list[RegionReport]:
        """Return a report of each region whose engine has not withdrawn its rows."""
        return [each.report for each in self.held() if not each.is_closed]

    def settle(self, now_s: float) -> None:
        """Adopt regions of dead engines; release regions that are no longer read."""
        for region in self.held():
            if region.died_s is None and not region.is_alive():
                count = region.adopt(now_s)
                log.warning(
                    "engine died",
                    extra={
                        "engine": region.info.engine,
                        "row_count": count,
                        "rows_without_checksum": region.unchecked,
                    },
                )
            if region.is_over(now_s):
                log.info("memory of a dead engine given back", extra={"engine": region.info.engine})
                with self._lock:
                    self._regions = [each for each in self._regions if each is not region]
                    self._refused_before += region.refused

    def _tell_differences(self, region: EngineRegion) -> None:
        """Log, once per pair of namespaces, in which fields an engine of the same model differs, so
        that the two cannot share rows.
        """
        info = region.info
        for other in (each.info for each in self._regions):
            pair = frozenset({info.namespace, other.namespace})
            if other.model != info.model or len(pair) == 1 or pair in self._told:
                continue
            names = sorted({*other.fields, *info.fields})
            differ = [each for each in names if other.fields.get(each) != info.fields.get(each)]
            log.warning(
                "rows of two engines of one model are not shared: their namespaces differ",
                extra={"engines": [other.engine, info.engine], "fields": differ},
            )
            self._told.add(pair)


class RowSummer:
    """A thread that makes checksums of the rows of all regions, those of protected rows first."""

    def __init__(self, regions: Regions, share: float) -> None:
        """`share`: most CPU time of the thread, as a part of one core; 0: no thread."""
        self._regions, self._share = regions, share
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._stop = threading.Event()
        self._since_s = 0.0
        self._thread = threading.Thread(target=self._run, name="row-checksums", daemon=True)

    def start(self) -> None:
        if self._share:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._since_s = time.thread_time()
                if not sum([self._sum_rows(region) for region in self._regions.held()]):
                    self._rest(0.0)
                    self._stop.wait(_LOOK_S)
            except Exception:
                log.exception("a bug ended a look for rows without checksums; the next one follows")
                self._stop.wait(_RETRY_S)

    def _sum_rows(self, region: EngineRegion) -> int:
        """Make checksums of a few rows that have none; return their number."""
        most = max(1, _LOOK_BYTES // region.info.row_bytes)
        due = region.without_checksum(most, time.monotonic())
        for row, sequence in due:
            if self._stop.is_set():
                break
            if (checksum := region.sum_row(row, sequence, self._piece)) is not None:
                region.checksums.agrees(row, sequence, checksum)
            self._rest(_SLICE_S)
        return len(due)

    def _rest(self, slice_s: float) -> None:
        """Pause if the thread has used `slice_s` of CPU time since its last pause, for as long as
        its share asks.
        """
        used_s = time.thread_time() - self._since_s
        if used_s > slice_s:
            self._stop.wait(used_s * (1 / self._share - 1))
            self._since_s = time.thread_time()
