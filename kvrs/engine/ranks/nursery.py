"""Makes the processes of an instance's ranks.

`python -m kvrs.engine.ranks.nursery PARENT --line FD` imports what a rank needs and forks, which
takes milliseconds. Each message on its line brings a descriptor, a new rank's end of its pair with
the instance. Ranks are children of the instance. The nursery ends when its line is closed, or with
the instance; its ranks do not need it.
"""

import argparse
import socket

import torch

from kvrs.engine.forking import tend_for
from kvrs.engine.ranks.rank import obey


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kvrs.engine.ranks.nursery", description=__doc__
    )
    parser.add_argument("parent", type=int)
    parser.add_argument("--line", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket(fileno=given.line) as line:
        tend_for(given.parent, line, obey)


if __name__ == "__main__":
    main()
