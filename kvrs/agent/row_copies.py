"""Second copies of rows: an agent reads rows that running streams need from another node's agent,
and serves them after the loss of that node.

A thread asks the other agent which rows are protected, and loads new ones with lower priority than
all serving. Rows that are no longer protected are dropped at once. Rows keep the other agent's tag,
so the loading server verifies the whole way. A copy that differs from its checksum when it is read
is dropped, and loaded again while its source exists.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from kvrs.agent.regions import ADOPTED_S
from kvrs.errors import TransferError
from kvrs.ids import NodeId
from kvrs.protocol import rows
from kvrs.protocol.rows import CopyReport, RowFrame, Space, short
from kvrs.protocol.secrets import ScopedKey
from kvrs.transfer.rows.client import ToldOnce
from kvrs.transfer.rows.connections import RowStream

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # Pause between two questions for protected rows, and so about the lag of copies.
_RETRY_S = 1.0
_TIMEOUT_S = 30.0
_QUESTION_BYTES = 1 << 20  # Bytes of the rows that one question loads; at least one row.

Row = tuple[bytes, memoryview, bytes]  # Tag of a row, its bytes, and their checksum.


class CopiedRows:
    """Copied rows of one space. Any thread may call its methods."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.rows: dict[bytes, Row] = {}
        self.protected = 0  # Rows that the other node's running streams need, by the last look.
        self.used_s = 0.0
        self.refused = 0  # Copies that were dropped because they differed from their checksums.

    @property
    def share(self) -> float:
        """Part of the protected rows that is held, rounded down to a tenth."""
        return min(1.0, 10 * len(self.rows) // max(1, self.protected) / 10)

    def held(self, keys: Sequence[bytes], now_s: float) -> list[bool]:
        return [key in self.rows for key in keys]

    def place(self, key: bytes, now_s: float) -> None:
        """Return None, because copies are not in a file that could be sent from."""

    def read(
        self, key: bytes, buffer: memoryview, now_s: float, *, tagged: bool = True
    ) -> tuple[RowFrame, bytes, memoryview] | None:
        """Return ROW, the tag and the bytes of a row without copying them into `buffer`; None: not
        held, or damaged. The tag is returned in any case, since the row came from another node.
        """
        self.used_s = now_s
        if (found := self.rows.get(key)) is None:
            return None
        tag, row, checksum = found
        if rows.checksum(row) != checksum:
            self.refused += self.rows.pop(key, None) is not None
            log.error("the copy of a row has changed, and is refused: faulty memory?")
            return None
        return RowFrame.ROW, tag, row


class RowCopies:
    """Second copies, at one agent, of one other node's rows. `room_bytes` limits their memory."""

    def __init__(self, room_bytes: Callable[[], int]) -> None:
        self._room_bytes = room_bytes
        self._spaces: dict[Space, CopiedRows] = {}
        self._lock = threading.Lock()
        self._lost_s: float | None = None
        self._refused_before = 0  # Refused copies of spaces that are no longer held.

    def of(self, space: Space) -> list[CopiedRows]:
        found = self._spaces.get(space)
        return [] if found is None else [found]

    def reports(self, node: NodeId) -> tuple[CopyReport, ...]:
        """Return a report of each space of which rows are held; `node` is the other node."""
        held = [each for each in list(self._spaces.values()) if each.rows]
        return tuple(CopyReport(node, short(each.space.namespace), each.share) for each in held)

    @property
    def held_bytes(self) -> int:
        copies = list(self._spaces.values())
        return sum(len(each.rows) * each.space.row_bytes for each in copies)

    @property
    def refused_rows(self) -> int:
        """Number of copies that were dropped because they had changed, since the agent's start."""
        return self._refused_before + sum(each.refused for each in list(self._spaces.values()))

    def keep(self, protected: dict[Space, list[bytes]]) -> None:
        """Drop the copies of rows that are no longer among those that the other agent protects."""
        with self._lock:
            self._lost_s = None
            spaces = {space: self._spaces.get(space, CopiedRows(space)) for space in protected}
            self._hold(spaces)
        for space, copies in spaces.items():
            wanted = set(protected[space])
            # Other threads drop damaged copies meanwhile.
            for key in list(copies.rows):
                if key not in wanted:
                    copies.rows.pop(key, None)
            copies.protected = len(wanted)

    def missing(self, space: Space, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of the keys whose rows are not held, as many as there is room for."""
        room = max(0, self._room_bytes() - self.held_bytes) // space.row_bytes
        held = self._spaces[space].rows
        return [key for key in keys if key not in held][:room]

    def put(self, space: Space, key: bytes, tag: bytes, row: memoryview) -> None:
        self._spaces[space].rows[key] = tag, row, rows.checksum(row)

    def lose(self, now_s: float) -> None:
        """Note that the other agent cannot be reached; the first call since its last answer counts
        as the time of its loss.
        """
        if self._lost_s is None:
            self._lost_s = now_s

    def settle(self, now_s: float) -> None:
        """Release all copies if the other agent is lost and no row was read for `ADOPTED_S`."""
        with self._lock:
            used_s = max((each.used_s for each in self._spaces.values()), default=0.0)
            lost_s = self._lost_s
            if self._spaces and lost_s is not None and now_s - max(lost_s, used_s) > ADOPTED_S:
                log.info("copies of a lost node's rows given back")
                self._hold({})

    def _hold(self, spaces: dict[Space, CopiedRows]) -> None:
        gone = (each for space, each in self._spaces.items() if space not in spaces)
        self._refused_before += sum(each.refused for each in gone)
        self._spaces = spaces


class RowCopier:
    """A thread that loads copies of another agent's protected rows."""

    def __init__(
        self,
        copies: RowCopies,
        dial: Callable[[float], socket.socket],
        key: ScopedKey,
        bytes_per_s: float | None,
        wait_idle: Callable[[], None],
    ) -> None:
        """`dial` connects to the other agent within the given seconds, and raises OSError if it
        cannot. `wait_idle` waits until this agent serves no rows, for a limited time. `bytes_per_s`
        limits the rate of copies; None: unlimited.
        """
        self._copies, self._dial, self._key = copies, dial, key
        self._bytes_per_s, self._wait_idle = bytes_per_s, wait_idle
        self._stop = threading.Event()
        self._stream: RowStream | None = None
        self._told = ToldOnce(log)
        self._thread = threading.Thread(target=self._run, name="row-copies", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if (stream := self._stream) is not None:
            stream.end()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
            except (OSError, MemoryError, TransferError) as error:
                if not self._stop.is_set():
                    self._told.warn(f"rows of another node are not copied: {error}")
            except Exception:
                log.exception("rows of another node are not copied any more")
                return
            finally:
                self._copies.lose(time.monotonic())
            self._stop.wait(_RETRY_S)

    def _follow(self) -> None:
        stream = self._stream = RowStream(self._dial(_TIMEOUT_S))
        try:
            stream.until(_TIMEOUT_S)
            stream.prove(self._key)
            while not self._stop.is_set():
                stream.until(_TIMEOUT_S)
                protected = _protected(stream)
                self._copies.keep(protected)
                self._told.warn("rows of another node are copied")
                for space, keys in protected.items():
                    self._copy(stream, space, keys)
                self._stop.wait(_LOOK_S)
        finally:
            self._stream = None
            stream.close()

    def _copy(self, stream: RowStream, space: Space, keys: list[bytes]) -> None:
        wanted = self._copies.missing(space, keys)
        if wanted:
            stream.choose(space)
        size = max(1, _QUESTION_BYTES // space.row_bytes)
        for start in range(0, len(wanted), size):
            self._wait_idle()
            began_s, some = time.monotonic(), wanted[start : start + size]
            stream.until(_TIMEOUT_S)
            stream.send(rows.encode(RowFrame.LOAD, some))
            for key in some:
                row = memoryview(bytearray(space.row_bytes))
                if (found := stream.receive_row(row)) is not None:
                    self._copies.put(space, key, found[1], row)
            if self._bytes_per_s is not None:
                took_s = time.monotonic() - began_s
                self._stop.wait(max(0.0, len(some) * space.row_bytes / self._bytes_per_s - took_s))
            if self._stop.is_set():
                return


def _protected(stream: RowStream) -> dict[Space, list[bytes]]:
    """Ask the other agent for the keys of rows that running streams need, by space. Raises
    TransferError.
    """
    stream.send(rows.encode(RowFrame.PROTECTED))
    found: dict[Space, list[bytes]] = {}
    left = rows.MAX_KEYS
    while (head := stream.receive_head()).frame is RowFrame.KEYS and head.keys <= left:
        left -= head.keys
        keys = rows.split_keys(stream.receive_exactly(head.keys_bytes), head.key_bytes)
        space = rows.decode_space(stream.receive_exactly(head.body_bytes))
        found.setdefault(space, []).extend(keys)
    if head.frame is not RowFrame.HELD:
        raise TransferError(f"row port: {head.frame.name} of {head.keys} keys; allowed: KEYS, HELD")
    return found
