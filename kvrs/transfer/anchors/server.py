"""The agent's side: a UNIX socket over which processes of the node get descriptors of memory.

It runs in threads of its own, since memory takes long to be cleared. Nothing of it lasts: files and
locks are all that the next agent needs.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvrs.ids import InstanceId
from kvrs.transfer.anchors.book import OrphanBook
from kvrs.transfer.anchors.messages import (
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    SOCKET,
    AnchorError,
    Answer,
    AttachBusy,
    Attached,
    AttachMemory,
    AttachRefused,
    AttachWeights,
    CommitWeights,
    Request,
    anchor_key,
    decode_request,
    encode_answer,
    instance_of,
)
from kvrs.transfer.anchors.regions import MemoryName, Regions
from kvrs.transfer.store.directory import StoreDirectory
from kvrs.transfer.unix_sockets import foreign_user, listen_in

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
        self._regions = Regions(directory, reserved_bytes)
        self._orphans = OrphanBook(orphan_s)
        # Two processes that attach at the same time, or one and the end of orphans.
        self._one = threading.Lock()
        self._listener: socket.socket | None = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="anchors")

    def start(self) -> None:
        """Raises OSError: the socket cannot be made."""
        listener = listen_in(self._directory, SOCKET, socket.SOCK_SEQPACKET)
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
            self._regions.clear()

    def end_orphans(self, now_s: float) -> None:
        """Give back memory that no process has used for `orphan_s`."""
        with self._one:
            sets: dict[str, list[MemoryName]] = {
                str(names[0]): names
                for by_generation in self._regions.sets().values()
                for names in by_generation.values()
            }
            used = {name: self._regions.is_used(names) for name, names in sets.items()}
            used |= {name: self._regions.is_arena_used(name) for name in self._regions.arenas()}
            for name in self._orphans.look(used, now_s):
                log.info("memory is used by no process", extra={"region": name})
                if name in sets:
                    self._regions.drop(sets[name])
                else:
                    self._regions.drop_arena(name)

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
            socket.send_fds(connection, [encode_answer(key, server_nonce, nonce, answer)], fds)
        finally:
            # The locks are on descriptions that the process has from now on.
            for fd in fds:
                os.close(fd)

    def _carry_out(self, request: Request) -> tuple[Answer, list[int]]:
        with self._one:
            try:
                match request:
                    case AttachMemory():
                        return self._attach(request)
                    case AttachWeights():
                        found = self._regions.open_weights(request.key, request.size)
                        if found is None:
                            return AttachBusy(), []
                        return Attached(is_new=len(found) == 2), found
                    case CommitWeights():
                        self._regions.commit_weights(request.key)
                        return Attached(), []
            except AnchorError as error:
                return AttachRefused(str(error)), []

    def _attach(self, request: AttachMemory) -> tuple[Answer, list[int]]:
        instance = instance_of(request)
        if instance not in self._instances:
            allowed = ", ".join(self._instances)
            raise AnchorError(f"{instance!r} is not on this node; allowed: {allowed}")
        generation, is_new, fds = self._regions.attach(
            instance, request.epoch, request.kind, request.sizes
        )
        log.info(
            "memory attached",
            extra={"instance": instance, "generation": generation, "is_new": is_new},
        )
        return Attached(generation, is_new), fds
