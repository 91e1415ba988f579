"""The messages between the process of an instance and the host of a stage, and between hosts.

Connections have the hand-shake of page ports (`kvrs.transfer.handshake`) under a key of their own:
one for batches, one for pages, perhaps one for replicas, and from host to host one for parts of
these. The client begins each with `Begin`; that for batches opens a session (`sessions.py`), which
every further message of it names. A message is a header
(the sizes of message and payload), the message and its mac, then the payload and its mac. Sizes are
compared with bounds before memory is allocated for them, and a payload's only once the mac of its
message was checked.
"""

import asyncio
import hashlib
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from kvrs.config.engine import EngineSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.page_messages import TrafficClass
from kvrs.protocol.parts import Cell
from kvrs.protocol.secrets import derive
from kvrs.protocol.session import SESSION_MAC_BYTES
from kvrs.protocol.tags import TAG_BYTES, Tag
from kvrs.transfer.links import Sender, SendingLink
from kvrs.transfer.stream import SocketStream, StalledError
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.reformed import RanksNow
from kvrs_engine.engine.ranks.wire import WireChunk

VERSION = 5
_HEADER = struct.Struct("<IQ")
_MAX_MESSAGE_BYTES = 1 << 26
# Pages are sent in groups of about so many bytes, of one page at least.
_GROUP_BYTES = 1 << 22

_Tag = Annotated[Tag, msgspec.Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]

# Reports of a host that computes, in the time after which its ranks hang. That many in a row are
# missed before it counts as lost: on a busy machine it, or what awaits them, may stand still for a
# moment.
WORDS = 4


class StageChannel(StrEnum):
    BATCHES = "batches"
    PAGES = "pages"
    REPLICAS = "replicas"  # Orders to bring parts of pages to the host of another instance.
    PARTS = "parts"  # From such a host.


class LoanWanted(msgspec.Struct, frozen=True):
    """Pages of the stage that an instance would use, whose own host is lost."""

    pages: Annotated[int, msgspec.Meta(ge=1)]  # At most.
    least_pages: Annotated[int, msgspec.Meta(ge=1)]  # Fewer are of no use.
    # Share of the time in which its own host computed.
    busy: Annotated[float, msgspec.Meta(ge=0, le=1)]
    # Of its streams' full pages, those that are wanted most first: it would go on with what the
    # lender has of them.
    tags: list[_Tag] = []


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The answer is `StageReady` with a new session, where it is not for batches `PagesDone`."""

    version: int
    channel: StageChannel
    session: int = 0  # For pages and replicas: the one that is open.
    loan: LoanWanted | None = None  # For batches, of an instance that has not this stage.


class Ordered(msgspec.Struct, frozen=True):
    """An order, which the host obeys if it is of the session of its link."""

    session: int
    epoch: int


class ComputeStage(Ordered, frozen=True, tag="compute"):
    """Compute a batch. Its payload: the rows of the stage before. The answer is `StageComputed`,
    or `StageStopped` where ranks are lost or come no further for `limit_s`; until then the host
    sends `StageComputing`, `WORDS` times in `limit_s`.
    """

    batch: int
    chunks: list[WireChunk]
    limit_s: Annotated[float, msgspec.Meta(gt=0)]


class ReadPages(Ordered, frozen=True, tag="read"):
    """Send the stage's part of these pages, as payload of `PagesDone`."""

    pages: list[int]


class WritePages(Ordered, frozen=True, tag="write"):
    """Put the payload into the stage's part of these pages, or into some cells of it: the layers
    and KV heads [first, end). The answer is `PagesDone`.
    """

    pages: list[int]
    layers: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None


class EndRank(Ordered, frozen=True, tag="end"):
    """Kill a rank and drop its memory, a fault. `bases`: of each page. The answer is
    `CellsLost`.
    """

    rank: int
    bases: list[int]


class MoveRank(Ordered, frozen=True, tag="move"):
    """Let a rank leave on purpose, or have it back. The answer is `RankMoved`."""

    rank: int
    leaves: bool


class Mended(Ordered, frozen=True, tag="mended"):
    """On the link of batches: no book of the instance has pages any more that were there when cells
    were lost. There is no answer.
    """


class LendPages(Ordered, frozen=True, tag="lend"):
    """Answer to `LoanAsked`. The host says `PagesDone`, or `PagesLost` where it waits no more."""

    loan: int
    pages: list[int]
    tags: list[_Tag] = []  # Of what is in the first of them.
    # Pages whose part is copied into lent ones before: the owner goes on using them.
    copies: list[tuple[int, int]] = []


class RefuseLoan(Ordered, frozen=True, tag="refuse"):
    """Answer to `LoanAsked`, in place of `LendPages`."""

    loan: int
    reason: str


class PartsRange(msgspec.Struct, frozen=True):
    """Consecutive full pages of a stream, from that one on."""

    stream: StreamId
    first_page: Annotated[int, msgspec.Meta(ge=0)]
    tags: list[_Tag]


