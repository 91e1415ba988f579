"""Fetching pages from other instances, which also measures the links."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvrs.config.transfer import TransferSettings
from kvrs.errors import DamagedPageError, TransferError
from kvrs.ids import NodeId
from kvrs.protocol import frames
from kvrs.protocol.frames import ANSWER_BYTES, AnswerHeader, FrameType
from kvrs.protocol.instance import LinkReport
from kvrs.protocol.page_messages import ProbeFrame, PullFrame
from kvrs.protocol.session import SEALED_ANSWER_BYTES
from kvrs.transfer.connections import ConnectionPool, PageConnection
from kvrs.transfer.handshake import page_key
from kvrs.transfer.meter import LinkMeter, Measurement
from kvrs.transfer.peers import Identity, Peer, PullRequest, PullResult
from kvrs.transfer.stream import Filling

log = logging.getLogger(__name__)

# Smaller transfers end before they show a rate; never more than a probe, or probes would not count.
_MIN_SAMPLE_BYTES = 1 << 15

_PROBE_PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class _ActivePull:
    """A pull under way: where its pages go, and how many have arrived and are right."""

    request: PullRequest
    views: list[memoryview]  # The full pages, then perhaps the tail.
    verified: int = 0
    gone: bool = False


class PagePuller:
    """Pulls pages and probes links for one instance."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        secret: bytes,
        settings: TransferSettings,
        clock: Callable[[], float],
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
        """Fill `pages` with the pages of `request.tags`, then `tail` with its tail page, in order
        and as far as it goes.

        An error of the peer ends the pull early and stands in the result. Once this has returned or
        was cancelled, the buffers are not written any more.
        """
        assert len(pages) == len(request.tags)
        assert (tail is None) == (request.tail_index is None)
        started_s = self._clock()
        pulling = _ActivePull(request, [*pages, *([] if tail is None else [tail])])
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
        """Measure the link from the peer's node with a small transfer, unless it was measured
        lately, or that many probers would take more than their share of it.
        """
        size_bytes, interval_s = self._settings.probe_bytes, self._settings.probe_interval_s
        if not self._meter.may_probe(peer.node, size_bytes, interval_s, probers, self._clock()):
            return
        try:
            await self._probe(peer, size_bytes)
        except TransferError:
            # A peer that cannot be reached leaves its link unmeasured; its death is not detected
            # here.
            return

    def links(self) -> dict[NodeId, Measurement]:
        """Measurements of the links from every node that pages or probes came from."""
        return self._meter.measurements(self._clock())

    def link_reports(self) -> list[LinkReport]:
        return [LinkReport(node, *measured) for node, measured in self.links().items()]

    async def close(self) -> None:
        """End all connections. Pulls that are still going on return early, with an error."""
        self._pool.close()

    async def _pull(self, peer: Peer, pulling: _ActivePull, expected_epoch: int | None) -> None:
        async def question(connection: PageConnection) -> None:
            pull = frames.encode_pull(PullFrame(connection.request_id, pulling.request))
            await connection.stream.send(pull, connection.stream.session.seal(pull))

        expected = (FrameType.PAGE, FrameType.GONE, FrameType.END)
        connection, answer = await self._pool.ask(peer, expected_epoch, question, *expected)
        with self._pool.using(connection), self._metered(peer.node):
            await self._receive_pages(connection, pulling, answer)

    async def _receive_pages(
        self, connection: PageConnection, pulling: _ActivePull, answer: AnswerHeader
    ) -> None:
        page_bytes = connection.server.page_bytes
        assert all(view.nbytes == page_bytes for view in pulling.views)
        filling = Filling(connection.stream, _with_prologues(pulling.views))
        session, mac = connection.stream.session, memoryview(connection.mac)
        while pulling.verified < len(pulling.views) and answer.type is not FrameType.GONE:
            _check(answer, FrameType.PAGE, connection.request_id, pulling.verified, page_bytes)
            page = await filling.next()
            self._meter.add(connection.peer.node, page_bytes, self._clock())
            if frames.checksum(page) != answer.checksum:
                raise DamagedPageError(f"checksum of page {answer.index} is wrong")
            session.check_answer(mac, answer, page)
            # Counted before anything else can fail: later errors do not concern this page.
            pulling.verified += 1
            start = await filling.next()
            answer = frames.decode_answer(
                start[:ANSWER_BYTES], FrameType.PAGE, FrameType.GONE, FrameType.END
            )
            mac = start[ANSWER_BYTES:]
        session.check_answer(mac, answer)
        gone = answer.type is FrameType.GONE and pulling.verified < len(pulling.views)
        _check(
            answer,
            FrameType.GONE if gone else FrameType.END,
            connection.request_id,
            pulling.verified,
            0,
        )
        pulling.gone = gone

    async def _probe(self, peer: Peer, size_bytes: int) -> None:
        async def question(connection: PageConnection) -> None:
            probe = frames.encode_probe(ProbeFrame(connection.request_id, size_bytes))
            await connection.stream.send(probe, connection.stream.session.seal(probe))

        connection, answer = await self._pool.ask(peer, None, question, FrameType.PROBE_DATA)
        with self._pool.using(connection), self._metered(peer.node, is_probe=True):
            connection.stream.session.check_answer(connection.mac, answer)
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
    prologues = memoryview(bytearray(len(pages) * SEALED_ANSWER_BYTES))
    starts = range(0, len(prologues), SEALED_ANSWER_BYTES)
    return [
        view
        for page, start in zip(pages, starts, strict=True)
        for view in (page, prologues[start : start + SEALED_ANSWER_BYTES])
    ]


def _check(
    answer: AnswerHeader, type_: FrameType, request_id: int, index: int, payload_bytes: int
) -> None:
    due = (type_, request_id, index, payload_bytes)
    if (answer.type, answer.request_id, answer.index, answer.payload_bytes) != due:
        raise TransferError(f"answer out of turn: {answer} where {due} is due")
