"""Puller of pages from other instances; it also measures the links.

Copies of pages from the memory of processes of this host, without a socket.

The node's agent, or an instance whose memory it owns, pins them and hands out a descriptor of its
file (`server.py`), which is mapped to be read. A copy counts only with the checksum that the page
had when it was stored or pinned. A page that is overwritten while it is copied is therefore never
taken.
"""

import asyncio
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any, Generic, TypeVar

import numpy as np

from kvrs.config.sections import TransferSettings
from kvrs.errors import DamagedPageError, TransferError
from kvrs.ids import NodeId
from kvrs.protocol import frames
from kvrs.protocol.frames import (
    ANSWER_BYTES,
    SEALED_ANSWER_BYTES,
    AnswerHeader,
    FrameType,
    checksum_of,
)
from kvrs.protocol.instance import MEMORY, LinkReport
from kvrs.protocol.pages import (
    MappedPages,
    PagePart,
    ProbeFrame,
    PullFrame,
    PullRequest,
    TrafficClass,
    check_file,
    check_place,
    decode_mapped,
)
from kvrs.transfer.connections import ConnectionPool, LocalConnectionPool, PageConnection
from kvrs.transfer.meter import PROBE_BYTES, LinkMeter, Measurement
from kvrs.transfer.peers import Identity, Peer, PullResult
from kvrs.transfer.shared_memory import close_all, in_threads, map_file
from kvrs.transfer.stream import Filling

log = logging.getLogger(__name__)

# Most bytes that are pinned at a time: their copy takes far less than the stall timeout, which ends
# the pins.
_BATCH_BYTES = 1 << 28
# Time for which files stay mapped for the next pull, during which the agent cannot release their
# memory.
_IDLE_S = 10.0
_THREADS = 2  # Threads that copy: one core does not saturate the memory.

