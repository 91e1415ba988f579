"""Damage to pages that a running agent has stored, or owns the memory of."""

import math
import os
import struct
from pathlib import Path

from kvrs.config.file import Config
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.frames import checksum
from kvrs.transfer.store.directory import StoreDirectory, store_directory
from kvrs.transfer.store.host import Slab

_NAN = struct.pack("<f", math.nan)


class _OpenedDirectory(StoreDirectory):
    """The directory of an agent that runs, which has the lock."""

    def _claim(self, fd: int) -> None:
        """Take no lock."""


def poison(config: Config, secret: bytes, node: NodeId) -> int:
    """Make all numbers of all pages NaN, with right checksums; return of how many. The numbers
    are float32.
    """
    with _opened(config, secret, node) as directory:
        slab = _slab(directory, config)
        pages = slab.adopt()
        for slot, tag in pages:
            page = slab.view(slot)
            page[:] = _NAN * (len(page) // 4)
            slab.write_record(slot, tag, checksum(page))
    return len(pages)


def poison_memory(config: Config, secret: bytes, node: NodeId, instance: InstanceId) -> None:
    """Make all numbers NaN in all pages of an instance that has them in the agent's memory."""
    path = Path(store_directory(config.backup.directory, secret, node)) / f"memory-{instance}"
    with _opened(config, secret, node) as directory:
        page_bytes = _slab(directory, config).kind.page_bytes
    pages = config.cluster.engine.pages
    with path.open("r+b") as memory:
        # Behind the pages is one that is always zero.
        memory.seek(-(pages + 1) * page_bytes, os.SEEK_END)
        memory.write(_NAN * (pages * page_bytes // 4))


def _opened(config: Config, secret: bytes, node: NodeId) -> _OpenedDirectory:
    return _OpenedDirectory(Path(store_directory(config.backup.directory, secret, node)))


def _slab(directory: StoreDirectory, config: Config) -> Slab:
    slab = Slab.open(directory, config.backup.capacity_bytes)
    assert slab is not None, "the agent has stored nothing"
    return slab