class BringParts(Ordered, frozen=True, tag="bring"):
    """Bring the stage's part of these pages to the host that another instance has of it, as far as
    they are not there. The answer is `PartsHeld` or `PartsRefused`.
    """

    to: InstanceId
    ranges: list[PartsRange]
    pages: list[int]  # Of all ranges, one after the other; none: it is only asked what is there.


class TakeParts(Ordered, frozen=True, tag="take"):
    """Answer to `PartsOffered`; its own answer is that to `LendPages`."""

    offer: int
    held: list[int]  # Leading pages of the stream of each range that have the stage's part.
    # Of each page of the ranges that into which it comes; `IS_HERE` or `NOT_TAKEN`.
    pages: list[int]


class RefuseParts(Ordered, frozen=True, tag="refuse-parts"):
    """Answer to `PartsOffered`, in place of `TakeParts`."""

    offer: int
    reason: str


IS_HERE, NOT_TAKEN = -1, -2

OwnerAnswer = LendPages | RefuseLoan | TakeParts | RefuseParts


class OfferParts(msgspec.Struct, frozen=True, tag="offer"):
    """From host to host: parts of these pages would come, or without `are_sent` it is only asked
    what is there. The answer is `PartsTaken` or `PartsRefused`.
    """

    ranges: list[PartsRange]
    are_sent: bool


class StoreParts(msgspec.Struct, frozen=True, tag="store"):
    """From host to host, behind `PartsTaken`: the payload has the parts of some of what is taken.
    The answer is `PartsHeld`.
    """

    places: list[int]  # Among all pages of the ranges.


ToStage = (
    Begin
    | ComputeStage
    | Mended
    | ReadPages
    | WritePages
    | EndRank
    | MoveRank
    | LendPages
    | RefuseLoan
    | BringParts
    | TakeParts
    | RefuseParts
    | OfferParts
    | StoreParts
)


class StageFacts(msgspec.Struct, frozen=True):
    """Facts about the weights of stages, which their ranks have loaded."""

    arithmetic: bytes
    hashes: dict[str, bytes]
    root: bytes | None  # That the node has noted beside the model's files.


class StageUse(msgspec.Struct, frozen=True):
    """Work and reads of a stage's ranks, as `kvrs.protocol.stages.StageInfo` has them."""

    host_pid: int
    session: int | None
    worked_s: float
    read_bytes: int


class StageReady(msgspec.Struct, frozen=True, tag="ready"):
    """Answer to `Begin` for batches."""

    session: int
    facts: StageFacts
    now: RanksNow  # Times in it count from this message.
    use: StageUse
    load_s: float  # How long the start of the ranks took.
    pages: list[int] | None = None  # Those that are lent; None: all that are not.
    tags: list[_Tag] = []  # Of what is in the first of them.


class StageComputing(msgspec.Struct, frozen=True, tag="computing"):
    """The stage is not lost, and has not computed this batch yet."""

    batch: int


class StageComputed(msgspec.Struct, frozen=True, tag="computed"):
    """Payload: rows behind the stage, or logits behind the last one."""

    batch: int
    use: StageUse


class StageStopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The batch is not computed, since ranks are lost; nor is any other before `StageServes`."""

    batch: int
    ranks: list[int]
    reason: str


class StageServes(msgspec.Struct, frozen=True, tag="serves"):
    """The ranks compute again; none of them computes an earlier batch any more."""


class StageChanged(msgspec.Struct, frozen=True, tag="changed"):
    """Something of the ranks is new. It comes at any time."""

    now: RanksNow  # Times in it count from this message.


class LoanAsked(msgspec.Struct, frozen=True, tag="asked"):
    """To the instance that has the stage: another one would use it. It comes at any time; until the
    answer that one waits.
    """

    loan: int
    borrower: InstanceId
    wanted: LoanWanted


class LoanOver(msgspec.Struct, frozen=True, tag="over"):
    """The borrower is gone, and nothing writes into its pages any more. It comes at any time."""

    loan: int


class PartsOffered(msgspec.Struct, frozen=True, tag="offered"):
    """To the instance that has the stage: `OfferParts` has come to its host. It comes at any time;
    until the answer the sender waits.
    """

    offer: int
    sender: InstanceId  # The host.
    ranges: list[PartsRange]
    are_sent: bool


class PartsOver(msgspec.Struct, frozen=True, tag="parts-over"):
    """Nothing of that offer is written any more. It comes at any time, once for each that was
    taken.
    """

    offer: int
    filled: list[int]  # Places of the pages that have the part.


class StageLost(msgspec.Struct, frozen=True, tag="lost"):
    """The stage has lost ranks and computes no more: the host ends."""

    ranks: list[int]
    reason: str


class StageRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The host does not serve this connection any more; what the other one did, and what is
    allowed.
    """

    reason: str


class PagesDone(msgspec.Struct, frozen=True, tag="done"):
    """A payload only after `ReadPages`."""


class PagesLost(msgspec.Struct, frozen=True, tag="gone"):
    """In place of `PagesDone`: cells of these pages are lost."""

    reason: str


