"""A process of an instance that computes batches until it cannot, as `python -m
tests.engine.ranks.old_head CONFIG EPOCH`; it writes a line for each, and then why it ends. It waits
for hosts that it loses, as an instance does.
"""

import sys
from pathlib import Path

from kvrs.config.file import load_config
from kvrs.errors import KvrsError, RanksLostError
from kvrs_engine.scheduling.sequences import Chunk
from tests.engine.ranks.on_nodes import head_of


def main() -> None:
    head = head_of(load_config(Path(sys.argv[1])), epoch=int(sys.argv[2]))
    chunk = Chunk(list(range(1, 40)), 0, range(20, 30), logits=1)
    for stage in head.remote:
        stage.on_cells = lambda loss: None
    try:
        while True:
            try:
                head.execute([chunk])
            except RanksLostError:
                head.on_lost()
            else:
                print("computed", flush=True)
    except KvrsError as error:
        print(error, flush=True)
    finally:
        head.close()


if __name__ == "__main__":
    main()
