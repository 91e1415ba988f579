"""Serves the pages of one instance or agent to whoever knows the cluster's secret, and takes pages where there is a sink."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial

from kvrs.errors import DamagedPageError, TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import Answer, Bytes, FrameType, Probe, Pull, TrafficClass
from kvrs.transfer.config import TransferSettings
from kvrs.transfer.faults import SendingFaults
from kvrs.transfer.handshake import admit, page_key
from kvrs.transfer.links import Sender, SendingLink, SendingLinks, groups
from kvrs.transfer.peers import Identity, PageSink, PageSource, PinnedPages
from kvrs.transfer.receiver import receive_runs
from kvrs.transfer.stream import SocketStream, page_socket, readable

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_STRANGERS = 32  # Of these, so many may be in their hand-shake at a time; more wait in the listener's line.
HANDSHAKE_TIMEOUT_S = 5.0
_BACKLOG = 128

# File descriptors ran out: others must be closed before accepting makes sense again.
_ACCEPT_PAUSE_S = 0.1

_PROBE_PIECE = bytes(1 << 16)


class PageServer:
    """One listening socket; one task per connection, which ends when anything about its peer is wrong."""

    def __init__(
        self,
        identity: Callable[[], Identity],
        source: PageSource,
        secret: bytes,
        settings: TransferSettings,
        links: SendingLinks,
        sink: PageSink | None = None,
        older: Sequence[bytes] = (),
    ) -> None:
        """`older`: the cluster's other secrets, with which a client may come too."""
        self._identity = identity
        self._source = source
        self._key, self._older_keys = page_key(secret), [page_key(each) for each in older]
        self._settings = settings
        self._links = links
        self._sink = sink  # None: nothing can be stored here.
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers = asyncio.Semaphore(MAX_STRANGERS)

    @property
    def faults(self) -> SendingFaults:
        """What may be done on purpose to all that this process sends."""
        return self._links.faults

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chooses if `port` is 0.

        Raises:
            OSError: the address cannot be had.
        """
        assert self._listener is None, "started twice"
        listener = page_socket(host)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Stop listening and cut every connection; all pages are unpinned when this returns."""
        tasks = [*self._connections, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            # After a failure dozens of peers come in the same moment: they wait, and none of them is sent away.
            await self._strangers.acquire()
            sock = await _accepted(listener)
            # Nothing is awaited until the connection has its task, which closes it.
            if len(self._connections) >= MAX_CONNECTIONS:
                sock.close()
                self._strangers.release()
                continue
            task = asyncio.create_task(self._serve(sock))
            self._connections.add(task)
            task.add_done_callback(partial(self._finished, sock))

    def _finished(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        # Here and not in the task, which may have been cancelled before it ran at all.
        sock.close()
        self._connections.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("page connection closed by a bug", exc_info=bug)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            own, client, stream = await self._meet(sock)
            await self._answer_all(stream, own, self._links.to(client.node))
        except DamagedPageError as error:
            log.warning("page connection closed: %s", error)
        except (TransferError, OSError) as error:
            log.info("page connection closed: %s", error)

    async def _meet(self, sock: socket.socket) -> tuple[Identity, Identity, SocketStream]:
        """Hand-shake: who we said that we are, and who the client is."""
        try:
            stream = SocketStream(sock, self._settings.stall_timeout_s)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                adopt = (lambda client: None) if self._sink is None else self._sink.adopt
                own, client = await admit(stream, self._key, self._identity, adopt, self._older_keys)
                return own, client, stream
        except TimeoutError:
            raise TransferError(f"no hand-shake within {HANDSHAKE_TIMEOUT_S} s") from None
        finally:
            self._strangers.release()

    async def _answer_all(self, stream: SocketStream, own: Identity, link: SendingLink) -> None:
        questions = (FrameType.PULL, FrameType.PROBE) + (() if self._sink is None else (FrameType.OFFER, FrameType.STORE))
        while True:
            await stream.wait_for_data()
            frame_type, body = await stream.receive_frame(*questions)
            if self._identity() != own:
                # The peer was promised another epoch, or other pages: it has to look again whom it talks to.
                return
            if frame_type is FrameType.PULL:
                await self._answer_pull(stream, link, frames.decode_pull(body), own.page_bytes)
            elif frame_type is FrameType.PROBE:
                with link.sending(stream, TrafficClass.HANDOFF) as sender:
                    await _send_probe_data(sender, frames.decode_probe(body))
            else:
                await self._take(stream, frame_type, body, own.page_bytes)

    async def _answer_pull(self, stream: SocketStream, link: SendingLink, pull: Pull, page_bytes: int) -> None:
        pinned = await self._source.pin(pull.request)
        try:
            with link.sending(stream, pull.request.traffic) as sender:
                await _send_pages(sender, pull, pinned, page_bytes)
        finally:
            self._source.unpin(pinned)

    async def _take(self, stream: SocketStream, frame_type: FrameType, body: bytes, page_bytes: int) -> None:
        """Answer an offer, or take what is to be stored."""
        assert self._sink is not None
        if frame_type is FrameType.OFFER:
            offer = frames.decode_offer(body)
            held = [self._sink.offer(offer.claim, offer.reserved_bytes, offer.tags)]
            await stream.send(frames.encode_held(offer.request_id, held))
        else:
            store = frames.decode_store(body)
            held = await receive_runs(stream, self._sink, store.runs, page_bytes)
            await stream.send(frames.encode_held(store.request_id, held))


async def _accepted(listener: socket.socket) -> socket.socket:
    """The next connection; whoever is cancelled here has taken none."""
    while True:
        try:
            await readable(listener, None)
            return listener.accept()[0]
        except BlockingIOError:
            continue  # It left before it was taken.
        except OSError as error:
            log.warning("cannot accept a page connection: %s", error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)


async def _send_pages(sender: Sender, pull: Pull, pinned: PinnedPages, page_bytes: int) -> None:
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
            checksum = pinned.checksums[index] if index < len(pinned.checksums) else frames.checksum(page)
            answer = Answer(FrameType.PAGE, pull.request_id, index, checksum, len(page))
            buffers += (frames.encode_answer(answer), sender.on_its_way(page))
        if group[0][0] == 0:
            # Ahead of all: its arrival is what the receiver's meter measures from.
            await sender.send(buffers.pop(0))
        await sender.send(*buffers)
    await sender.send(_last_answer(pull.request_id, FrameType.END if complete else FrameType.GONE, len(pages)))


async def _send_probe_data(sender: Sender, probe: Probe) -> None:
    await sender.send(frames.encode_answer(Answer(FrameType.PROBE_DATA, probe.request_id, 0, 0, probe.size_bytes)))
    for start in range(0, probe.size_bytes, len(_PROBE_PIECE)):
        await sender.send(memoryview(_PROBE_PIECE)[: probe.size_bytes - start])


def _last_answer(request_id: int, type_: FrameType, index: int) -> bytes:
    return frames.encode_answer(Answer(type_, request_id, index, 0, 0))
