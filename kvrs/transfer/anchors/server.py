"""The agent's side: a UNIX socket over which processes of the node get descriptors of memory.

It runs in threads of its own, since memory takes long to be cleared. Nothing of it lasts: files and
locks are all that the next agent needs.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvrs.ids import InstanceId
from kvrs.transfer.anchors.files import AnchoredFiles
from kvrs.transfer.anchors.messages import (
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    SOCKET,
    AnchorAnswer,
    AnchorError,
    AttachMemory,
    AttachWeights,
    CommitWeights,
    Request,
    anchor_key,
    decode_request,
    encode_answer,
)
from kvrs.transfer.shared_memory.passing import close_all, foreign_user, listen_in, rights
from kvrs.transfer.store.directory import StoreDirectory

log = logging.getLogger(__name__)

_THREADS = 4
_TIMEOUT_S = 5.0


class AnchorServer:
    """Owns the memory of a node's instances, in the agent's directory."""

    def __init__(
        self,
        directory: StoreDirectory,
        instances: Collection[InstanceId],
        ring: Sequence[bytes],
        *,
        orphan_s: float,
        reserved_bytes: int,
    ) -> None:
        self._directory = directory
        self._instances = instances
        self._keys = [anchor_key(secret) for secret in ring]
        self._files = AnchoredFiles(directory, orphan_s=orphan_s, reserved_bytes=reserved_bytes)
        # Two processes that attach at the same time, or one and the end of orphans.
        self._one = threading.Lock()
        self._listener: socket.socket | None = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="anchors")

    def start(self) -> None:
        """Raises OSError: the socket cannot be made."""
        listener = listen_in(self._directory.path, SOCKET, socket.SOCK_SEQPACKET)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="anchors", daemon=True).start()

    def close(self) -> None:
        """Memory stays as it is."""
        if (listener := self._listener) is not None:
            self._listener = None
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            with suppress(FileNotFoundError):
                self._directory.unlink(SOCKET)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def clear(self) -> None:
        """Give all memory back; processes keep what they have mapped."""
        with self._one:
            self._files.clear()

    def end_orphans(self, now_s: float) -> None:
        """Give back memory that no process has used for `orphan_s`."""
        with self._one:
            self._files.end_orphans(now_s)

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is listener:
                    time.sleep(0.1)  # File descriptors ran out: others must be closed first.
                continue
            try:
                self._pool.submit(self._serve, connection)
            except RuntimeError:  # It was closed meanwhile.
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._answer(connection)
            except (AnchorError, OSError) as error:
                log.warning("a process was refused: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_TIMEOUT_S)
        if reason := foreign_user(connection):
            raise AnchorError(reason)
        server_nonce = secrets.token_bytes(NONCE_BYTES)
        connection.send(server_nonce)
        message = connection.recv(MAX_MESSAGE_BYTES)
        request, nonce, key = decode_request(self._keys, server_nonce, message)
        fds: list[int] = []
        try:
            answer, fds = self._carry_out(request)
            message = encode_answer(key, server_nonce, nonce, answer)
            connection.sendmsg([message], rights(fds))
        finally:
            # The locks are on descriptions that the process has from now on.
            close_all(fds)

    def _carry_out(self, request: Request) -> tuple[AnchorAnswer, list[int]]:
        with self._one:
            try:
                match request:
                    case AttachMemory():
                        return self._attach(request)
                    case AttachWeights():
                        found = self._files.open_weights(request.key, request.size)
                        return AnchorAnswer(is_new=len(found) == 2, is_busy=not found), found
                    case CommitWeights():
                        self._files.commit_weights(request.key)
                        return AnchorAnswer(), []
            except AnchorError as error:
                return AnchorAnswer(refused=str(error)), []

    def _attach(self, request: AttachMemory) -> tuple[AnchorAnswer, list[int]]:
        instance = InstanceId(request.instance)
        if instance not in self._instances:
            allowed = ", ".join(self._instances)
            raise AnchorError(f"{instance!r} is not on this node; allowed: {allowed}")
        is_new, fd = self._files.attach(instance, request.epoch, request.kind, request.size)
        log.info("memory attached", extra={"instance": instance, "is_new": is_new})
        return AnchorAnswer(is_new=is_new), [fd]
