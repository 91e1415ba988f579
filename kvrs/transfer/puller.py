"""Puller of pages from other instances; it also measures the links."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from kvrs.config.transfer import TransferSettings
from kvrs.errors import DamagedPageError, TransferError
from kvrs.ids import NodeId
from kvrs.protocol import frames
from kvrs.protocol.frames import ANSWER_BYTES, AnswerHeader, FrameType, checksum_of
from kvrs.protocol.instance import LinkReport
from kvrs.protocol.pages import ProbeFrame, PullFrame, TrafficClass
from kvrs.protocol.session import SEALED_ANSWER_BYTES
from kvrs.transfer.connections import ConnectionPool, PageConnection
from kvrs.transfer.mapped import PageMapper
from kvrs.transfer.meter import PROBE_BYTES, LinkMeter, Measurement
from kvrs.transfer.peers import Identity, Peer, PullRequest, PullResult
from kvrs.transfer.stream import Filling

log = logging.getLogger(__name__)

# Bytes below which a transfer gives no sample of a rate; at most the bytes of a probe, which would
# otherwise give none.
_MIN_SAMPLE_BYTES = 1 << 15

_PROBE_PIECE_BYTES = 1 << 16

# Bytes that are read between two looks at the kernel's arrival times: more looks would slow down a
# fast link.
_LOOK_BYTES = 1 << 18

# Time for which ended fetches stay in load reports, and the most that stay.
_RECENT_S = 10.0
_MAX_RECENT = 256

# Function that notes at the meter that an answer from the source begins at this time.
_Begin = Callable[[NodeId, float], None]


@dataclass(slots=True)
class _ActivePull:
    """A running pull: the destinations of its pages, and the number of correct arrivals."""

    request: PullRequest
    views: list[memoryview]  # Memory for the full pages, then for the tail page if it is requested.
    tell: Callable[[int], None]
    verified: int = 0
    # Number of leading pages that were copied from the peer's memory; the rest is requested over a
    # socket.
    mapped: int = 0
    gone: bool = False

    def add(self, pages: int) -> None:
        """Count further correct pages."""
        self.verified += pages
        self.tell(pages)

    @property
    def asked(self) -> PullRequest:
        """Return the request for the pages that were not copied from the peer's memory."""
        return replace(self.request, tags=self.request.tags[self.mapped :])


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
        self._meter = LinkMeter(min(PROBE_BYTES, _MIN_SAMPLE_BYTES))
        self._pool = ConnectionPool(identity, secret, settings.stall_timeout_s)
        self._mapper = PageMapper(identity, secret, settings.stall_timeout_s, self._meter, clock)
        # Last logged reason why pages of a process of this host came through a socket; "": they
        # were mapped.
        self._unmapped = ""
        self.damaged_pages = 0  # Number of damaged pages received so far.
        # Bytes of correct pages received so far, by class of traffic.
        self.pulled_bytes = dict.fromkeys(TrafficClass, 0)

    async def pull(
        self,
        peer: Peer,
        request: PullRequest,
        pages: Sequence[memoryview],
        tail: memoryview | None,
        expected_epoch: int | None = None,
        verified: Callable[[int], None] = lambda pages: None,
    ) -> PullResult:
        """Fill `pages` with the pages of `request.tags`, then `tail` with its tail page, in order
        and as far as possible; only the cells of `request.part`, if given. Full pages of a process
        of this host are copied from its memory, if shared. `verified` is called with the number of
        further correct pages, including the tail.

        An error of the peer ends the pull early, and is in the result. Once this has returned or
        was cancelled, the buffers are not written any more.
        """
        assert len(pages) == len(request.tags)
        assert (tail is None) == (request.tail_index is None)
        started_s = self._clock()
        pulling = _ActivePull(request, [*pages, *([] if tail is None else [tail])], verified)
        error: str | None = None
        try:
            if peer.directory is None or not await self._map(peer, pulling, expected_epoch):
                await self._pull(peer, pulling, expected_epoch)
        except TransferError as fault:
            error = str(fault)
            if isinstance(fault, DamagedPageError):
                self.damaged_pages += 1
                log.warning("pages not fetched", extra={"peer": peer.instance, "cause": error})
        pulled_bytes = sum(view.nbytes for view in pulling.views[: pulling.verified])
        self.pulled_bytes[request.traffic] += pulled_bytes
        return PullResult(
            full_pages=min(pulling.verified, len(pages)),
            tail=pulling.verified > len(pages),
            bytes=pulled_bytes,
            seconds=self._clock() - started_s,
            gone=pulling.gone,
            error=error,
        )

    async def probe(self, peer: Peer, probers: int = 1) -> None:
        """Measure the link from the peer's node with a transfer of its own, unless it was measured
        lately, or `probers` processes that probe it would take more than `PROBE_SHARE` of it.
        """
        if peer.directory is not None:
            await self._mapper.probe(peer)
        meter, interval_s = self._meter, self._settings.probe_interval_s
        least, most = PROBE_BYTES, frames.MAX_PROBE_BYTES
        size_bytes = meter.probe_bytes(peer.node, least, most)
        if not meter.may_probe(peer.node, size_bytes, interval_s, probers, self._clock()):
            return
        try:
            await self._probe(peer, size_bytes)
            while (more_bytes := meter.follow_up_bytes(peer.node, least, most)) is not None:
                await self._probe(peer, more_bytes, follows=True)
        except TransferError:
            # The link of an unreachable peer stays unmeasured; other parts detect that the peer is
            # dead.
            return

    def links(self) -> dict[NodeId, Measurement]:
        """Return the measurements of the links from all nodes that have sent enough pages or
        probes.
        """
        return self._meter.measurements(self._clock())

    def link_reports(self) -> list[LinkReport]:
        return [LinkReport(node, *measured) for node, measured in self.links().items()]

    async def close(self) -> None:
        """End all connections. Running pulls return early, with an error."""
        self._pool.close()
        self._mapper.close()

    async def _map(self, peer: Peer, pulling: _ActivePull, expected_epoch: int | None) -> bool:
        """Copy full pages from the peer's memory; return whether no page remains to be pulled
        through a socket.
        """
        request, views = pulling.request, pulling.views[: len(pulling.request.tags)]
        if not views:
            return False

        try:
            pulling.gone = not await self._mapper.pull(
                peer, request, views, expected_epoch, pulling.add
            )
        except TransferError as error:
            if len(pulling.views) == pulling.verified:
                return True  # The peer has ended after the last page was copied.
            pulling.mapped = pulling.verified
            if str(error) != self._unmapped:
                self._unmapped = str(error)
                log.warning("pages are sent", extra={"peer": peer.instance, "cause": str(error)})
            return False
        self._unmapped, pulling.mapped = "", pulling.verified
        return pulling.gone or request.tail_index is None

    async def _pull(self, peer: Peer, pulling: _ActivePull, expected_epoch: int | None) -> None:
        async def question(connection: PageConnection) -> None:
            pull = frames.encode_pull(PullFrame(connection.request_id, pulling.asked))
            await connection.stream.send(pull, connection.stream.session.seal(pull))

        expected = (FrameType.PAGE, FrameType.GONE, FrameType.END)
        connection, answer = await self._pool.ask(peer, expected_epoch, question, *expected)
        with self._pool.using(connection), self._metered(connection, self._meter.begin) as metered:
            await self._receive_pages(connection, pulling, answer, metered)

    async def _receive_pages(
        self,
        connection: PageConnection,
        pulling: _ActivePull,
        answer: AnswerHeader,
        metered: "_Metered",
    ) -> None:
        page_bytes, part = connection.server.page_bytes, pulling.request.part
        mapped, views = pulling.mapped, pulling.views[pulling.mapped :]
        if part is not None:
            page_bytes = part.bytes_of(page_bytes)
        assert all(view.nbytes == page_bytes for view in pulling.views)
        filling = Filling(connection.stream, _with_prologues(views))
        session, mac = connection.stream.session, memoryview(connection.mac)
        while pulling.verified < len(pulling.views) and answer.type is not FrameType.GONE:
            index = pulling.verified - mapped
            _check(answer, FrameType.PAGE, connection.request_id, index, page_bytes)
            page = await filling.next()
            metered.read(page_bytes)
            if checksum_of(page, part) != answer.checksum:
                raise DamagedPageError(f"checksum of page {pulling.verified} is wrong")
            session.check_answer(mac, answer, page)
            # The page is counted before the next step, whose failure would not concern it.
            pulling.add(1)
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
            pulling.verified - mapped,
            0,
        )
        pulling.gone = gone

    async def _probe(self, peer: Peer, size_bytes: int, *, follows: bool = False) -> None:
        async def question(connection: PageConnection) -> None:
            probe = frames.encode_probe(ProbeFrame(connection.request_id, size_bytes))
            await connection.stream.send(probe, connection.stream.session.seal(probe))

        begin = partial(self._meter.probe_begins, size_bytes=size_bytes, follows=follows)
        connection, answer = await self._pool.ask(peer, None, question, FrameType.PROBE_DATA)
        with self._pool.using(connection), self._metered(connection, begin) as metered:
            connection.stream.session.check_answer(connection.mac, answer)
            _check(answer, FrameType.PROBE_DATA, connection.request_id, 0, size_bytes)
            scratch = memoryview(bytearray(min(size_bytes, _PROBE_PIECE_BYTES)))
            left_bytes, is_first_half = size_bytes, True
            while left_bytes:
                if is_first_half and left_bytes <= size_bytes // 2:
                    is_first_half = False
                    metered.restart()
                piece = scratch[:left_bytes]
                await connection.stream.receive_into(piece)
                metered.read(len(piece))
                left_bytes -= len(piece)

    @contextmanager
    def _metered(self, connection: PageConnection, begin: _Begin) -> "Iterator[_Metered]":
        metered = _Metered(self._meter, connection, self._clock, begin)
        try:
            yield metered
        finally:
            metered.end()


