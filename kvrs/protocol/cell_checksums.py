"""Checksums of parts of pages: one of each cell, so that a part of what is stored is checked
without reading the rest.
"""

from xxhash import xxh3_64_digest

from kvrs.protocol.frames import Bytes, checksum
from kvrs.protocol.parts import PagePart


def cell_checksums(guarded: Bytes, cells: int) -> bytes:
    """The `checksum` of each of so many equal runs of bytes, one behind the other."""
    view = memoryview(guarded)
    size = len(view) // cells
    starts = range(0, len(view), size)
    return b"".join([xxh3_64_digest(view[start : start + size]) for start in starts])


def part_checksum(checksums: Bytes) -> int:
    """Checksum of a part, from those of its cells in order of layers, then heads."""
    return checksum(checksums)


def checksum_of(sent: Bytes, part: PagePart | None) -> int:
    """Checksum of a page, or of the part of one, as it is sent."""
    if part is None:
        return checksum(sent)
    return part_checksum(cell_checksums(sent, part.part.cells))