# Bytes of a probe: more than a core's cache holds.
_PROBE_BYTES = 1 << 24
_PROBE_PAGE_BYTES = 1 << 18
# Interval of probes of the memory: its rate hardly changes, but decisions discount old estimates.
_PROBE_INTERVAL_S = 60.0


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Copy:
    """Copies pages and checks the copies, in order within each of its threads, until it is stopped
    or a copy is wrong.
    """

    def __init__(
        self,
        sources: Sequence[memoryview],
        targets: Sequence[memoryview],
        checksums: Sequence[int],
        part: PagePart | None = None,
    ) -> None:
        self._part = part  # Part of each page to copy; None: the whole page.
        self._pages = list(zip(sources, targets, checksums, strict=True))
        self._size_bytes = sum(map(len, targets))
        per_thread = max(1, -(-len(self._pages) // _THREADS))
        self._shares = [
            self._pages[first : first + per_thread]
            for first in range(0, len(self._pages), per_thread)
        ]
        self._verified = [0] * len(self._shares)
        self._stopped = Event()

    async def carry_out(self) -> None:
        """Copy the pages; a cancelled call returns once no thread writes any more."""
        parts = [partial(self._run, number) for number in range(len(self._shares))]
        await in_threads(self._size_bytes, parts, self._stopped.set)

    @property
    def verified(self) -> int:
        """Number of leading pages that are present and correct."""
        count = 0
        for share, verified in zip(self._shares, self._verified, strict=True):
            count += verified
            if verified < len(share):
                break
        return count

    @property
    def verified_bytes(self) -> int:
        return sum(len(target) for _, target, _ in self._pages[: self.verified])

    def _run(self, number: int) -> None:
        for source, target, due in self._shares[number]:
            if self._stopped.is_set():
                return
            # NumPy copies by a loop of vector instructions, without the lock of the interpreter.
            # The C library's copy takes twice as long for pieces below 1 MB on CPUs on which it
            # uses string moves.
            whole, copy = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
            if self._part is not None:
                whole = _cells(whole, self._part)
            np.positive(whole, out=copy.reshape(whole.shape))
            # The copy is checked, not the source, which may change after the check.
            if checksum_of(target, self._part) != due:
                return
            self._verified[number] += 1


class PageMapper:
    """Copies pages from the memory of processes on this host."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        key: bytes,
        stall_timeout_s: float,
        meter: LinkMeter,
        clock: Callable[[], float],
    ) -> None:
        self._pool = LocalConnectionPool(identity, key, stall_timeout_s)
        self._meter = meter
        self._clock = clock
        self._expiry: asyncio.TimerHandle | None = None

    async def pull(
        self,
        peer: Peer,
        request: PullRequest,
        views: Sequence[memoryview],
        expected_epoch: int | None,
        copied: Callable[[int], None],
    ) -> bool:
        """Fill `views` with copies of the pages of `request` that the peer has; return whether it
        has all. `copied` is called with the number of further correct pages, in order. Once this
        has returned, raised or was cancelled, the views are not written any more.

        Raises:
            TransferError: the peer cannot be reached over its socket, refuses, or a page's checksum
                is wrong.
        """
        per_batch = max(1, _BATCH_BYTES // max(1, len(views[0]))) if views else 1
        for first in range(0, max(1, len(views)), per_batch):
            batch = views[first : first + per_batch]
            tags = request.tags[first : first + per_batch]
            asked = PullRequest(tags, traffic=request.traffic, part=request.part)
            if await self._pull(peer, asked, batch, expected_epoch, copied) < len(batch):
                return False
        return True

    async def probe(self, peer: Peer) -> None:
        """Measure the rate at which pages can be copied from the memory of processes of this host,
        unless it was measured lately or the agent does not share its memory: copy and check bytes
        of own memory as if they were pages.
        """
        if not self._meter.may_probe(MEMORY, _PROBE_BYTES, _PROBE_INTERVAL_S, 1, self._clock()):
            return
        try:
            await self._pull(peer, PullRequest(()), (), None, lambda pages: None)
        except TransferError:
            return  # The next round of probes tries again.
        copy = await asyncio.to_thread(_probe_copy)
        self._meter.probe_begins(MEMORY, self._clock(), _PROBE_BYTES)
        await self._metered(copy)

    def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._pool.close()

    async def _pull(
        self,
        peer: Peer,
        request: PullRequest,
        views: Sequence[memoryview],
        expected_epoch: int | None,
        copied: Callable[[int], None],
    ) -> int:
        async def question(connection: PageConnection) -> None:
            ask = frames.encode_pull(PullFrame(connection.request_id, request), FrameType.MAP)
            await connection.stream.send(ask, connection.stream.session.seal(ask))

        connection, answer = await self._pool.ask(peer, expected_epoch, question, FrameType.MAPPED)
        self._keep_for_a_while()
        with self._pool.using(connection):
            if answer.request_id != connection.request_id or answer.index > len(views):
                raise TransferError(f"answer out of turn: {answer}")
            payload = memoryview(bytearray(answer.payload_bytes))
            await connection.stream.receive_into(payload)
            connection.stream.session.check_answer(connection.mac, answer, payload)
            mapped = decode_mapped(bytes(payload), answer.index)
            sources = _mapped_pages(connection, mapped)
            page_bytes, part = connection.server.page_bytes, request.part
            asked_bytes = page_bytes if part is None else part.bytes_of(page_bytes)
            assert all(view.nbytes == asked_bytes for view in views)
            checksums = [checksum for _, checksum in mapped.pages]
            copy = _Copy(sources, views[: answer.index], checksums, part)
            self._meter.begin(MEMORY, self._clock())
            try:
                await self._metered(copy)
            finally:
                copied(copy.verified)
            if copy.verified < len(sources):
                raise DamagedPageError(f"checksum of mapped page {copy.verified} is wrong")
            done = frames.encode_unmap()
            await connection.stream.send(done, connection.stream.session.seal(done))
        # The time for which files stay mapped begins anew: the pull may have taken longer than
        # that.
        self._keep_for_a_while()
        return answer.index

    async def _metered(self, copy: _Copy) -> None:
        """Run a copy whose begin the meter has noted, and note its bytes and its end."""
        try:
            await copy.carry_out()
        finally:
            now_s = self._clock()
            self._meter.add(MEMORY, copy.verified_bytes, now_s)
            self._meter.end(MEMORY, now_s)

    def _keep_for_a_while(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(_IDLE_S, self._pool.drop_idle)


def _cells(page: Bytes, part: PagePart) -> Bytes:
    """Return a view of a part of a page, with the axes `[layers, heads, bytes of a cell]`."""
    layers, heads = part.part.layers, part.part.heads
    cells = page.reshape(part.layers, part.heads, -1)[layers.start : layers.stop]
    return cells[:, heads.start : heads.stop]


def _probe_copy() -> _Copy:
    source, target = (memoryview(mmap.mmap(-1, _PROBE_BYTES)) for _ in range(2))
    # The first use of memory takes the system longer, so the memory is written first.
    for each in (source, target):
        np.frombuffer(each, np.uint8).fill(1)
    starts = range(0, _PROBE_BYTES, _PROBE_PAGE_BYTES)
    sources, targets = (
        [each[start : start + _PROBE_PAGE_BYTES] for start in starts] for each in (source, target)
    )
    return _Copy(sources, targets, [frames.checksum(sources[0])] * len(starts))


def _mapped_pages(connection: PageConnection, mapped: MappedPages) -> list[memoryview]:
    """Return views of the pages in the peer's file, which is mapped if it came with this answer.

    Raises:
        TransferError: the file cannot be mapped or has not the told size, or a page is not within
            it.
    """
    descriptors = connection.stream.descriptors
    try:
        # A read behind a file's end kills the process, so sizes are compared before mapping.
        check_file(mapped.file_bytes, [os.fstat(each).st_size for each in descriptors])
        if mapped.file_bytes:
            connection.memory = map_file(descriptors.pop(), mapped.file_bytes, writable=False)
    except (OSError, ValueError, OverflowError) as error:
        raise TransferError(f"pages cannot be mapped: {error}") from None
    finally:
        close_all(descriptors)
    memory = memoryview(connection.memory or b"")
    page_bytes = connection.server.page_bytes
    for page in mapped.pages:
        check_place(page, page_bytes, len(memory))
    return [memory[offset : offset + page_bytes] for offset, _ in mapped.pages]


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
