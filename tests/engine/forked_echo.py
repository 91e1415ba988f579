"""A nursery of processes that stay until their line closes or brings a word: children of a process,
which send its id, or with 0 for it the nursery's own, which send theirs.
"""

import os
import socket
import sys
from typing import NoReturn

from kvrs.engine.forking import tend, tend_for


def echo(line: socket.socket) -> NoReturn:
    line.send(str(os.getpid() if parent == 0 else os.getppid()).encode())
    line.recv(1)
    os._exit(0)


parent = int(sys.argv[1])
if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[-1])) as line:
        if parent == 0:
            tend(line, echo)
        else:
            tend_for(parent, line, echo)
