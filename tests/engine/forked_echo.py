"""A nursery of processes that send their parent's process id, and stay until their line closes."""

import os
import socket
import sys
from typing import NoReturn

from kvrs.engine.forking import tend_for


def echo(line: socket.socket) -> NoReturn:
    line.send(str(os.getppid()).encode())
    line.recv(1)
    os._exit(0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[-1])) as line:
        tend_for(int(sys.argv[1]), line, echo)
