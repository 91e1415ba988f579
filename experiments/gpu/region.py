"""Host memory of an engine that another process holds, and serves over sockets: stands for the
agent of a node, without its proofs and questions, so that what is measured is the bytes.

    python -m experiments.gpu.region FD SIZE_BYTES

The memory is a memfd. The first line on stdout is the port, on loopback; a question is the first
byte and the number of bytes, and the answer is those bytes.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

import numpy as np

ASK = struct.Struct("!QQ")
ROOT = Path(__file__).parent.parent.parent


def filled(size_bytes: int, seed: int) -> tuple[int, mmap]:
    """A memfd with random bytes, all of it in memory, and its map."""
    fd = os.memfd_create("region")
    os.ftruncate(fd, size_bytes)
    memory = mmap(fd, size_bytes)
    random = np.random.default_rng(seed)
    view = np.frombuffer(memory, np.uint8)
    for first in range(0, size_bytes, 1 << 26):
        part = view[first : first + (1 << 26)]
        part[:] = random.integers(0, 256, len(part), np.uint8)
    return fd, memory


@contextmanager
def served(fd: int, size_bytes: int) -> Iterator[int]:
    """The port of a process that serves the memory."""
    command = [sys.executable, "-m", "experiments.gpu.region", str(fd), str(size_bytes)]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, pass_fds=[fd], cwd=ROOT, text=True
    )
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline())
    finally:
        server.kill()
        server.communicate()


def main() -> None:
    fd, size_bytes = map(int, sys.argv[1:])
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener, fd, size_bytes), daemon=True).start()
    sys.stdin.read()  # Its end is that of the parent.


def _accept(listener: socket.socket, fd: int, size_bytes: int) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, fd, size_bytes), daemon=True).start()


def _serve(connection: socket.socket, fd: int, size_bytes: int) -> None:
    with connection:
        while len(asked := connection.recv(ASK.size, socket.MSG_WAITALL)) == ASK.size:
            first, left = ASK.unpack(asked)
            if first + left > size_bytes:
                return
            while left:
                sent = os.sendfile(connection.fileno(), fd, first, left)
                first, left = first + sent, left - sent


if __name__ == "__main__":
    main()
