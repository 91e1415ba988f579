"""Fetches pages from other instances, and measures the links on the way."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvrs.errors import DamagedPageError, TransferError
from kvrs.ids import NodeId
from kvrs.protocol import frames
from kvrs.protocol.frames import ANSWER_BYTES, Answer, FrameType, Probe, Pull
from kvrs.protocol.instance import LinkReport
from kvrs.transfer.config import TransferSettings
from kvrs.transfer.connections import Connection, ConnectionPool
from kvrs.transfer.handshake import page_key
from kvrs.transfer.meter import LinkMeter, Measurement
from kvrs.transfer.peers import Identity, Peer, PullRequest, PullResult
from kvrs.transfer.stream import Filling

log = logging.getLogger(__name__)

# Less than this is over before a rate can be seen in it; never more than a probe, or probes would count for nothing.
_MIN_SAMPLE_BYTES = 1 << 15

_PROBE_PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class _Pulling:
    """One pull on its way: where its pages go, and how many are there and right."""

    request: PullRequest
    views: list[memoryview]  # The full pages, then perhaps the tail.
    verified: int = 0
    gone: bool = False


class PagePuller:
    """One per instance."""

    def __init__(
        self, identity: Callable[[], Identity], secret: bytes, settings: TransferSettings, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._meter = LinkMeter(min(settings.probe_bytes, _MIN_SAMPLE_BYTES))
        self._pool = ConnectionPool(identity, page_key(secret), settings.stall_timeout_s)
        self.damaged_pages = 0  # That ever came.

    async def pull(
        self,
        peer: Peer,
        request: PullRequest,
        pages: Sequence[memoryview],
        tail: memoryview | None,
        expected_epoch: int | None = None,
    ) -> PullResult:
        """Fill `pages` with the pages of `request.tags`, then `tail` with its tail page, in order and as far as it goes.

        Whatever the peer does wrong ends the pull early and is told in the result. Once this has returned or was
        cancelled, nothing writes into the buffers any more.
        """
        assert len(pages) == len(request.tags)
        assert (tail is None) == (request.tail_index is None)
        started_s = self._clock()
        pulling = _Pulling(request, [*pages, *([] if tail is None else [tail])])
        error: str | None = None
        try:
            await self._pull(peer, pulling, expected_epoch)
        except TransferError as fault:
            error = str(fault)
            if isinstance(fault, DamagedPageError):
                self.damaged_pages += 1
                log.warning("pages not fetched", extra={"peer": peer.instance, "cause": error})
        return PullResult(
            full_pages=min(pulling.verified, len(pages)),
            tail=pulling.verified > len(pages),
            bytes=sum(view.nbytes for view in pulling.views[: pulling.verified]),
            seconds=self._clock() - started_s,
            gone=pulling.gone,
            error=error,
        )

    async def probe(self, peer: Peer, probers: int = 1) -> None:
        """Measure the link from the peer's node with a small transfer, unless its traffic was measured lately, or so many
        probers would take more of it than they may.
        """
        size_bytes, interval_s = self._settings.probe_bytes, self._settings.probe_interval_s
        if not self._meter.may_probe(peer.node, size_bytes, interval_s, probers, self._clock()):
            return
        try:
            await self._probe(peer, size_bytes)
        except TransferError:
            # A peer that cannot be reached leaves its link unmeasured. That it is gone is for others to notice.
            return

    def links(self) -> dict[NodeId, Measurement]:
        """From every node that pages or probes came from."""
        return self._meter.measurements(self._clock())

    def link_reports(self) -> list[LinkReport]:
        return [LinkReport(node, *measured) for node, measured in self.links().items()]

    async def close(self) -> None:
        """End all connections. Pulls that are still going on return early, with an error."""
        self._pool.close()

    async def _pull(self, peer: Peer, pulling: _Pulling, expected_epoch: int | None) -> None:
        async def question(connection: Connection) -> None:
            await connection.stream.send(frames.encode_pull(Pull(connection.request_id, pulling.request)))

        expected = (FrameType.PAGE, FrameType.GONE, FrameType.END)
        connection, answer = await self._pool.ask(peer, expected_epoch, question, *expected)
        with self._pool.using(connection), self._metered(peer.node):
            await self._receive_pages(connection, pulling, answer)

    async def _receive_pages(self, connection: Connection, pulling: _Pulling, answer: Answer) -> None:
        page_bytes = connection.server.page_bytes
        assert all(view.nbytes == page_bytes for view in pulling.views)
        filling = Filling(connection.stream, _with_prologues(pulling.views))
        while pulling.verified < len(pulling.views) and answer.type is not FrameType.GONE:
            _check(answer, FrameType.PAGE, connection.request_id, pulling.verified, page_bytes)
            page = await filling.next()
            self._meter.add(connection.peer.node, page_bytes, self._clock())
            if frames.checksum(page) != answer.checksum:
                raise DamagedPageError(f"checksum of page {answer.index} is wrong")
            # Counted before anything else can fail: what follows the page says nothing about the page.
            pulling.verified += 1
            answer = frames.decode_answer(await filling.next(), FrameType.PAGE, FrameType.GONE, FrameType.END)
        gone = answer.type is FrameType.GONE and pulling.verified < len(pulling.views)
        _check(answer, FrameType.GONE if gone else FrameType.END, connection.request_id, pulling.verified, 0)
        pulling.gone = gone

    async def _probe(self, peer: Peer, size_bytes: int) -> None:
        async def question(connection: Connection) -> None:
            await connection.stream.send(frames.encode_probe(Probe(connection.request_id, size_bytes)))

        connection, answer = await self._pool.ask(peer, None, question, FrameType.PROBE_DATA)
        with self._pool.using(connection), self._metered(peer.node, is_probe=True):
            _check(answer, FrameType.PROBE_DATA, connection.request_id, 0, size_bytes)
            scratch = memoryview(bytearray(min(size_bytes, _PROBE_PIECE_BYTES)))
            for start in range(0, size_bytes, len(scratch)):
                piece = scratch[: size_bytes - start]
                await connection.stream.receive_into(piece)
                self._meter.add(peer.node, len(piece), self._clock())

    @contextmanager
    def _metered(self, source: NodeId, *, is_probe: bool = False) -> Iterator[None]:
        begin = self._meter.probe_begins if is_probe else self._meter.begin
        begin(source, self._clock())
        try:
            yield
        finally:
            self._meter.end(source, self._clock())


def _with_prologues(pages: Sequence[memoryview]) -> list[memoryview]:
    """What is to be filled: every page, each followed by the start of the next answer."""
    prologues = memoryview(bytearray(len(pages) * ANSWER_BYTES))
    starts = range(0, len(prologues), ANSWER_BYTES)
    return [view for page, start in zip(pages, starts, strict=True) for view in (page, prologues[start : start + ANSWER_BYTES])]


def _check(answer: Answer, type_: FrameType, request_id: int, index: int, payload_bytes: int) -> None:
    due = (type_, request_id, index, payload_bytes)
    if (answer.type, answer.request_id, answer.index, answer.payload_bytes) != due:
        raise TransferError(f"answer out of turn: {answer} where {due} is due")
