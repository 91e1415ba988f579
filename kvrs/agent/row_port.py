"""The row port of an agent. A thread per connection serves rows of the node's engines, so their
bytes do not pass the agent's event loop.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby

from kvrs.agent.regions import EngineRegion, Regions
from kvrs.agent.row_copies import CopiedRows, RowCopies
from kvrs.errors import TransferError
from kvrs.protocol import rows
from kvrs.protocol.rows import RowFrame, RowHead, Space
from kvrs.protocol.secrets import ScopedKey
from kvrs.transfer.rows.stream import RowStream
from kvrs.transfer.rows.tags import RowTagger
from kvrs.transfer.shared_memory.passing import close_all
from kvrs.transfer.stream import tune

log = logging.getLogger(__name__)

# Most connections whose client has proved the secret; a further one is refused.
MAX_CONNECTIONS = 256
# Most connections whose client has not yet proved the secret; a further one ends the oldest.
MAX_UNPROVEN = 64
# Time limit for receiving a question that has begun, and for sending each row of its answer.
_ANSWER_S = 30.0
# First and longest pause after a failure to accept a connection; it doubles with each failure.
_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
# Longest time for which a copy waits for loads: before each row sent to another agent, and before
# each question to it.
_COPY_WAITS_S = 1.0


class RowPort:
    """Accepts connections at its listeners, and serves each in a thread."""

    def __init__(
        self,
        regions: Regions,
        copies: RowCopies,
        keys: Sequence[ScopedKey],
        tagger: RowTagger,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.regions, self.copies, self.tagger, self.now_s = regions, copies, tagger, now_s
        self._keys = keys
        self._listeners: list[socket.socket] = []
        self._proven: set[socket.socket] = set()
        # Connections whose client has not yet proved the secret, oldest first.
        self._unproven: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._loads, self._idle = 0, threading.Condition()

    def listen(self, listener: socket.socket) -> None:
        """Accept connections at the listener until `close`, which also closes the listener."""
        with self._lock:
            self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener,), name="rows", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end all connections. Engines connect to their node's next agent."""
        with self._lock:
            self._closing = True
            ends = [*self._listeners, *self._unproven, *self._proven]
        for each in ends:
            _end(each)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Note that rows are being loaded during the block, so that copies wait."""
        with self._idle:
            self._loads += 1
        try:
            yield
        finally:
            with self._idle:
                self._loads -= 1
                self._idle.notify_all()

    def wait_idle(self) -> None:
        """Wait until no rows are being loaded, at most `_COPY_WAITS_S`, so that copies make
        progress.
        """
        with self._idle:
            self._idle.wait_for(lambda: not self._loads, _COPY_WAITS_S)

    def _accept(self, listener: socket.socket) -> None:
        pause_s = _PAUSE_S
        with listener:
            while True:
                connection = None
                try:
                    connection, _ = listener.accept()
                    self._begin(connection)
                    pause_s = _PAUSE_S
                # The process has no free descriptor or thread, or the listener was shut down.
                except (OSError, RuntimeError) as error:
                    if connection is not None:
                        self._ended(connection)
                    if self._closing:
                        return
                    if pause_s == _PAUSE_S:
                        log.error("row port: no connection is accepted", extra={"cause": error})
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _begin(self, connection: socket.socket) -> None:
        """Serve a connection in a new thread. Raises RuntimeError: no thread can be started."""
        with self._lock:
            if len(self._unproven) >= MAX_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                _end(oldest)
            self._unproven[connection] = None
            if self._closing:
                _end(connection)
        threading.Thread(target=self._serve, args=(connection,), name="rows", daemon=True).start()

    def _ended(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproven.pop(connection, None)
            self._proven.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        stream = RowStream(connection)
        try:
            if connection.family != socket.AF_UNIX:
                tune(connection, _ANSWER_S)
            stream.admit(self._keys)
            with self._lock:
                self._unproven.pop(connection, None)
                self._proven.add(connection)
                if len(self._proven) > MAX_CONNECTIONS:
                    raise TransferError(f"row port: {MAX_CONNECTIONS} connections are open")
            _Questions(stream, self).run()
        except (OSError, TransferError) as error:
            if not self._closing and "closed by the other end" not in str(error):
                log.warning("row port: connection ended", extra={"cause": error})
        except Exception:
            log.exception("row port: connection ended")
        finally:
            self._ended(connection)


class _Questions:
    """Serves the questions of one client in order."""

    def __init__(self, stream: RowStream, port: RowPort) -> None:
        self._stream, self._port = stream, port
        self._space = Space(b"", 0)
        self._row = bytearray()
        self._is_copy = False

    def run(self) -> None:
        """Answer questions until the connection ends. Raises TransferError: the connection is lost,
        or the client has made a mistake.
        """
        while True:
            self._stream.until(None)
            head, descriptors = self._stream.receive_head_with(2)
            self._stream.until(_ANSWER_S)
            try:
                self._answer(head, descriptors)
            except TransferError as error:
                reason = str(error).encode()[: rows.MAX_REASON_BYTES]
                self._stream.send(rows.encode(RowFrame.REFUSED, body=reason))
                raise
            finally:
                close_all(descriptors)

    def _answer(self, head: RowHead, descriptors: list[int]) -> None:
        if bool(descriptors) != (head.frame is RowFrame.REGION):
            raise TransferError(f"row port: {head.frame.name} with {len(descriptors)} descriptors")
        keys = rows.split_keys(self._stream.receive_exactly(head.keys_bytes), head.key_bytes)
        match head.frame:
            case RowFrame.REGION:
                self._take(rows.decode_region(self._body(head)), descriptors)
            case RowFrame.SPACE:
                self._space = rows.decode_space(self._body(head))
                self._stream.send(rows.encode(RowFrame.HELD))
            case RowFrame.LOOKUP:
                now_s, sources = self._port.now_s(), self._sources()
                held = [each.held(keys, now_s) for each in sources] or [[False] * len(keys)]
                found = bytes(map(any, zip(*held, strict=True)))
                self._stream.send(rows.encode(RowFrame.FOUND, body=found))
            case RowFrame.LOAD:
                self._send_rows(keys)
            case RowFrame.PROTECTED:
                self._is_copy = True
                self._send_protected()
            case _:
                raise TransferError(f"row port: {head.frame.name} is not a question")

    def _body(self, head: RowHead) -> bytes:
        return self._stream.receive_exactly(head.body_bytes)

    def _take(self, info: rows.RegionInfo, descriptors: list[int]) -> None:
        if len(descriptors) != 2:
            raise TransferError(f"row port: REGION with {len(descriptors)} descriptors; allowed: 2")
        ledger, memory = descriptors.pop(), descriptors.pop()
        self._port.regions.add(EngineRegion(info, memory, ledger, self._port.tagger))
        log.info(
            "serving an engine's rows",
            extra={
                "engine": info.engine,
                "row_count": info.rows,
                "row_bytes": info.row_bytes,
                "namespace": rows.short(info.namespace),
                "fields": info.fields,
            },
        )
        self._stream.send(rows.encode(RowFrame.HELD))

    def _send_rows(self, keys: list[bytes]) -> None:
        if not self._is_copy:
            with self._port.loading():
                for key in keys:
                    self._send_row(key)
            return
        for key in keys:
            self._port.wait_idle()
            self._send_row(key)

    def _send_row(self, key: bytes) -> None:
        self._stream.until(_ANSWER_S)
        sources = self._sources()
        if sources and len(self._row) != self._space.row_bytes:
            self._row = bytearray(self._space.row_bytes)
        buffer = memoryview(self._row)
        is_local = self._stream.is_local
        for each in sources:
            at = None if is_local else each.place(key, self._port.now_s())
            if at is not None:
                tag, file, offset = at
                self._stream.send(rows.row_start(self._space.row_bytes, tag))
                self._stream.send_file(file, offset, self._space.row_bytes)
                return
            found = each.read(key, buffer, self._port.now_s(), tagged=not is_local)
            if found is not None:
                frame, tag, row = found
                self._stream.send(rows.row_start(len(row), tag, frame), row)
                return
        self._stream.send(rows.encode(RowFrame.GONE))

    def _send_protected(self) -> None:
        left = rows.MAX_KEYS
        for space, keys in self._port.regions.protected(self._port.now_s()).items():
            for size, some in groupby(sorted(keys, key=len), key=len):
                if size and (first := [*some][:left]):
                    left -= len(first)
                    body = rows.encode_space(space)
                    self._stream.send(rows.encode(RowFrame.KEYS, first, body))
        self._stream.send(rows.encode(RowFrame.HELD))

    def _sources(self) -> "list[EngineRegion | CopiedRows]":
        return [*self._port.regions.of(self._space), *self._port.copies.of(self._space)]


def _end(end: socket.socket) -> None:
    """Shut a socket down, which wakes the thread that reads or accepts from it."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
