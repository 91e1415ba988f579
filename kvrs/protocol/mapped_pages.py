"""The payload of MAPPED: files, offsets and checksums of pages in shared memory of this host.

Descriptors of files come with the answer that names them first; files have numbers in the order in
which their descriptors came over a connection, from 0 on.
"""

import struct
from collections.abc import Sequence

import msgspec

from kvrs.errors import TransferError

MAX_FILES = 128  # Files of one connection; the kernel passes at most 253 descriptors at a time.

_HEAD = struct.Struct("!I")  # Number of new files.
_FILE = struct.Struct("!Q")  # Bytes of the file.
_PLACE = struct.Struct("!IQQ")  # Number of the file, offset, checksum of the page.

FILE_BYTES = _HEAD.size + _FILE.size
PLACE_BYTES = _PLACE.size


# Number of the file, offset in it, and the page's checksum at its storing. A tuple, since an answer
# has thousands.
PlacedPage = tuple[int, int, int]


class MappedPages(msgspec.Struct, frozen=True):
    """`new_files`: the sizes in bytes of the files whose descriptors come with this answer."""

    new_files: tuple[int, ...]
    pages: tuple[PlacedPage, ...]

    def encode(self) -> bytes:
        assert len(self.new_files) <= MAX_FILES, f"{len(self.new_files)} files in one answer"
        files = [_FILE.pack(size_bytes) for size_bytes in self.new_files]
        places = [_PLACE.pack(*page) for page in self.pages]
        return b"".join((_HEAD.pack(len(self.new_files)), *files, *places))


def decode_mapped(payload: bytes, pages: int) -> MappedPages:
    """Decode an answer of `pages` pages.

    Raises:
        TransferError: wrong length, or too many files.
    """
    count = _HEAD.unpack_from(payload)[0] if len(payload) >= _HEAD.size else 0
    files_end = _HEAD.size + count * _FILE.size
    if count > MAX_FILES or len(payload) != files_end + pages * _PLACE.size:
        raise TransferError(
            f"MAPPED of {len(payload)} bytes with {count} files and {pages} pages, allowed: "
            f"{MAX_FILES} files, and as many bytes as they take"
        )
    sizes = struct.unpack_from(f"!{count}Q", payload, _HEAD.size)
    places = _PLACE.iter_unpack(payload[files_end:])
    return MappedPages(sizes, tuple(places))


def check_files(sizes: Sequence[int], found: Sequence[int]) -> None:
    """Compare the sizes that were announced with the sizes of the files behind the descriptors.

    Raises:
        TransferError: they differ.
    """
    if list(sizes) != list(found):
        raise TransferError(f"MAPPED names files of {list(sizes)} bytes, but sends {list(found)}")


def check_place(page: PlacedPage, page_bytes: int, files: Sequence[int]) -> None:
    """Check that a page lies within its file; `files` has the sizes of all files of the connection.

    Raises:
        TransferError: the page does not lie within one of them.
    """
    file, offset, _ = page
    if file >= len(files) or offset + page_bytes > files[file]:
        size = f"of {files[file]} bytes" if file < len(files) else "that never came"
        raise TransferError(
            f"MAPPED places a page of {page_bytes} bytes at {offset} of file {file}, {size}"
        )
