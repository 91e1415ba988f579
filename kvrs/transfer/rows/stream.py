"""Connections of the row port: whole frames over blocking sockets, by a deadline."""

import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from kvrs.errors import TransferError
from kvrs.protocol import rows
from kvrs.protocol.rows import RowFrame, RowHead, Space
from kvrs.protocol.secrets import NONCE_BYTES, ClientProof, ProofError, ScopedKey
from kvrs.transfer.shared_memory.passing import close_all, receive

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