class CellsLost(msgspec.Struct, frozen=True, tag="cells"):
    """Layer and KV head of each cell that is lost of a page, by its base."""

    cells: dict[int, list[Cell]]


class RankMoved(msgspec.Struct, frozen=True, tag="moved"):
    refused: str | None  # Why; None: it is carried out.


class PartsTaken(msgspec.Struct, frozen=True, tag="taken"):
    held: list[int]  # As of `TakeParts`.
    places: list[int]  # Those that are to come.


class PartsHeld(msgspec.Struct, frozen=True, tag="held"):
    held: list[int]  # As of `TakeParts`, with what has come.
    sent_bytes: int = 0


class PartsRefused(msgspec.Struct, frozen=True, tag="parts-refused"):
    """Nothing of an offer is taken, or nothing can be brought."""

    reason: str


FromStage = (
    StageReady
    | StageComputing
    | StageComputed
    | StageStopped
    | StageServes
    | StageChanged
    | LoanAsked
    | LoanOver
    | StageLost
    | StageRefused
    | PagesDone
    | PagesLost
    | CellsLost
    | RankMoved
    | PartsOffered
    | PartsOver
    | PartsTaken
    | PartsHeld
    | PartsRefused
)


def stage_key(secret: bytes) -> bytes:
    return derive(secret, b"kvrs-stages")


def facts_digest(config: ModelConfig, settings: EngineSettings, layout: Layout) -> str:
    """Equal at both ends exactly when they mean the same by a batch, a row and a page; in place of
    a fingerprint, which only all stages together have.
    """
    facts = [config, settings.model_dump(mode="json"), layout]
    encoded = msgspec.json.encode(facts, order="sorted")
    return hashlib.blake2b(encoded, digest_size=16, person=b"kvrs-stage").hexdigest()


def page_groups(pages: Sequence[int], page_bytes: int) -> list[range]:
    """Places of pages that are sent together."""
    count = max(1, _GROUP_BYTES // page_bytes)
    return [range(at, min(at + count, len(pages))) for at in range(0, len(pages), count)]


def max_page_payload(page_bytes: int) -> int:
    return max(_GROUP_BYTES, page_bytes)


class StageLink:
    """One end of a connection after its hand-shake. One task receives at a time."""

    def __init__(self, stream: SocketStream, kinds: Any, max_payload_bytes: int) -> None:
        """`kinds`: the messages that may come."""
        self.stream = stream
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._max_payload_bytes = max_payload_bytes
        self._sending = asyncio.Lock()
        self._sender: Callable[[], AbstractContextManager[SocketStream | Sender]]
        self._sender = lambda: nullcontext(stream)

    def limit(self, link: SendingLink, traffic: TrafficClass) -> None:
        """Send as one of the transfers of that class over the link to the other end's node."""
        self._sender = partial(link.sending, self.stream, traffic)

    async def send(self, message: ToStage | FromStage, payload: Tensor | None = None) -> None:
        """`payload`: of any kind of number, contiguous.

        Raises:
            TransferError: the connection is lost, or nothing is taken at the other end.
        """
        body = msgspec.msgpack.encode(message)
        data = b"" if payload is None else payload.view(-1).view(torch.uint8).numpy().data
        start = _HEADER.pack(len(body), len(data)) + body
        async with self._sending:
            seal = self.stream.session.seal
            with self._sender() as sender:
                await sender.send(start, seal(start))
                if data:
                    await sender.send(data, seal(data))

    async def receive(self, timeout_s: float | None = None) -> tuple[Any, Tensor]:
        """The next message, and its payload as bytes, perhaps none. Waits until it begins, without
        limit if there is none.

        Raises:
            TransferError: the connection is lost, stalls in a message, or what came is none.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.stream.wait_for_data()
        except TimeoutError:
            raise StalledError(f"no answer within {timeout_s} s") from None
        header = await self._read(_HEADER.size)
        size, payload_bytes = _HEADER.unpack(header)
        if not 0 < size <= _MAX_MESSAGE_BYTES:
            raise TransferError(f"a message of {size} bytes; allowed: 1 to {_MAX_MESSAGE_BYTES}")
        if payload_bytes > self._max_payload_bytes:
            raise TransferError(
                f"a payload of {payload_bytes} bytes; allowed: at most {self._max_payload_bytes}"
            )
        body = await self._read(size)
        session = self.stream.session
        session.check(await self._read(SESSION_MAC_BYTES), header + body)
        payload = torch.empty(payload_bytes, dtype=torch.uint8)
        if payload_bytes:
            await self.stream.receive_into(payload.numpy().data)
            session.check(await self._read(SESSION_MAC_BYTES), payload.numpy().data)
        try:
            return self._decoder.decode(body), payload
        except msgspec.DecodeError as error:
            raise TransferError(f"no message of a stage: {error}") from None

    async def _read(self, size: int) -> bytes:
        body = bytearray(size)
        await self.stream.receive_into(memoryview(body))
        return bytes(body)
