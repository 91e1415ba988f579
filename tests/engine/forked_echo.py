"""A nursery of processes that send the id of their parent, and stay until their line closes or
brings a word.
"""

import os
import socket
import sys
from typing import NoReturn

from kvrs.engine.nursery import tend


def echo(line: socket.socket) -> NoReturn:
    line.send(str(os.getppid()).encode())
    line.recv(1)
    os._exit(0)


if __name__ == "__main__":
    _, _, parent, _, descriptor = sys.argv
    with socket.socket(fileno=int(descriptor)) as line:
        tend(int(parent), line, echo)
