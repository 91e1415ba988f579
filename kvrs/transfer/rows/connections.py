"""Connections of the row port: sockets, and frames over them.

Sockets of the row port: in a directory of this host, and over TCP between nodes.

The directory belongs to the agent and holds only the socket. Processes of its group may connect:
the group of `backup.directory` if the agent's user is in it, else the agent's own. Neither end uses
a directory that others may write to or enter.

Connections of the row port: whole frames over blocking sockets, by a deadline.
"""

import os
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvrs.errors import ConfigError, TransferError
from kvrs.protocol import rows
from kvrs.protocol.rows import RowFrame, RowHead, Space
from kvrs.protocol.secrets import NONCE_BYTES, ClientProof, ProofError, ScopedKey
from kvrs.transfer.shared_memory import bind_at, close_all, connect_at, opened, receive
from kvrs.transfer.store.directory import not_ours, open_to_others
from kvrs.transfer.stream import SEND_BUFFER_BYTES, page_socket, tune

_BACKLOG = 1024
# Pause before another try to connect to a socket whose queue is full.
_FULL_S = 0.005
# Seconds for which sent bytes may stay unacknowledged before TCP gives the connection up.
_GONE_S = 10.0
# Mode of the socket's directory, and bits that its mode must not have.
_MODE, _OTHERS = 0o750, 0o027
_SOCKET, _SOCKET_MODE = "rows", 0o660


def listen_unix(directory: Path) -> socket.socket:
    """Make the directory, if missing, and listen in it.

    Raises:
        ConfigError: the directory cannot be made, belongs to another user, or others may use it.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        with opened(directory) as inside:
            if reason := not_ours(os.fstat(inside), _OTHERS):
                raise PermissionError(reason)
            bind_at(inside, _SOCKET, listener)
            os.chmod(_SOCKET, _SOCKET_MODE, dir_fd=inside)
            _give_to_group(inside)
            os.fchmod(inside, _MODE)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"backup.directory: {directory}: {error.strerror or error}; allowed: a directory of "
            f"this user, mode {_MODE:04o}"
        ) from None
    return listener


def _give_to_group(directory: int) -> None:
    for group in (os.stat("..", dir_fd=directory).st_gid, os.getegid()):
        # An OSError shows that this user is not in the group; then the own group is tried.
        with suppress(OSError):
            os.chown(_SOCKET, -1, group, dir_fd=directory, follow_symlinks=False)
            os.fchown(directory, -1, group)
            return


def remove_unix(directory: Path) -> None:
    """Remove the directory and the socket in it, if they are this user's."""
    with suppress(OSError), opened(directory) as inside:
        if not_ours(os.fstat(inside), _OTHERS) is None:
            os.unlink(_SOCKET, dir_fd=inside)
            os.rmdir(directory)


def dial_first(directories: Sequence[Path], timeout_s: float) -> socket.socket:
    """Connect to the agent that listens in one of these directories: their names depend on the
    cluster's first secret, which may differ between the ends while secrets are rotated.

    Raises:
        OSError: as in `dial_unix`, for the last directory.
    """
    *others, last = directories
    for directory in others:
        with suppress(OSError):
            return dial_unix(directory, timeout_s)
    return dial_unix(last, timeout_s)


def dial_unix(directory: Path, timeout_s: float) -> socket.socket:
    """Connect to the agent that listens in a directory. Raises OSError: no agent listens there,
    this user may not enter the directory, or users outside the directory's group may.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        with opened(directory) as inside:
            # The kernel admits only root, the directory's owner and members of its group.
            if reason := open_to_others(os.fstat(inside), _OTHERS):
                raise PermissionError(reason)
            _connect_in_time(inside, connection, timeout_s)
    except PermissionError as error:
        connection.close()
        raise PermissionError(
            f"{directory}: {error.strerror or error}; allowed: a directory of mode {_MODE:04o} "
            f"whose owner or group this user has"
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_in_time(directory: int, connection: socket.socket, timeout_s: float) -> None:
    """Connect, also if the agent's queue is full for a moment: a UNIX socket with a time limit does
    not wait for room by itself. Raises OSError.
    """
    give_up_s = time.monotonic() + timeout_s
    while True:
        try:
            return connect_at(directory, _SOCKET, connection)
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(_FULL_S)


def dial_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect over TCP. Raises OSError: no agent listens there, or its name did not resolve in
    time.
    """
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # The name is looked up in a thread, because the resolver may take longer than the caller can
    # wait.
    threading.Thread(
        target=lambda: found.put(_looked_up(host, port)), name="kvrs-names", daemon=True
    ).start()
    try:
        address = found.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
        raise TimeoutError(f"no address of {host} in time") from None
    if isinstance(address, OSError):
        raise address
    connection = socket.create_connection(address[:2], max(0.001, timeout_s))
    tune(connection, _GONE_S)
    return connection


def _looked_up(host: str, port: int) -> Any:
    """Return the first address of a host, or the look-up's error instead of raising it."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        return error


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Raises OSError: it cannot be bound."""
    listener = page_socket(host)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(True)
    except BaseException:
        listener.close()
        raise
    return listener


PROOF_S = 5.0
TOO_SLOW = "too slow"


