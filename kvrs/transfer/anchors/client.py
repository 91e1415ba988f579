"""The side of a process that attaches memory of its node's agent."""

import os
import secrets
import socket
import time
from pathlib import Path

from kvrs.ids import InstanceId
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
    decode_answer,
    encode_request,
)
from kvrs.transfer.shared_memory.passing import close_all, connect_in, receive

_TIMEOUT_S = 120.0  # Memory of many GB is cleared before it is handed out.
_LOOK_S = 0.02
_MAX_FDS = 2


class NoAgentError(AnchorError):
    """There is no agent, or it ended."""


class AnchorClient:
    """Asks the agent whose directory is given. Every method blocks."""

    def __init__(self, directory: Path, secret: bytes, wait_s: float) -> None:
        self._directory = directory
        self._key = anchor_key(secret)
        self._wait_s = wait_s

    def memory(self, instance: InstanceId, epoch: int, kind: str, size: int) -> tuple[bool, int]:
        """Attach the instance's memory: whether it is new, and a descriptor of its ledger and
        pages, which are in use as long as it is open or mapped.

        Raises:
            NoAgentError: there is none.
            AnchorError: it refuses.
        """
        answer, fds = self._ask(AttachMemory(instance, epoch, kind, size))
        (fd,) = _checked(fds, 1, size)
        return answer.is_new, fd

    def weights(self, key: str, size: int) -> tuple[int, int | None]:
        """Descriptors to read the arena, in use as long as this one is open, and to write it where
        it is new; waits for another process that writes it. Raises as `memory` does.
        """
        give_up_s = time.monotonic() + _TIMEOUT_S
        while True:
            answer, fds = self._ask(AttachWeights(key, size))
            if not answer.is_busy:
                break
            if time.monotonic() > give_up_s:
                raise AnchorError("another process writes the weights and does not end")
            time.sleep(_LOOK_S)
        fd, *to_write = _checked(fds, 1 + answer.is_new, size)
        return fd, to_write[0] if to_write else None

    def commit(self, key: str) -> None:
        """The arena is whole; what writes it is unmapped and closed, what reads it still open.
        Raises as `memory` does.
        """
        self._ask(CommitWeights(key))

    def _ask(self, request: Request) -> tuple[AnchorAnswer, list[int]]:
        give_up_s = time.monotonic() + self._wait_s
        while True:
            try:
                return self._ask_once(request)
            except OSError as error:
                # It starts, or is started again.
                if time.monotonic() > give_up_s:
                    raise NoAgentError(f"{self._directory}: {error.strerror or error}") from None
            time.sleep(_LOOK_S)

    def _ask_once(self, request: Request) -> tuple[AnchorAnswer, list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_TIMEOUT_S)
            connect_in(self._directory, SOCKET, connection)
            server_nonce = connection.recv(NONCE_BYTES)
            if len(server_nonce) != NONCE_BYTES:
                raise ConnectionResetError("it ends")
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.send(encode_request(self._key, server_nonce, nonce, request))
            message, fds = bytearray(MAX_MESSAGE_BYTES), list[int]()
            try:
                size = receive(connection, message, fds, _MAX_FDS)
                if not size:
                    raise ConnectionResetError("the agent ended, or refuses this process")
                answer = decode_answer(self._key, server_nonce, nonce, bytes(message[:size]))
                # The agent closes its copies of the descriptors before the connection. While it
                # has one, it takes the memory for used, and weights for writable.
                connection.recv(1)
            except BaseException:
                close_all(fds)
                raise
            return answer, fds


def _checked(fds: list[int], count: int, size: int) -> list[int]:
    """Descriptors of files of that size, which is compared before anything is mapped."""
    if [os.fstat(fd).st_size for fd in fds] != count * [size]:
        close_all(fds)
        raise AnchorError("the agent's memory has another size than was requested")
    return fds
