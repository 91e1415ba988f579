"""The side of a process that attaches memory of its node's agent."""

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from kvrs.ids import InstanceId
from kvrs.transfer.anchors.messages import (
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    SOCKET,
    AnchorError,
    Answer,
    AttachBusy,
    Attached,
    AttachMemory,
    AttachWeights,
    CommitWeights,
    Request,
    anchor_key,
    decode_answer,
    encode_request,
)
from kvrs.transfer.unix_sockets import connect_in

_TIMEOUT_S = 120.0  # Memory of many GB is cleared before it is handed out.
_LOOK_S = 0.02
_MAX_FDS = 65


class NoAgentError(AnchorError):
    """There is no agent, or it ended."""


class AnchorClient:
    """Asks the agent whose directory is given. Every method blocks."""

    def __init__(self, directory: Path, secret: bytes, wait_s: float) -> None:
        self._directory = directory
        self._key = anchor_key(secret)
        self._wait_s = wait_s

    def memory(
        self, instance: InstanceId, epoch: int, kind: str, sizes: list[int]
    ) -> tuple[bool, list[int]]:
        """Attach the instance's memory: whether it is new, and descriptors of its ledger and its
        pools, which are in use as long as they are open.

        Raises:
            NoAgentError: there is none.
            AnchorError: it refuses.
        """
        answer, fds = self._ask(AttachMemory(instance, epoch, kind, sizes))
        assert isinstance(answer, Attached)
        if [os.fstat(fd).st_size for fd in fds] != sizes:
            _close(fds)
            raise AnchorError("the agent's memory has other sizes than were requested")
        return answer.is_new, fds

    def weights(self, key: str, size: int) -> tuple[int, int | None]:
        """Descriptors to read the arena, in use as long as this one is open, and to write it where
        it is new; waits for another process that writes it. Raises as `memory` does.
        """
        give_up_s = time.monotonic() + _TIMEOUT_S
        while True:
            answer, fds = self._ask(AttachWeights(key, size))
            if isinstance(answer, Attached):
                break
            if time.monotonic() > give_up_s:
                raise AnchorError("another process writes the weights and does not end")
            time.sleep(_LOOK_S)
        if len(fds) != 1 + answer.is_new or any(os.fstat(fd).st_size != size for fd in fds):
            _close(fds)
            raise AnchorError("the agent's memory has another size than was requested")
        return fds[0], fds[1] if answer.is_new else None

    def commit(self, key: str) -> None:
        """The arena is whole; what writes it is unmapped and closed, what reads it still open.
        Raises as `memory` does.
        """
        self._ask(CommitWeights(key))

    def _ask(self, request: Request) -> tuple[Attached | AttachBusy, list[int]]:
        give_up_s = time.monotonic() + self._wait_s
        while True:
            try:
                return self._ask_once(request)
            except OSError as error:
                # It starts, or is started again.
                if time.monotonic() > give_up_s:
                    raise NoAgentError(f"{self._directory}: {error.strerror or error}") from None
            time.sleep(_LOOK_S)

    def _ask_once(self, request: Request) -> tuple[Attached | AttachBusy, list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_TIMEOUT_S)
            connect_in(self._directory, SOCKET, connection)
            server_nonce = connection.recv(NONCE_BYTES)
            if len(server_nonce) != NONCE_BYTES:
                raise ConnectionResetError("it ends")
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.send(encode_request(self._key, server_nonce, nonce, request))
            message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, _MAX_FDS)
            try:
                if not message:
                    raise ConnectionResetError("the agent ended, or refuses this process")
                answer: Answer = decode_answer(self._key, server_nonce, nonce, message)
                assert isinstance(answer, Attached | AttachBusy)
                # The agent closes its copies of the descriptors before the connection. While it
                # has one, it takes the memory for used, and weights for writable.
                connection.recv(1)
            except BaseException:
                _close(fds)
                raise
            for fd in fds:
                os.set_inheritable(fd, False)
            return answer, fds


def _close(fds: list[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
