"""A nursery of processes that write their name, send the id of their parent, and stay until their
line closes or brings a word. With `--host` it is a process that has such children, of a nursery
forked from itself, and sends the ids of the nursery and of each child: of two of the first nursery,
which it ends then, and of one of the next nursery.
"""

import os
import socket
import sys
from contextlib import ExitStack
from typing import NoReturn

from kvrs_engine.engine.nursery import Nursery, tend


def echo(line: socket.socket, name: str) -> NoReturn:
    print(name, flush=True)
    line.send(str(os.getppid()).encode())
    line.recv(1)
    os._exit(0)


def be_host(line: socket.socket) -> None:
    nursery = Nursery(["tests.engine.forked_echo"])
    nursery.begin_here(echo, line)
    assert nursery._process is not None
    with ExitStack() as lines:
        for number in range(3):
            if number == 2:
                nursery._process.kill()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            lines.enter_context(ours)
            with theirs:
                child = nursery.fork(theirs, "echo")
            assert ours.recv(100) == str(os.getpid()).encode()
            line.send(f"{nursery._process.pid} {child.pid}".encode())
        line.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "--host":
        with socket.socket(fileno=int(sys.argv[2])) as line:
            be_host(line)
    else:
        _, _, parent, _, descriptor = sys.argv
        with socket.socket(fileno=int(descriptor)) as line:
            tend(int(parent), line, echo)
