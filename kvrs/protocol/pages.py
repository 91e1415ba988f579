"""Pages of KV on the wire: their content addresses, the rectangles of cells that a process
holds, and the messages about them.

Content addresses of KV pages.

A tag is a hash of *all* token ids up to the end of its page, chained page by page from a root that
names the model, its adapter and the tenant. Two equal tags therefore mean bit-equal KV, wherever
the page lies and whichever engine computed it: the same identity serves the prefix cache, KV
retained at prefill, checkpoints and restore.

Rectangles of (layers, KV heads): the cells of a page that a process holds, or that two processes
share.

The payload of MAPPED: where pages lie in a file of this host.

A descriptor of the file comes with the first answer of a connection.

Messages of the page port: requests for pages, checkpoints on offer, and the answers.

`frames.py` encodes and decodes them.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from itertools import groupby
from typing import NewType

import msgspec

from kvrs.errors import TransferError
from kvrs.ids import InstanceId, NodeId, StreamId

Tag = NewType("Tag", bytes)

TAG_BYTES = 16
_WORD_BYTES = 8


def root_tag(fingerprint: str, salt: str = "") -> Tag:
    """Return the tag of the empty prefix, from which page tags are chained: one per model
    (`fingerprint`), tenant and adapter (`salt`).
    """
    return Tag(
        blake2b(
            salt.encode(), digest_size=TAG_BYTES, key=blake2b(fingerprint.encode()).digest()
        ).digest()
    )


def salt_of(cache_salt: str, adapter: str) -> str:
    """Return the salt of a request's pages, which contains the adapter, because an adapter changes
    the KV of equal tokens. An alias of a model changes nothing.
    """
    if not adapter:
        return cache_salt
    key = blake2b(adapter.encode()).digest()
    return blake2b(cache_salt.encode(), digest_size=TAG_BYTES, key=key).hexdigest()


def page_tags(root: Tag, token_ids: Sequence[int], page_size_tokens: int) -> list[Tag]:
    """Return the tags of the full pages of `token_ids`, in order; a partial last page has
    no tag.
    """
    tags: list[Tag] = []
    words, size_bytes, parent = _words(token_ids), page_size_tokens * _WORD_BYTES, root
    for end in range(size_bytes, len(words) + 1, size_bytes):
        parent = _hashed(parent, words[end - size_bytes : end])
        tags.append(parent)
    return tags


def _words(token_ids: Sequence[int]) -> bytes:
    # Token ids have a fixed width in the hash's input, so different pages never have equal bytes.
    return array("Q", token_ids).tobytes()


def _hashed(parent: Tag, words: bytes) -> Tag:
    return Tag(blake2b(words, digest_size=TAG_BYTES, key=parent).digest())


Cell = tuple[int, int]  # A cell by its layer and its KV head.


class Part(msgspec.Struct, frozen=True):
    """A non-empty range of layers and of KV heads."""

    layers: range
    heads: range

    @property
    def cells(self) -> int:
        return len(self.layers) * len(self.heads)

    def shared(self, other: "Part") -> "Part | None":
        layers, heads = _overlap(self.layers, other.layers), _overlap(self.heads, other.heads)
        return Part(layers, heads) if layers and heads else None

    def local(self, part: "Part") -> tuple[slice, slice]:
        """Return the layers and heads of another part as slices of this part's memory `[layers,
        heads, ...]`.
        """
        return (
            slice(part.layers.start - self.layers.start, part.layers.stop - self.layers.start),
            slice(part.heads.start - self.heads.start, part.heads.stop - self.heads.start),
        )


class PagePart(msgspec.Struct, frozen=True):
    """A part of pages that have `layers` times `heads` equal cells, laid out as in `KvGeometry`."""

    layers: int
    heads: int
    part: Part

    @property
    def page_cells(self) -> int:
        return self.layers * self.heads

    def bytes_of(self, page_bytes: int) -> int:
        """Return the number of the part's bytes in one page of `page_bytes` bytes."""
        return page_bytes // self.page_cells * self.part.cells

    def runs(self, page: memoryview) -> Sequence[memoryview]:
        """Return the slices of a page that the part covers: one per layer, or a single one if the
        part has all heads.
        """
        layers, heads = self.part.layers, self.part.heads
        cell = page.nbytes // self.page_cells
        if len(heads) == self.heads:
            row = cell * self.heads
            return [page[layers.start * row : layers.stop * row]]
        starts = [(layer * self.heads + heads.start) * cell for layer in layers]
        return [page[start : start + len(heads) * cell] for start in starts]


def rectangles(cells: Iterable[Cell]) -> list[Part]:
    """Return disjoint parts that together cover exactly these cells: consecutive layers with the
    same run of heads form one part.
    """
    heads: dict[int, list[int]] = {}
    for layer, head in sorted(set(cells)):
        heads.setdefault(layer, []).append(head)
    found: list[Part] = []
    # Runs of heads in the layer before, each with the layer where the run began.
    open_: dict[range, int] = {}
    for layer in range(min(heads, default=0), max(heads, default=-1) + 2):
        runs = _runs(heads.get(layer, []))
        found += [Part(range(first, layer), run) for run, first in open_.items() if run not in runs]
        open_ = {run: open_.get(run, layer) for run in runs}
    return found


def _runs(numbers: Sequence[int]) -> list[range]:
    """Split rising numbers into ranges of consecutive numbers."""
    places = groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    groups = [[number for _, number in group] for _, group in places]
    return [range(group[0], group[-1] + 1) for group in groups]


def _overlap(left: range, right: range) -> range:
    return range(max(left.start, right.start), min(left.stop, right.stop))


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


class TrafficClass(IntEnum):
    """Priority of a transfer on a link: a lower number goes first. A recovering stream goes before
    a handed-off stream, which has not sent its client a token yet.
    """

    RECOVERY = 0
    HANDOFF = 1
    CHECKPOINT = 2

    @property
    def label(self) -> str:
        return self.name.lower()


class StoreCode(IntEnum):
    """An agent's answer to an offer or a store."""

    OK = 0
    FENCED = 1  # A later owner or attempt writes this stream's checkpoint.
    FULL = 2  # The agent has no room for the largest size that the stream can reach.


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts by which one end of a connection introduces itself. Pages move only between equal
    fingerprints, page sizes and numbers of cells.
    """

    instance: InstanceId
    node: NodeId
    epoch: int
    fingerprint: str
    page_bytes: int
    page_cells: int = 1  # Number of equal cells per page; any rectangle of cells can be requested.


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A request for the pages of `tags`, in order, and then optionally for page `tail_index` of the
    hand-off `handoff`. `part`: only these cells of each page; None: whole pages.
    """

    tags: tuple[Tag, ...]
    handoff: StreamId | None = None
    tail_index: int | None = None
    traffic: TrafficClass = TrafficClass.HANDOFF
    part: PagePart | None = None

    def __post_init__(self) -> None:
        assert self.tail_index is None or self.handoff is not None, (
            "a tail page belongs to a hand-off"
        )


@dataclass(frozen=True, slots=True)
class PullFrame:
    request_id: int
    request: PullRequest


@dataclass(frozen=True, slots=True)
class ProbeFrame:
    request_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointClaim:
    """The attempt that writes a stream's checkpoint; an agent accepts only the highest
    (owner_epoch, attempt).
    """

    stream: StreamId
    owner_epoch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class OfferFrame:
    """A request to reserve room for a whole stream. `tags` names all full pages that the stream has
    so far, from page 0 on.
    """

    request_id: int
    claim: CheckpointClaim
    reserved_bytes: int
    tags: tuple[Tag, ...]


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Pages `[first_page, first_page + len(tags))` of a stream, at least one; `checksums[i]` guards
    the page of `tags[i]`.
    """

    claim: CheckpointClaim
    first_page: int
    tags: tuple[Tag, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoreFrame:
    request_id: int
    ranges: tuple[StoredRange, ...]


@dataclass(frozen=True, slots=True)
class HeldPages:
    """The answer to an offer, or to one range of a store: the number of the stream's leading pages
    that the agent has.
    """

    code: StoreCode
    pages: int

    def taken(self, first_page: int, pages: int) -> int:
        """Number of the `pages` pages from `first_page` that the agent now has; 0 if a later
        attempt writes the stream.
        """
        if self.code is StoreCode.FENCED:
            return 0
        return min(max(0, self.pages - first_page), pages)
