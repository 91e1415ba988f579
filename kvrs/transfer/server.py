"""Server of a page port: it serves the pages of an instance or agent to peers with the cluster's
secret, and stores pages if there is a sink.

Server side of MAP: it pins the pages, and sends descriptors of its files with the pages'
offsets, for mapping.

Pins end with the client's UNMAP, with its connection, or after the stall timeout: a slower client
finds invalid copies by their checksums.

The accept loop of page ports and stages' hosts, with bounds on peers and on strangers.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvrs.config.sections import TransferSettings
from kvrs.errors import DamagedPageError, TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import (
    SESSION_MAC_BYTES,
    AnswerHeader,
    Bytes,
    FrameType,
    Session,
    cell_checksums,
    checksum_of,
    part_checksum,
)
from kvrs.protocol.pages import (
    HeldPages,
    MappedPages,
    PagePart,
    ProbeFrame,
    PullFrame,
    StoredRange,
    TrafficClass,
)
from kvrs.transfer.connections import admit
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import Sender, SendingLink, SendingLinks, groups
from kvrs.transfer.peers import PAGES_SOCKET, Identity, Incoming, PageSink, PageSource, PinnedPages
from kvrs.transfer.shared_memory import (
    Region,
    close_all,
    foreign_user,
    in_threads,
    listen_in,
    remove_in,
)
from kvrs.transfer.stream import Filling, SocketStream, StalledError, page_socket, readable

log = logging.getLogger(__name__)


class LentFile:
    """Lends pages of one file over one connection; the file's descriptor is sent with the first
    answer.
    """

    def __init__(self, stream: SocketStream, source: PageSource) -> None:
        self._stream = stream
        self._source = source
        self._region: Region | None = None

    async def lend(self, pull: PullFrame) -> None:
        """Answer a MAP frame, and keep its pages pinned until the client's UNMAP.

        Raises:
            TransferError: the request includes a tail, or no UNMAP comes before the stall timeout.
        """
        request = pull.request
        if request.tail_index is not None:
            raise TransferError("MAP of a tail; allowed: full pages, or a part of each")
        async with self._source.pinned(request) as pinned:
            await self._answer(pull.request_id, pinned, request.part)
            await self._stream.receive_question(FrameType.UNMAP)

    async def _answer(self, request_id: int, pinned: PinnedPages, part: PagePart | None) -> None:
        region, known = pinned.region, self._region
        if region is None or known not in (None, region):
            raise TransferError("MAP of pages in another file")
        checksums = await _checksums(pinned, part)
        places = tuple(zip(pinned.offsets, checksums, strict=True))
        payload = MappedPages(region.size_bytes if known is None else 0, places).encode()
        answer = AnswerHeader(FrameType.MAPPED, request_id, len(places), 0, len(payload))
        start = self._stream.session.answer(answer, payload)
        descriptors: list[int] = []
        try:
            if known is None:
                descriptors.append(region.open())
            await self._stream.send_with(descriptors, start + payload)
        except OSError as error:
            raise TransferError(f"pages cannot be mapped: {error}") from None
        finally:
            close_all(descriptors)
        self._region = region


async def _checksums(pinned: PinnedPages, part: PagePart | None) -> list[int]:
    """Return the checksums of the pinned pages, or of their `part`. Those of pages that were never
    stored are computed now.
    """
    found = [pinned.checksum(index, part) for index in range(len(pinned.pages))]
    unknown = [index for index, checksum in enumerate(found) if checksum is None]

    def compute() -> None:
        for index in unknown:
            found[index] = _checksum(pinned.pages[index], part)

    await in_threads(sum(pinned.pages[index].nbytes for index in unknown), [compute])
    return [checksum for checksum in found if checksum is not None]


def _checksum(page: memoryview, part: PagePart | None) -> int:
    if part is None:
        return frames.checksum(page)
    runs = part.runs(page)
    cells = part.part.cells // len(runs)
    return part_checksum(b"".join([cell_checksums(run, cells) for run in runs]))


MAX_PEERS = 256
# Most connections that have not ended their hand-shake. A further one closes the oldest of the
# address with the most such connections: a silent one if there is any, once it has had `_CHANCE_S`
# to say its first byte; else one that has had `_GRACE_S`, in which every peer's hand-shake is over.
# Until then it waits.
MAX_STRANGERS = 256
_CHANCE_S, _GRACE_S = 0.02, 0.5
HANDSHAKE_TIMEOUT_S = 5.0
_BACKLOG = 512

# Pause of accepting after an error such as a lack of file descriptors: other connections must close
# before a new one can be accepted.
_PAUSE_S = 0.1


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Raises OSError: it cannot be bound."""
    listener = page_socket(host)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class AcceptLoop:
    """Serves each connection in a task of its own. The task closes the connection, and may end at
    any error of the peer.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], Coroutine[Any, Any, None]],
        failed: Callable[[BaseException], None] = lambda bug: None,
    ) -> None:
        """`serve` calls `proven` once the hand-shake of its connection is over; `failed` is called
        with an exception that `serve` raises by a bug.
        """
        self._serve, self._failed = serve, failed
        # Listening sockets, by the task that accepts their connections.
        self._listeners: dict[asyncio.Task[None], socket.socket] = {}
        self._connections: set[asyncio.Task[None]] = set()
        # Client's address and time of accepting of each connection whose hand-shake is not over,
        # oldest first; and those of them that have said nothing.
        self._strangers: dict[asyncio.Task[None], tuple[str, float]] = {}
        self._silent: dict[asyncio.Task[None], tuple[str, float]] = {}
        self._handshake_over = asyncio.Event()

    def listen(self, listener: socket.socket) -> None:
        """Accept connections of the socket until `close`, which also closes the socket."""
        self._listeners[asyncio.create_task(self._accept(listener))] = listener

    def proven(self) -> None:
        """Note that the hand-shake of the calling task's connection is over."""
        task = asyncio.current_task()
        assert task is not None
        self._no_stranger(task)

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        tasks = [*self._connections, *self._listeners]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners.values():
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            # After a failure dozens of peers connect at once: they wait, and none is refused.
            await readable(listener, None)
            await self._make_room()
            sock, address = await _accepted(listener)
            # Nothing is awaited before the connection has its task: a cancellation there would
            # leave the connection open.
            if len(self._connections) - len(self._strangers) >= MAX_PEERS:
                sock.close()
                continue
            task = asyncio.create_task(self._begin(sock))
            self._connections.add(task)
            self._strangers[task] = address, asyncio.get_running_loop().time()
            self._silent[task] = self._strangers[task]
            task.add_done_callback(partial(self._finished, sock))

    async def _begin(self, sock: socket.socket) -> None:
        """Serve a connection once its client has said something."""
        try:
            await readable(sock, HANDSHAKE_TIMEOUT_S)
        except StalledError:
            sock.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._silent.pop(task, None)
        await self._serve(sock)

    async def _make_room(self) -> None:
        """Wait until fewer than `MAX_STRANGERS` connections are in their hand-shake, or end one."""
        while len(self._strangers) >= MAX_STRANGERS:
            some, grace_s = self._strangers, _GRACE_S
            if self._silent:
                some, grace_s = self._silent, _CHANCE_S
            counts = Counter(address for address, _ in some.values())
            ((crowd, _),) = counts.most_common(1)
            oldest, since_s = next(
                (task, since_s) for task, (address, since_s) in some.items() if address == crowd
            )
            left_s = since_s + grace_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                del self._strangers[oldest]
                self._silent.pop(oldest, None)
                oldest.cancel()
                continue
            self._handshake_over.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._handshake_over.wait()

    def _no_stranger(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._silent.pop(task, None)
        self._handshake_over.set()

    def _finished(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        # A task that was cancelled before it ran has not closed its socket.
        sock.close()
        self._connections.discard(task)
        self._no_stranger(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("connection closed by a bug", exc_info=bug)
            self._failed(bug)


async def _accepted(listener: socket.socket) -> tuple[socket.socket, str]:
    """Accept the next connection; return it with its client's address. A cancelled call has
    accepted no connection.
    """
    while True:
        try:
            await readable(listener, None)
            sock, address = listener.accept()
            return sock, str(address[0]) if address else "this host"
        except BlockingIOError:
            continue  # The client left before it was accepted.
        except OSError as error:
            log.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(_PAUSE_S)


_PROBE_PIECE = bytes(1 << 16)


class PageServer:
    """Serves the connections of a listening socket, each in a task that ends at any error of the
    peer.
    """

    def __init__(
        self,
        source: PageSource,
        secret: bytes,
        settings: TransferSettings,
        links: SendingLinks,
        older: Sequence[bytes] = (),
    ) -> None:
        """`older`: the cluster's other secrets, which a client may prove as well."""
        self._source = source
        self._ring = secret, *older
        self._settings = settings
        self._links = links
        # Store for received pages; None: offers and pages are refused.
        self._sink: PageSink | None = None
        # Directory and name of the socket over which pages are lent; None: none are lent.
        self._lent_at: tuple[Path, str] | None = None
        self._accepting = AcceptLoop(self._serve)

    @property
    def faults(self) -> SendingFaults:
        """Faults that may be injected into this process's sends."""
        return self._links.faults

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, which the system chooses if `port` is 0.

        Raises:
            OSError: the address cannot be bound.
        """
        listener = listening(host, port)
        self._accepting.listen(listener)
        return int(listener.getsockname()[1])

    def lend(self, directory: Path, name: str = PAGES_SOCKET) -> None:
        """Let processes of this user and host map pages, over a UNIX socket in that directory.

        Raises:
            OSError: the socket cannot be made.
        """
        listener = listen_in(directory, name, socket.SOCK_STREAM)
        listener.setblocking(False)
        self._lent_at = directory, name
        self._accepting.listen(listener)

    def keep(self, sink: PageSink) -> None:
        """Put pages that peers send into the sink from now on."""
        self._sink = sink

    async def close(self) -> None:
        """Stop listening and cut every connection; all pages are unpinned when this returns."""
        await self._accepting.close()
        if self._lent_at is not None:
            remove_in(*self._lent_at)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            if sock.family == socket.AF_UNIX and (reason := foreign_user(sock)):
                raise TransferError(reason)
            own, client, stream = await self._shake_hands(sock)
            self._accepting.proven()
            lent = None
            if sock.family == socket.AF_UNIX:
                lent = LentFile(stream, self._source)
            await self._answer_all(stream, own, self._links.to(client.node), lent)
        except DamagedPageError as error:
            log.warning("page connection closed: %s", error)
        except (TransferError, OSError) as error:
            log.info("page connection closed: %s", error)

    async def _shake_hands(self, sock: socket.socket) -> tuple[Identity, Identity, SocketStream]:
        """Carry out the hand-shake; return the own identity that the client was given, the client's
        identity, and the connection's stream.
        """
        try:
            stream = SocketStream(sock, self._settings.stall_timeout_s)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                adopt = (lambda client: None) if self._sink is None else self._sink.adopt
                own, client = await admit(stream, self._ring, self._source.identity, adopt)
                return own, client, stream
        except TimeoutError:
            raise TransferError(f"no hand-shake within {HANDSHAKE_TIMEOUT_S} s") from None

    async def _answer_all(
        self, stream: SocketStream, own: Identity, link: SendingLink, lent: LentFile | None
    ) -> None:
        questions = [FrameType.PULL, FrameType.PROBE]
        if lent is not None:
            questions = [FrameType.MAP]
        elif self._sink is not None:
            questions += [FrameType.OFFER, FrameType.STORE]
        while True:
            await stream.wait_for_data()
            frame_type, body = await stream.receive_question(*questions)
            if self._source.identity() != own:
                # The epoch or pages given to the peer in the hand-shake have changed, so it must
                # connect anew.
                return
            if frame_type is FrameType.PULL:
                pull = frames.decode_pull(body)
                _check_part(pull, own)
                await self._answer_pull(stream, link, pull, own.page_bytes)
            elif frame_type is FrameType.MAP:
                assert lent is not None
                if not self.faults.is_idle(asyncio.get_running_loop().time()):
                    raise TransferError("faults are injected into what is sent")
                pull = frames.decode_pull(body)
                _check_part(pull, own)
                await lent.lend(pull)
            elif frame_type is FrameType.PROBE:
                with link.sending(stream, TrafficClass.HANDOFF) as sender:
                    await _send_probe_data(sender, stream.session, frames.decode_probe(body))
            else:
                await self._take(stream, frame_type, body, own.page_bytes)

    async def _answer_pull(
        self, stream: SocketStream, link: SendingLink, pull: PullFrame, page_bytes: int
    ) -> None:
        async with self._source.pinned(pull.request) as pinned:
            with link.sending(stream, pull.request.traffic) as sender:
                await _send_pages(sender, stream.session, pull, pinned, page_bytes)

    async def _take(
        self, stream: SocketStream, frame_type: FrameType, body: bytes, page_bytes: int
    ) -> None:
        """Answer an OFFER frame, or receive the pages behind a STORE frame and answer it."""
        assert self._sink is not None
        if frame_type is FrameType.OFFER:
            offer = frames.decode_offer(body)
            held = [self._sink.offer(offer.claim, offer.reserved_bytes, offer.tags)]
            await _send_held(stream, offer.request_id, held)
        else:
            store = frames.decode_store(body)
            held = await _receive_ranges(stream, self._sink, store.ranges, page_bytes)
            await _send_held(stream, store.request_id, held)


async def _send_held(stream: SocketStream, request_id: int, held: Sequence[HeldPages]) -> None:
    answer, payload = frames.encode_held(request_id, held)
    await stream.send(stream.session.answer(answer, payload), payload)


async def _send_pages(
    sender: Sender, session: Session, pull: PullFrame, pinned: PinnedPages, page_bytes: int
) -> None:
    pages = list(pinned.pages)
    complete = len(pages) == len(pull.request.tags)
    assert len(pages) <= len(pull.request.tags)
    if complete and pull.request.tail_index is not None:
        complete = pinned.tail is not None
        pages += [pinned.tail] if pinned.tail is not None else []
    assert all(page.nbytes == page_bytes for page in pages)
    for group in groups(pages):
        buffers: list[Bytes] = []
        for index, page in group:
            asked, part = page, pull.request.part
            if part is not None:
                runs = part.runs(page)
                asked = runs[0] if len(runs) == 1 else memoryview(b"".join(runs))
            checksum = pinned.checksum(index, part)
            if checksum is None:
                checksum = checksum_of(asked, part)
            answer = AnswerHeader(FrameType.PAGE, pull.request_id, index, checksum, len(asked))
            payload = sender.payload(asked)
            buffers += (session.answer(answer, payload), payload)
        if group[0][0] == 0:
            # The answer's start is sent alone, because the receiver's meter measures from its
            # arrival.
            await sender.send(buffers.pop(0))
        await sender.send(*buffers)
    last = FrameType.END if complete else FrameType.GONE
    await sender.send(session.answer(AnswerHeader(last, pull.request_id, len(pages), 0, 0)))


def _check_part(pull: PullFrame, own: Identity) -> None:
    part = pull.request.part
    if part is not None and part.page_cells != own.page_cells:
        raise TransferError(
            f"PULL of a part of pages of {part.layers} layers and {part.heads} heads, but a page "
            f"has {own.page_cells} cells"
        )


async def _send_probe_data(sender: Sender, session: Session, probe: ProbeFrame) -> None:
    answer = AnswerHeader(FrameType.PROBE_DATA, probe.request_id, 0, 0, probe.size_bytes)
    await sender.send(session.answer(answer))
    for start in range(0, probe.size_bytes, len(_PROBE_PIECE)):
        await sender.send(memoryview(_PROBE_PIECE)[: probe.size_bytes - start])


async def _receive_ranges(
    stream: SocketStream, sink: PageSink, ranges: Sequence[StoredRange], page_bytes: int
) -> list[HeldPages]:
    """Receive all pages of `ranges`, which follow each other on the stream, from the socket
    straight into the store's memory, visible only when their checksum is right; returns what is
    then held of each range's stream.

    Raises:
        TransferError: the peer was lost, or a page is damaged. The pages before it stay.
    """
    arriving: list[Incoming] = []
    held: list[HeldPages] = []
    try:
        arriving += (sink.begin(each.claim, each.first_page, each.tags) for each in ranges)
        await _receive_pages(stream, ranges, arriving, page_bytes)
        for incoming in arriving:
            await incoming.settle()
    finally:
        held += [incoming.end() for incoming in arriving]
    return held


async def _receive_pages(
    stream: SocketStream,
    ranges: Sequence[StoredRange],
    arriving: Sequence[Incoming],
    page_bytes: int,
) -> None:
    views = [list(incoming.views) for incoming in arriving]
    assert all(len(own) == len(each.tags) for own, each in zip(views, ranges, strict=True))
    assert all(view is None or view.nbytes == page_bytes for own in views for view in own)
    # All pages that are dropped are received into this buffer.
    dropped = memoryview(bytearray(page_bytes))
    pages = [dropped if view is None else view for own in views for view in own]
    macs = [memoryview(bytearray(SESSION_MAC_BYTES)) for _ in pages]
    filling = Filling(stream, [view for pair in zip(pages, macs, strict=True) for view in pair])
    for each, incoming, own in zip(ranges, arriving, views, strict=True):
        for index, (view, checksum) in enumerate(zip(own, each.checksums, strict=True)):
            page, mac = await filling.next(), await filling.next()
            if view is None:
                stream.session.skip()
                continue
            if frames.checksum(page) != checksum:
                raise DamagedPageError(
                    f"checksum of page {each.first_page + index} of {each.claim.stream!r} is wrong"
                )
            stream.session.check(mac, page)
            incoming.commit(index, checksum)
