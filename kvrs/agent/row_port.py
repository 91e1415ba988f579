"""The row port of an agent. Each client that has proved the secret has a thread, which serves rows
of the node's engines, so their bytes do not pass the agent's event loop.

Second copies of rows: an agent reads rows that running streams need from another node's agent,
and serves them after the loss of that node.

A thread asks the other agent which rows are protected, and loads new ones with lower priority than
all serving. Rows that are no longer protected are dropped at once. Rows keep the other agent's tag,
so the loading server verifies the whole way. A copy that differs from its checksum when it is read
is dropped, and loaded again while its source exists.
"""

import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvrs.agent.regions import ADOPTED_S, EngineRegion, Regions
from kvrs.errors import TransferError
from kvrs.ids import NodeId
from kvrs.protocol import rows
from kvrs.protocol.rows import CopyReport, RowFrame, RowHead, Space, short
from kvrs.protocol.secrets import NONCE_BYTES, ProofError, ScopedKey, ServerProof
from kvrs.transfer.rows.client import ToldOnce
from kvrs.transfer.rows.connections import PROOF_S, RowStream
from kvrs.transfer.rows.tags import RowTagger
from kvrs.transfer.shared_memory import close_all
from kvrs.transfer.stream import tune

log = logging.getLogger(__name__)

_LOOK_FOR_COPIES_S = (
    0.25  # Pause between two questions for protected rows, and so about the lag of copies.
)
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
                self._stop.wait(_LOOK_FOR_COPIES_S)
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


