"""Copies of pages from the memory of processes of this host, without a socket.

The node's agent, or an instance whose memory it owns, pins them and hands out a descriptor of its
file (`lending.py`), which is mapped to be read. A copy counts only with the checksum that the page
had when it was stored or pinned. A page that is overwritten while it is copied is therefore never
taken.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any

import numpy as np

from kvrs.errors import DamagedPageError, TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import FrameType, checksum_of
from kvrs.protocol.instance import MEMORY
from kvrs.protocol.pages import (
    MappedPages,
    PagePart,
    PullFrame,
    PullRequest,
    check_file,
    check_place,
    decode_mapped,
)
from kvrs.transfer.connections import LocalConnectionPool, PageConnection
from kvrs.transfer.meter import LinkMeter
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.shared_memory.passing import close_all
from kvrs.transfer.shared_memory.regions import in_threads, map_file

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