class RowStream:
    """One end of a connection of the row port. Its owner closes it; after an error it cannot be
    used further.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline_s: float | None = None

    @property
    def is_local(self) -> bool:
        """True if the other end is a process of this host."""
        return self._connection.family == socket.AF_UNIX

    def until(self, timeout_s: float | None) -> None:
        """Set the time from now after which sends and receives fail; None: no limit."""
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    def end(self) -> None:
        """Wake the thread that waits in another method, which then raises."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def prove(self, key: ScopedKey) -> None:
        """Carry out the client's part of the mutual proof.

        Raises:
            TransferError: the agent has another secret, or it is not an agent.
        """
        proof = ClientProof(key, secrets.token_bytes(NONCE_BYTES))
        self.send(proof.hello)
        answer = b""
        try:
            while not answer:
                answer = proof.receive(self.receive_exactly(proof.wanted_bytes))
        except ProofError as error:
            raise TransferError(f"row port: {error}") from None
        self.send(answer)

    # Both ends exchange frames by the methods below, once the proof is over.

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send the parts one after the other. Raises TransferError: the connection is lost, or the
        other end is too slow.
        """
        left = [memoryview(part).cast("B") for part in parts if len(part)]
        try:
            while left:
                self._wait()
                sent = self._connection.sendmsg(left)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left:
                    left[0] = left[0][sent:]
        except OSError as error:
            raise self._lost(error) from None

    def send_file(self, file: int, offset: int, size: int) -> None:
        """Send bytes of a file without copying them.

        Raises:
            TransferError: as in `send`, or the file is too short.
        """
        end = offset + size
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        try:
            while offset < end:
                left_s = self._wait()
                try:
                    sent = os.sendfile(self._connection.fileno(), file, offset, end - offset)
                except BlockingIOError:
                    writable.poll(None if left_s is None else left_s * 1e3)
                    continue
                if not sent:
                    raise TransferError("row port: the memory of an engine was cut")
                offset += sent
        except OSError as error:
            raise self._lost(error) from None

    def send_with(self, descriptors: Sequence[int], frame: bytes) -> None:
        """Send a frame, and copies of the descriptors with its first byte. Raises TransferError."""
        try:
            self._wait()
            sent = socket.send_fds(self._connection, [frame], list(descriptors))
        except OSError as error:
            raise self._lost(error) from None
        self.send(frame[sent:])

    def receive_head(self) -> RowHead:
        """Receive a frame's head. Raises TransferError: the connection is lost, or the bytes are no
        frame.
        """
        return rows.decode_head(self.receive_exactly(rows.HEAD_BYTES))

    def receive_head_with(self, most: int) -> tuple[RowHead, list[int]]:
        """Receive a frame's head, and the descriptors that came with it, which the caller must
        close.

        Raises:
            TransferError: as `receive_head`, or there are more than `most` descriptors.
        """
        found: list[int] = []
        head = bytearray(rows.HEAD_BYTES)
        try:
            self._wait()
            size = receive(self._connection, head, found, most)
            if not size:
                raise TransferError("row port: connection lost: closed by the other end")
            self.receive_into(memoryview(head)[size:])
            return rows.decode_head(head), found
        except OSError as error:
            close_all(found)
            raise self._lost(error) from None
        except TransferError:
            close_all(found)
            raise

    def expect(self, frame: RowFrame) -> RowHead:
        """Receive the head of an answer.

        Raises:
            TransferError: another frame than `frame` arrived, such as a refusal.
        """
        head = self.receive_head()
        if head.frame is RowFrame.REFUSED:
            reason = self.receive_exactly(head.body_bytes).decode(errors="replace")
            raise TransferError(f"refused by the agent: {reason}")
        if head.frame is not frame:
            raise TransferError(f"row port: {head.frame.name}; allowed: {frame.name}")
        return head

    def choose(self, space: Space) -> None:
        """Tell the agent the space to which all later keys belong. Raises TransferError."""
        self.send(rows.encode(RowFrame.SPACE, body=rows.encode_space(space)))
        self.expect(RowFrame.HELD)

    def receive_row(self, into: memoryview) -> tuple[RowFrame, bytes] | None:
        """Receive the bytes of a row; return ROW and its tag, or CHECKED and its checksum, which
        the caller verifies. None: the row is gone.

        Raises:
            TransferError: the frame is no row, or the row has not the size of `into`.
        """
        head = self.receive_head()
        if head.frame is RowFrame.GONE:
            return None
        tag_bytes = rows.BYTES_BEFORE_ROW.get(head.frame)
        if tag_bytes is None or head.body_bytes != tag_bytes + len(into):
            raise TransferError(f"row port: {head.frame.name} of {head.body_bytes} bytes")
        tag = self.receive_exactly(tag_bytes)
        self.receive_into(into)
        return head.frame, tag

    def receive_exactly(self, size: int) -> bytes:
        """Receive exactly `size` bytes; the caller has checked the size. Raises TransferError."""
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        """Receive bytes until the view is full. Raises TransferError."""
        try:
            while view:
                self._wait()
                if not (size := self._connection.recv_into(view)):
                    raise TransferError("row port: connection lost: closed by the other end")
                view = view[size:]
        except OSError as error:
            raise self._lost(error) from None

    def _wait(self) -> float | None:
        """Set the socket's timeout to the seconds left until the deadline, and return them; None:
        no deadline. Raises TransferError: none are left.
        """
        if self._deadline_s is None:
            self._connection.settimeout(None)
            return None
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TransferError(f"row port: {TOO_SLOW}")
        self._connection.settimeout(left_s)
        return left_s

    @staticmethod
    def _lost(error: OSError) -> TransferError:
        cause = TOO_SLOW if isinstance(error, TimeoutError) else f"connection lost: {error}"
        return TransferError(f"row port: {cause}")
