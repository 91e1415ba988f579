"""The messages between the process of an instance and the host of a stage, and between hosts.

Connections use the hand-shake of page ports (`kvrs.transfer.connections`) with a separate key.
There is one connection for batches, one for pages, perhaps one for replicas, and one between hosts
for parts of pages. The client begins each with `Begin`; that for batches opens a session
(`sessions.py`), which all later messages name. A message is a header (the sizes of message and
payload), the message and its mac, then the payload and its mac. Sizes are checked before memory is
allocated, and a payload is read only after the mac of its message was checked.
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

from kvrs.config.cluster import EngineSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.frames import SESSION_MAC_BYTES
from kvrs.protocol.pages import TAG_BYTES, Cell, Tag, TrafficClass
from kvrs.transfer.links import Sender, SendingLink
from kvrs.transfer.stream import SocketStream, StalledError
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.reformed import RanksNow
from kvrs_engine.engine.ranks.wire import WireChunk

VERSION = 5
_HEADER = struct.Struct("<IQ")
_MAX_MESSAGE_BYTES = 1 << 26
# Approximate size of a group of pages that are sent together; a group has at least one page.
_GROUP_BYTES = 1 << 22

_Tag = Annotated[Tag, msgspec.Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]

# Number of `StageComputing` reports within the limit of silence. A host is lost after as many
# missed reports, because on a busy machine either process may be delayed.
WORDS = 4


class StageChannel(StrEnum):
    BATCHES = "batches"
    PAGES = "pages"
    REPLICAS = "replicas"  # Orders to send parts of pages to another instance's host.
    PARTS = "parts"  # Parts of pages, from host to host.


class LoanWanted(msgspec.Struct, frozen=True):
    """A request for pages of a stage by an instance whose own host is lost."""

    pages: Annotated[int, msgspec.Meta(ge=1)]  # The largest useful number.
    least_pages: Annotated[int, msgspec.Meta(ge=1)]  # The smallest useful number.
    # Share of the time in which the borrower's own host computed.
    busy: Annotated[float, msgspec.Meta(ge=0, le=1)]
    # Full pages of the borrower's streams, the most wanted first; the lender may have replicas.
    tags: list[_Tag] = []


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Begin a connection. The answer is `StageReady` with a new session for batches, else
    `PagesDone`.
    """

    version: int
    channel: StageChannel
    session: int = 0  # Pages and replicas: the open session.
    loan: LoanWanted | None = None  # Batches of a borrower: the requested loan.


class Ordered(msgspec.Struct, frozen=True):
    """An order. The host obeys orders of the session of their link only."""

    session: int
    epoch: int


class ComputeStage(Ordered, frozen=True, tag="compute"):
    """Compute a batch; the payload has the rows of the previous stage. The answer is
    `StageComputed`, or `StageStopped` if ranks are lost or make no progress for `limit_s`. Until
    then the host sends `StageComputing`, `WORDS` times in `limit_s`.
    """

    batch: int
    chunks: list[WireChunk]
    limit_s: Annotated[float, msgspec.Meta(gt=0)]


class ReadPages(Ordered, frozen=True, tag="read"):
    """Send the stage's part of these pages as the payload of `PagesDone`."""

    pages: list[int]


class WritePages(Ordered, frozen=True, tag="write"):
    """Write the payload into the stage's part of these pages, or into some of its cells: layers and
    KV heads [first, end). The answer is `PagesDone`.
    """

    pages: list[int]
    layers: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None


class EndRank(Ordered, frozen=True, tag="end"):
    """Kill a rank and drop its memory, as an injected fault. `bases` has the base of each page. The
    answer is `CellsLost`.
    """

    rank: int
    bases: list[int]


class MoveRank(Ordered, frozen=True, tag="move"):
    """Let a rank leave on purpose, or take it back. The answer is `RankMoved`."""

    rank: int
    leaves: bool


class Mended(Ordered, frozen=True, tag="mended"):
    """Report on the connection for batches that the instance's page tables have dropped all pages
    that lost cells. There is no answer.
    """