# Most connections whose client has proved the secret; a further one is refused.
MAX_CONNECTIONS = 256
# Most connections whose client has said nothing of its proof, and most whose client has said its
# first message. A further one ends the oldest of its kind of the peer that has most of them.
MAX_SILENT, MAX_GREETED = 512, 256
# Most connections that a listener accepts in one turn, before bytes of others are read.
_ACCEPTS = 64
# Time limit for receiving a question that has begun, and for sending each row of its answer.
_ANSWER_S = 30.0
# First and longest pause after a failure to accept a connection; it doubles with each failure.
_PAUSE_S, _MAX_PAUSE_S = 0.1, 1.0
# Longest time between two looks for clients that have proved nothing within `PROOF_S`.
_LOOK_S = 1.0
_UCRED = struct.Struct("iII")  # Process, user and group of a UNIX socket's other end.
# Longest time for which a copy waits for loads: before each row sent to another agent, and before
# each question to it.
_COPY_WAITS_S = 1.0


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection whose client has not yet proved the secret."""

    connection: socket.socket
    peer: str
    proof: ServerProof
    until_s: float


class Strangers:
    """Connections whose clients have not proved the secret: silent ones, and greeted ones, whose
    first message was a right one. Both are bounded, so silent connections never end greeted ones.
    """

    def __init__(self) -> None:
        # By peer, oldest first.
        self.silent: dict[str, dict[_Stranger, None]] = {}
        self.greeted: dict[str, dict[_Stranger, None]] = {}

    def add(self, new: _Stranger) -> None:
        self.silent.setdefault(new.peer, {})[new] = None

    def greet(self, known: _Stranger) -> None:
        self.remove(known)
        self.greeted.setdefault(known.peer, {})[known] = None

    def remove(self, known: _Stranger) -> None:
        for of_peer in (self.silent, self.greeted):
            found = of_peer.get(known.peer, {})
            if found.pop(known, known) is None and not found:
                del of_peer[known.peer]

    def surplus(self) -> _Stranger | None:
        """Return the connection that has to make room for others; None: there is room."""
        for of_peer, most in ((self.silent, MAX_SILENT), (self.greeted, MAX_GREETED)):
            if sum(map(len, of_peer.values())) > most:
                return self._oldest(of_peer)
        return None

    def silent_one(self) -> _Stranger | None:
        """Return a silent connection to be ended for another reason; None: there is none."""
        return self._oldest(self.silent) if self.silent else None

    @staticmethod
    def _oldest(of_peer: Mapping[str, Mapping[_Stranger, None]]) -> _Stranger:
        """Return the oldest connection of the peer with most of them."""
        largest = max(of_peer, key=lambda peer: len(of_peer[peer]))
        return next(iter(of_peer[largest]))

    def all(self) -> list[_Stranger]:
        return [each for kind in (self.silent, self.greeted) for of in kind.values() for each in of]


class RowPort:
    """Accepts connections at its listeners. One thread receives the proofs of all clients, so that
    clients which say nothing cost little and keep no other out, at any rate; each client that has
    proved the secret is served in a thread of its own.
    """

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
        self._events, self._wake = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC)
        self._events.register(self._wake, select.EPOLLIN)
        self._listeners: dict[int, socket.socket] = {}
        # Strangers by descriptor. Only the thread of proofs uses this and the next fields.
        self._strangers: dict[int, _Stranger] = {}
        self._among = Strangers()
        self._pause_s, self._look_s = _PAUSE_S, 0.0
        self._proven: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._loads, self._idle = 0, threading.Condition()
        self._thread = threading.Thread(target=self._admit, name="rows", daemon=True)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections at the listener until `close`, which also closes the listener."""
        listener.setblocking(False)
        with self._lock:
            self._listeners[listener.fileno()] = listener
            self._events.register(listener, select.EPOLLIN)
            if self._thread.ident is None:
                self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all connections. Engines connect to their node's next agent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
                for each in (*self._listeners.values(), *self._proven):
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

    def _admit(self) -> None:
        """Accept connections and receive proofs until `close`."""
        try:
            while not self._closing:
                self._turn()
        except Exception:
            log.exception("row port: no connection is accepted any more")
        finally:
            with self._lock:
                self._closing = True
                for each in (*self._listeners.values(), *(s.connection for s in self._among.all())):
                    each.close()
                self._events.close()
                os.close(self._wake)

    def _turn(self) -> None:
        """Read what has come from known clients, and then accept some new ones."""
        ready = [number for number, _ in self._events.poll(_LOOK_S)]
        if self._closing:
            return
        for number in ready:
            if (stranger := self._strangers.get(number)) is not None:
                self._hear(stranger)
        self._make_room()
        for number in ready:
            if (listener := self._listeners.get(number)) is not None:
                self._accept(listener)
        if (now_s := time.monotonic()) >= self._look_s:
            self._look_s = now_s + _LOOK_S
            for stranger in self._among.all():
                if stranger.until_s <= now_s:
                    self._drop(stranger)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            # The process has no free descriptor, or the listener was shut down.
            except OSError as error:
                if self._closing:
                    return
                if (silent := self._among.silent_one()) is not None:
                    self._drop(silent)
                    continue
                if self._pause_s == _PAUSE_S:
                    log.error("row port: no connection is accepted", extra={"cause": error})
                time.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
                return
            self._pause_s = _PAUSE_S
            self._meet(connection, _peer_of(connection, address))

    def _meet(self, connection: socket.socket, peer: str) -> None:
        """Take a new connection up, and hear what has come with it."""
        connection.setblocking(False)
        proof = ServerProof(self._keys, secrets.token_bytes(NONCE_BYTES))
        new = _Stranger(connection, peer, proof, time.monotonic() + PROOF_S)
        self._strangers[connection.fileno()] = new
        self._among.add(new)
        self._events.register(connection, select.EPOLLIN)
        self._hear(new)
        self._make_room()

    def _make_room(self) -> None:
        """End connections beyond the bounds."""
        while (surplus := self._among.surplus()) is not None:
            # Bytes that have come since the last turn count.
            self._hear(surplus)
            if self._among.surplus() is surplus:
                self._drop(surplus)

    def _hear(self, stranger: _Stranger) -> None:
        """Take what a client has said of its proof, and serve it once the proof is complete."""
        proof, connection = stranger.proof, stranger.connection
        try:
            while not proof.is_over:
                # Not a byte beyond the proof is read: descriptors come with the next frame's first
                # byte, and would be lost.
                if not (data := connection.recv(proof.wanted_bytes)):
                    self._drop(stranger)
                    return
                answer, _ = proof.receive(data)
                if answer:
                    connection.sendall(answer)
                    self._among.greet(stranger)
            if proof.scope is None:
                raise TransferError("row port: the client has proved nothing")
        except BlockingIOError:
            return
        except (OSError, ProofError, TransferError) as error:
            log.warning("row port: connection ended", extra={"cause": error})
            self._drop(stranger)
            return
        except Exception:  # The thread hears all other clients too.
            log.exception("row port: a client's proof ended by a bug")
            self._drop(stranger)
            return
        self._forget(stranger)
        self._begin(connection)

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection.fileno()]
        self._events.unregister(stranger.connection)
        self._among.remove(stranger)

    def _begin(self, connection: socket.socket) -> None:
        """Serve a client that has proved the secret in a new thread."""
        with self._lock:
            has_room = len(self._proven) < MAX_CONNECTIONS and not self._closing
            if has_room:
                self._proven.add(connection)
        try:
            if not has_room:
                raise TransferError(f"row port: {MAX_CONNECTIONS} connections are open")
            threading.Thread(
                target=self._serve, args=(connection,), name="rows", daemon=True
            ).start()
        # RuntimeError: no thread can be started.
        except (RuntimeError, TransferError) as error:
            log.warning("row port: connection ended", extra={"cause": error})
            self._ended(connection)

    def _ended(self, connection: socket.socket) -> None:
        with self._lock:
            self._proven.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if connection.family != socket.AF_UNIX:
                tune(connection, _ANSWER_S)
            _Questions(RowStream(connection), self).run()
        except (OSError, TransferError) as error:
            if not self._closing and "closed by the other end" not in str(error):
                log.warning("row port: connection ended", extra={"cause": error})
        except Exception:
            log.exception("row port: connection ended")
        finally:
            self._ended(connection)


def _peer_of(connection: socket.socket, address: Any) -> str:
    """Return whom a connection counts for: the user at the other end, or a host's address."""
    if connection.family != socket.AF_UNIX:
        return str(address[0])
    _, user, _ = _UCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return f"user {user}"


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
