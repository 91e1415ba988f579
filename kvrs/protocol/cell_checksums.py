"""Checksums of the cells of a page, by which part of a stored page is checked without reading the
rest.
"""

from xxhash import xxh3_64_digest

from kvrs.protocol.frames import Bytes, checksum
from kvrs.protocol.parts import PagePart


def cell_checksums(guarded: Bytes, cells: int) -> bytes:
    """Return the `checksum` (8 bytes) of each of the `cells` equal runs of bytes of a page, joined
    in order.
    """
    view = memoryview(guarded)
    size = len(view) // cells
    starts = range(0, len(view), size)
    return b"".join([xxh3_64_digest(view[start : start + size]) for start in starts])


def part_checksum(checksums: Bytes) -> int:
    """Return the checksum of a part of a page, given the joined checksums of its cells, by layer
    and then by head.
    """
    return checksum(checksums)


def checksum_of(sent: Bytes, part: PagePart | None) -> int:
    """Return the checksum for the bytes that are sent of a page: the page's own (`part` is None),
    or that of a part, computed from its cells.
    """
    if part is None:
        return checksum(sent)
    return part_checksum(cell_checksums(sent, part.part.cells))
