"""Messages of the page port: requests for pages, checkpoints on offer, and the answers.

`frames.py` encodes and decodes them.
"""

from dataclasses import dataclass
from enum import IntEnum

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.parts import PagePart
from kvrs.protocol.tags import Tag


class TrafficClass(IntEnum):
    """Priority on a link: the lower goes first. A recovering stream was cut between two tokens; a
    handed-off stream has sent none yet.
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
    FULL = 2  # No room to reserve the stream's largest size.


@dataclass(frozen=True, slots=True)
class Identity:
    """One end of a connection. Pages move only between equal fingerprints, page sizes and cells."""

    instance: InstanceId
    node: NodeId
    epoch: int
    fingerprint: str
    page_bytes: int
    page_cells: int = 1  # Number of equal cells per page; any rectangle of cells can be requested.


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A request for pages by tag, in order, then optionally page `tail_index` of the history
    retained for the hand-off `handoff`. `part`: only these cells of each page.
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
    """The writer of a stream's checkpoint; the highest (owner_epoch, attempt) is valid."""

    stream: StreamId
    owner_epoch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class OfferFrame:
    """A request to reserve room for a whole stream. `tags` has all its full pages so far, from page
    0.
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
