"""An engine that does nothing but write rows, as a process: its memory, ledger and link are those
of the product, and each row says by its bytes which key it holds.

`python -m kvrs_testkit.row_engine DIRECTORY SECRET NAMESPACE ROWS ROW_BYTES [AGENT]` writes until
it is ended.
"""

import os
import random
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvrs.protocol.rows import RegionInfo
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.rows.client import RegionLink
from kvrs.transfer.rows.connections import dial_unix
from kvrs.transfer.rows.ledger import RowLedger

KEY_BYTES = 36
AGENT = "agent"
DIAL_S = 5.0
NO_FIELDS: Mapping[str, Any] = {}


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "little").ljust(KEY_BYTES, b"k")


def row_of(key: bytes, row_bytes: int) -> bytes:
    return (key[:8] * (row_bytes // 8 + 1))[:row_bytes]


class RowEngine:
    """Rows, a ledger of them, and a link to the agent."""

    def __init__(
        self,
        directory: str,
        secret: bytes,
        namespace: bytes,
        rows: int,
        row_bytes: int,
        fields: Mapping[str, Any] = NO_FIELDS,
        model: str = "tiny",
        agent: str = AGENT,
    ) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        self.memory = os.memfd_create("rows")
        os.ftruncate(self.memory, rows * row_bytes)
        self.ledger = RowLedger(rows, row_bytes)
        name = f"engine {os.getpid()}"
        info = RegionInfo(name, namespace, rows, row_bytes, {**fields}, model, 16)
        key = scoped_key(secret, Scope.ROWS, agent)
        dial = partial(dial_unix, Path(directory), DIAL_S)
        self.link = RegionLink(info, self.memory, self.ledger, dial, key)

    def write(self, row: int, number: int, pieces: int = 1) -> None:
        """Put a key into a row, as an engine does: the copy takes a while."""
        key = key_of(number)
        self.ledger.writing(row)
        data, size = row_of(key, self.row_bytes), self.row_bytes // pieces
        for at in range(0, self.row_bytes, size):
            os.pwrite(self.memory, data[at : at + size], row * self.row_bytes + at)
        self.ledger.holds(row, key)

    def spoil(self, row: int) -> None:
        """Flip a bit of a row, which the ledger does not know of."""
        at = row * self.row_bytes + 5
        (byte,) = os.pread(self.memory, 1, at)
        os.pwrite(self.memory, bytes((byte ^ 1,)), at)


def main() -> None:
    directory, secret, namespace, rows, row_bytes, *agent = sys.argv[1:]
    engine = RowEngine(
        directory,
        bytes.fromhex(secret),
        bytes.fromhex(namespace),
        int(rows),
        int(row_bytes),
        agent=agent[0] if agent else AGENT,
    )
    engine.link.start()
    draw = random.Random(os.getpid())
    print("writing", flush=True)
    for number in range(1, sys.maxsize):
        engine.write(draw.randrange(engine.rows), number % 997 + 1, pieces=8)
    threading.Event().wait()


if __name__ == "__main__":
    main()
