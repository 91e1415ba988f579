"""Messages of the page port: requests for pages, checkpoints on offer, and the answers.

`frames.py` encodes and decodes them.
"""

from dataclasses import dataclass
from enum import IntEnum

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.parts import PagePart
from kvrs.protocol.tags import Tag


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