class LendPages(Ordered, frozen=True, tag="lend"):
    """Answer `LoanAsked` with pages. The host's answer is `PagesDone`, or `PagesLost` if the
    borrower no longer waits.
    """

    loan: int
    pages: list[int]
    tags: list[_Tag] = []  # Tags of the content of the first pages.
    # (own page, lent page): parts to copy before lending, because the owner uses the own pages.
    copies: list[tuple[int, int]] = []


class RefuseLoan(Ordered, frozen=True, tag="refuse"):
    """Answer `LoanAsked` with a refusal."""

    loan: int
    reason: str


class PartsRange(msgspec.Struct, frozen=True):
    """Consecutive full pages of a stream, from `first_page` on."""

    stream: StreamId
    first_page: Annotated[int, msgspec.Meta(ge=0)]
    tags: list[_Tag]


class BringParts(Ordered, frozen=True, tag="bring"):
    """Send the stage's part of these pages to another instance's host of the same stage, unless
    that host has them. The answer is `PartsHeld` or `PartsRefused`.
    """

    to: InstanceId
    ranges: list[PartsRange]
    pages: list[int]  # Pages of all ranges; empty: only ask which pages are held.


class TakeParts(Ordered, frozen=True, tag="take"):
    """Answer `PartsOffered` with the destination pages. The host's answer is as for `LendPages`."""

    offer: int
    held: list[int]  # Number of leading pages of each range's stream that have the stage's part.
    pages: list[int]  # Destination of each page of the ranges; `IS_HERE` or `NOT_TAKEN`.


class RefuseParts(Ordered, frozen=True, tag="refuse-parts"):
    """Answer `PartsOffered` with a refusal."""

    offer: int
    reason: str


IS_HERE, NOT_TAKEN = -1, -2

OwnerAnswer = LendPages | RefuseLoan | TakeParts | RefuseParts


class OfferParts(msgspec.Struct, frozen=True, tag="offer"):
    """Offer parts of pages to another host; without `are_sent`, only ask which pages are held. The
    answer is `PartsTaken` or `PartsRefused`.
    """

    ranges: list[PartsRange]
    are_sent: bool


class StoreParts(msgspec.Struct, frozen=True, tag="store"):
    """Send parts of some accepted pages to another host, as the payload. The answer is
    `PartsHeld`.
    """

    places: list[int]  # Indexes among all pages of the ranges.


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
    """Facts about the loaded weights of a stage."""

    arithmetic: bytes
    hashes: dict[str, bytes]
    root: bytes | None  # The root hash saved beside the model's files on the host's node.


class StageUse(msgspec.Struct, frozen=True):
    """Compute time and reads of a stage's ranks, as in `kvrs.protocol.instance.StageInfo`."""

    host_pid: int
    session: int | None
    worked_s: float
    read_bytes: int


class StageReady(msgspec.Struct, frozen=True, tag="ready"):
    """The answer to `Begin` for batches."""

    session: int
    facts: StageFacts
    now: RanksNow  # Times are relative to this message.
    use: StageUse
    load_s: float  # Duration of the ranks' start.
    pages: list[int] | None = None  # The lent pages; None: the owner's session.
    tags: list[_Tag] = []  # Tags of the content of the first pages.


class StageComputing(msgspec.Struct, frozen=True, tag="computing"):
    """The stage is alive and has not finished this batch."""

    batch: int


class StageComputed(msgspec.Struct, frozen=True, tag="computed"):
    """The stage has computed a batch; the payload has the output rows, or logits of the last
    stage.
    """

    batch: int
    use: StageUse


class StageStopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The batch has failed because ranks are lost; no batch is computed before `StageServes`."""

    batch: int
    ranks: list[int]
    reason: str


class StageServes(msgspec.Struct, frozen=True, tag="serves"):
    """The ranks compute again, and no rank computes an earlier batch any more."""


class StageChanged(msgspec.Struct, frozen=True, tag="changed"):
    """The state of the ranks has changed. The message may come at any time."""

    now: RanksNow  # Times are relative to this message.


class LoanAsked(msgspec.Struct, frozen=True, tag="asked"):
    """Ask the owner of the stage for a loan to another instance, which waits for the answer. The
    message may come at any time.
    """

    loan: int
    borrower: InstanceId
    wanted: LoanWanted


class LoanOver(msgspec.Struct, frozen=True, tag="over"):
    """The loan has ended, and its pages are no longer written. The message may come at any time."""

    loan: int


class PartsOffered(msgspec.Struct, frozen=True, tag="offered"):
    """Pass an `OfferParts` to the owner of the stage; the sender waits for the answer. The message
    may come at any time.
    """

    offer: int
    sender: InstanceId  # The sending host.
    ranges: list[PartsRange]
    are_sent: bool


class PartsOver(msgspec.Struct, frozen=True, tag="parts-over"):
    """An accepted offer has ended, and its pages are no longer written. The message comes once per
    accepted offer, at any time.
    """

    offer: int
    filled: list[int]  # Indexes of the pages that have received their part.


class StageLost(msgspec.Struct, frozen=True, tag="lost"):
    """The stage has lost ranks for good, and the host ends."""

    ranks: list[int]
    reason: str


class StageRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The host ends the connection; `reason` says what was wrong, and what is allowed."""

    reason: str


class PagesDone(msgspec.Struct, frozen=True, tag="done"):
    """The order is carried out; there is a payload only after `ReadPages`."""


class PagesLost(msgspec.Struct, frozen=True, tag="gone"):
    """The order has failed because cells of the pages are lost."""

    reason: str


class CellsLost(msgspec.Struct, frozen=True, tag="cells"):
    """The lost cells (layer, KV head) of a page, by the base of the page."""

    cells: dict[int, list[Cell]]


class RankMoved(msgspec.Struct, frozen=True, tag="moved"):
    refused: str | None  # The reason of a refusal; None: carried out.


class PartsTaken(msgspec.Struct, frozen=True, tag="taken"):
    held: list[int]  # Numbers as in `TakeParts`.
    places: list[int]  # Indexes of the pages to send.


class PartsHeld(msgspec.Struct, frozen=True, tag="held"):
    held: list[int]  # Numbers as in `TakeParts`, after the transfer.
    sent_bytes: int = 0


class PartsRefused(msgspec.Struct, frozen=True, tag="parts-refused"):
    """An offer is refused, or parts cannot be sent."""

    reason: str


FromOthers = LoanAsked | LoanOver | PartsOffered | PartsOver

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


def facts_digest(config: ModelConfig, settings: EngineSettings, layout: Layout) -> str:
    """Return a digest that is equal at both ends if they agree on batches, rows and pages. The
    fingerprint cannot be used, because only all stages together have one.
    """
    facts = [config, settings.model_dump(mode="json"), layout]
    encoded = msgspec.json.encode(facts, order="sorted")
    return hashlib.blake2b(encoded, digest_size=16, person=b"kvrs-stage").hexdigest()


def page_groups(pages: Sequence[int], page_bytes: int) -> list[range]:
    """Divide pages into groups that are sent together, as ranges of indexes."""
    count = max(1, _GROUP_BYTES // page_bytes)
    return [range(at, min(at + count, len(pages))) for at in range(0, len(pages), count)]


def max_page_payload(page_bytes: int) -> int:
    return max(_GROUP_BYTES, page_bytes)


class StageLink:
    """One end of a connection after its hand-shake. One task receives at a time."""

    def __init__(self, stream: SocketStream, kinds: Any, max_payload_bytes: int) -> None:
        """`kinds` is the union of the messages that may arrive."""
        self.stream = stream
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._max_payload_bytes = max_payload_bytes
        self._sending = asyncio.Lock()
        self._sender: Callable[[], AbstractContextManager[SocketStream | Sender]]
        self._sender = lambda: nullcontext(stream)

    def limit(self, link: SendingLink, traffic: TrafficClass) -> None:
        """Share the bandwidth of `link` with its other transfers, in class `traffic`."""
        self._sender = partial(link.sending, self.stream, traffic)

    async def send(self, message: ToStage | FromStage, payload: Tensor | None = None) -> None:
        """Send a message with a payload, a contiguous tensor of any type.

        Raises:
            TransferError: the connection is lost or stalls.
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
        """Receive the next message and its payload as bytes. `timeout_s` limits the wait for its
        begin; None: no limit.

        Raises:
            TransferError: the connection is lost, stalls in a message, or the message is invalid.
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