class _Metered:
    """Reports one answer's arrivals to the meter."""

    def __init__(
        self,
        meter: LinkMeter,
        connection: PageConnection,
        clock: Callable[[], float],
        begin: _Begin,
    ) -> None:
        self._meter = meter
        self._source = connection.peer.node
        self._arrivals = connection.stream.arrivals
        self._clock = clock
        self._unseen = 0  # Bytes read since the last look at arrival times.
        begin(self._source, self._look()[1])

    def read(self, size_bytes: int) -> None:
        self._unseen += size_bytes
        if self._unseen >= _LOOK_BYTES:
            self._tell()

    def restart(self) -> None:
        """Exclude the bytes so far from the measurement: an idle link may carry the first bytes
        faster (token buckets) or slower (slow start) than later ones.
        """
        self._meter.restart(self._source, self._look()[1])

    def end(self) -> None:
        self._tell()
        self._meter.end(self._source, self._clock())

    def _tell(self) -> None:
        arrived, at_s, waited_s = self._look()
        self._meter.add(self._source, arrived, at_s, waited_s)

    def _look(self) -> tuple[int, float, float]:
        read, self._unseen = self._unseen, 0
        return self._arrivals.look() or (read, self._clock(), 0.0)


Report = TypeVar("Report")


class RecentReports(Generic[Report]):
    """Reports of events of the last `_RECENT_S` seconds, for load reports."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: deque[tuple[float, Report]] = deque(maxlen=_MAX_RECENT)

    def note(self, report: Report) -> None:
        self._ended.append((self._clock(), report))

    def reports(self) -> list[Report]:
        while self._ended and self._clock() - self._ended[0][0] > _RECENT_S:
            self._ended.popleft()
        return [report for _, report in self._ended]


def _with_prologues(pages: Sequence[memoryview]) -> list[memoryview]:
    """Return the views to fill in order: after each page comes a view for the start of the next
    answer.
    """
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
