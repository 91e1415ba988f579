"""The ranks of one stage, joined: all ranks come to a step, the leader computes it, and all ranks
leave together.

The ranks of GPUs would meet in NCCL. These ranks meet on sockets in the kernel's abstract
namespace, which need no file.
"""

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from distserve_patches.cpu.memory import Handle

_JOIN_TIMEOUT_S = 60.0
_RETRY_S = 0.02
_LONGEST_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")


def new_group_id() -> list[int]:
    """Make a group's id in place of an NCCL id, which is a list of numbers as well."""
    return list(secrets.token_bytes(16))


class Group:
    """One rank's view of the stage's ranks. The last pipeline stage's first rank leads, because
    upstream reads its result.
    """

    def __init__(self, group_id: list[int], parallel: list[int]) -> None:
        """Join, and wait until all ranks have joined.

        Raises:
            OSError: a rank did not connect.
        """
        tensor_size, tensor_rank, pipeline_size, pipeline_rank = parallel
        self.tensor_size, self.pipeline_size = tensor_size, pipeline_size
        self.rank = (pipeline_rank, tensor_rank)
        self.leads = self.rank == (pipeline_size - 1, 0)
        address = b"\0kvrs-distserve-" + bytes(group_id).hex().encode()
        others = tensor_size * pipeline_size - 1
        self._others: dict[tuple[int, int], socket.socket] = {}
        self._leader: socket.socket | None = None
        if not others:
            return
        if self.leads:
            self._accept(address, others)
        else:
            self._leader = _connect(address)
            _send(self._leader, self.rank)

    def _accept(self, address: bytes, others: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.settimeout(_JOIN_TIMEOUT_S)
            listener.bind(address)
            listener.listen(others)
            while len(self._others) < others:
                connection, _ = listener.accept()
                # Any process of this machine may connect to the address.
                credentials = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
                )
                if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                    connection.close()
                    continue
                connection.setblocking(True)
                pipeline_rank, tensor_rank = _receive(connection)
                self._others[pipeline_rank, tensor_rank] = connection

    def close(self) -> None:
        for other in (*self._others.values(), *([] if self._leader is None else [self._leader])):
            other.close()

    def caches(self, own: tuple[Handle, Handle]) -> dict[tuple[int, int], tuple[Handle, Handle]]:
        """The handles of all ranks' caches, by pipeline and tensor rank, for the leader; empty for
        other ranks.
        """
        if self._leader is not None:
            _send(self._leader, own)
            return {}
        return {self.rank: own, **{rank: _receive(other) for rank, other in self._others.items()}}

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let the leader enter when all ranks have come, and the others leave with the leader.

        A rank's access to its cache before or after a step is therefore before or after the step
        for all.

        Raises:
            OSError: a rank is gone.
        """
        if self._leader is not None:
            _send(self._leader, "here")
            _receive(self._leader)
            yield
            return
        try:
            for other in self._others.values():
                _receive(other)
            yield
        finally:
            for other in self._others.values():
                with contextlib.suppress(OSError):
                    _send(other, "done")


def _connect(address: bytes) -> socket.socket:
    deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)
        else:
            return connection


def _send(connection: socket.socket, message: object) -> None:
    connection.sendall(json.dumps(message).encode())


def _receive(connection: socket.socket) -> Any:
    if not (packet := connection.recv(_LONGEST_BYTES)):
        raise ConnectionResetError("a rank of the stage is gone")
    return json.loads(packet)
