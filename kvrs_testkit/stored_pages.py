"""Damage to the pages that a running agent has stored."""

import random
from pathlib import Path

from kvrs.config.file import Config
from kvrs.ids import NodeId
from kvrs.protocol.frames import checksum
from kvrs.transfer.store.directory import StoreDirectory, store_directory
from kvrs.transfer.store.segments import Segments, SlotLayout


class _OpenedDirectory(StoreDirectory):
    """The directory of an agent that runs, which has the lock."""

    def _claim(self, fd: int) -> None:
        """Take no lock."""


def flip_bits(
    config: Config, secret: bytes, node: NodeId, share: float, choose: random.Random
) -> int:
    """Flip a bit in this share of the pages; return in how many. Their checksums are wrong then."""
    with _opened(config, secret, node) as directory:
        segments = _segments(directory, config)
        pages = [slot for slot, _ in segments.adopt() if choose.random() < share]
        for slot in pages:
            page = segments.view(slot)
            page[choose.randrange(len(page))] ^= 1 << choose.randrange(8)
    return len(pages)


def negate(config: Config, secret: bytes, node: NodeId) -> int:
    """Negate all numbers of all pages, with right checksums; return of how many. The numbers are
    float32.
    """
    with _opened(config, secret, node) as directory:
        segments = _segments(directory, config)
        pages = segments.adopt()
        for slot, tag in pages:
            page = segments.view(slot)
            page[3::4] = bytes(byte ^ 0x80 for byte in page[3::4])
            segments.write_record(slot, tag, checksum(page))
    return len(pages)


def _opened(config: Config, secret: bytes, node: NodeId) -> _OpenedDirectory:
    return _OpenedDirectory(Path(store_directory(config.backup.directory, secret, node)))


def _segments(directory: StoreDirectory, config: Config) -> Segments:
    state = directory.load_state()
    assert state is not None, "the agent has stored nothing"
    slots = config.backup.capacity_bytes // state.page_bytes
    layout = SlotLayout(state.page_bytes, slots, state.fingerprint, state.page_cells)
    return Segments(directory, layout)
