"""The payload of MAPPED: where pages lie in a file of this host.

A descriptor of the file comes with the first answer of a connection.
"""

import struct
from collections.abc import Sequence

import msgspec

from kvrs.errors import TransferError

_HEAD = struct.Struct("!Q")  # size of the file in bytes; 0: its descriptor came before
_PLACE = struct.Struct("!QQ")  # offset of a page in the file, checksum of the page

HEAD_BYTES, PLACE_BYTES = _HEAD.size, _PLACE.size


# The offset of a page in the file, and the checksum computed when the page was stored. A tuple
# costs less than an object of a class, and an answer has thousands.
PlacedPage = tuple[int, int]


class MappedPages(msgspec.Struct, frozen=True):
    """Places of pages in a file. `file_bytes`: size of the file whose descriptor comes with this
    answer; 0: the descriptor came with an earlier answer.
    """

    file_bytes: int
    pages: tuple[PlacedPage, ...]

    def encode(self) -> bytes:
        places = [_PLACE.pack(*page) for page in self.pages]
        return b"".join((_HEAD.pack(self.file_bytes), *places))


def decode_mapped(payload: bytes, pages: int) -> MappedPages:
    """Decode a MAPPED answer with the places of `pages` pages. Raises TransferError: the payload
    has another length.
    """
    if len(payload) != _HEAD.size + pages * _PLACE.size:
        raise TransferError(f"MAPPED of {len(payload)} bytes for {pages} pages")
    (file_bytes,) = _HEAD.unpack_from(payload)
    return MappedPages(file_bytes, tuple(_PLACE.iter_unpack(payload[_HEAD.size :])))


def check_file(file_bytes: int, found: Sequence[int]) -> None:
    """Check that the announced size equals the size of the one file whose descriptor came with the
    answer.

    Raises:
        TransferError: they differ.
    """
    if list(found) != ([file_bytes] if file_bytes else []):
        raise TransferError(f"MAPPED names {file_bytes} bytes, but sends files of {list(found)}")


def check_place(page: PlacedPage, page_bytes: int, file_bytes: int) -> None:
    """Check that a page lies within the file. Raises TransferError: it does not."""
    offset, _ = page
    if offset + page_bytes > file_bytes:
        raise TransferError(
            f"MAPPED places a page of {page_bytes} bytes at {offset} of {file_bytes}"
        )
