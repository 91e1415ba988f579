"""Serves the pages of one instance to whoever knows the cluster's secret."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvrs.errors import TransferError
from kvrs.ids import NodeId
from kvrs.protocol import frames
from kvrs.protocol.frames import Answer, Bytes, FrameType, Probe, Pull
from kvrs.transfer.config import TransferSettings
from kvrs.transfer.faults import SendingFaults
from kvrs.transfer.handshake import admit, page_key
from kvrs.transfer.limiter import RateLimiter
from kvrs.transfer.peers import Identity, PageSource, PinnedPages
from kvrs.transfer.stream import SocketStream, page_socket

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_STRANGERS = 32  # Of these, so many may be in their hand-shake at a time.
HANDSHAKE_TIMEOUT_S = 5.0
_BACKLOG = 128

# Small pages are gathered up to this much per system call: about what the sockets hold, so that sender and receiver
# do not take turns more often than they must when they share a CPU. The kernel takes at most 1024 buffers, two per page.
_GATHER_BYTES = 1 << 20
_GATHER_PAGES = 256

# File descriptors ran out: others must be closed before accepting makes sense again.
_ACCEPT_PAUSE_S = 0.1

_PROBE_PIECE = bytes(1 << 16)


class PageServer:
    """One listening socket; one task per connection, which ends when anything about its peer is wrong."""

    def __init__(self, identity: Callable[[], Identity], source: PageSource, secret: bytes, settings: TransferSettings) -> None:
        self._identity = identity
        self._source = source
        self._key = page_key(secret)
        self._settings = settings
        self._limiters: dict[NodeId, RateLimiter] = {}
        self.faults = SendingFaults()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers = 0

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
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot accept a page connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._connections) >= MAX_CONNECTIONS or self._strangers >= MAX_STRANGERS:
                sock.close()
                continue
            self._strangers += 1
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
            await self._answer_all(stream, own, self._link(own, client))
        except (TransferError, OSError) as error:
            log.info("page connection closed: %s", error)

    async def _meet(self, sock: socket.socket) -> tuple[Identity, Identity, SocketStream]:
        """Hand-shake: who we said that we are, and who the client is."""
        try:
            stream = SocketStream(sock, self._settings.stall_timeout_s)
            own = self._identity()
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                return own, await admit(stream, self._key, own), stream
        except TimeoutError:
            raise TransferError(f"no hand-shake within {HANDSHAKE_TIMEOUT_S} s") from None
        finally:
            self._strangers -= 1

    async def _answer_all(self, stream: SocketStream, own: Identity, link: "_Link") -> None:
        while True:
            await stream.wait_for_data()
            frame_type, body = await stream.receive_frame(FrameType.PULL, FrameType.PROBE)
            if self._identity() != own:
                # The peer was promised another epoch: it has to look again whom it talks to.
                return
            sender = _Sender(stream, link)
            if frame_type is FrameType.PULL:
                await self._answer_pull(sender, frames.decode_pull(body), own.page_bytes)
            else:
                await sender.probe_data(frames.decode_probe(body))

    async def _answer_pull(self, sender: "_Sender", pull: Pull, page_bytes: int) -> None:
        pinned = self._source.pin(pull.request)
        try:
            await sender.pages(pull, pinned, page_bytes)
        finally:
            self._source.unpin(pinned)

    def _link(self, own: Identity, client: Identity) -> "_Link":
        """The link to the client's node. Within a node nothing is limited: there is no link."""
        limiter = None
        if self._settings.link_bytes_per_s is not None and client.node != own.node:
            limiter = self._limiters.setdefault(client.node, RateLimiter(self._settings.link_bytes_per_s))
        return _Link(self.faults, client.node, limiter, self._settings.stall_timeout_s)


class _Link:
    """The way to one node: its usual limit, and what faults on purpose make of it at the moment."""

    def __init__(self, faults: SendingFaults, node: NodeId, usual: RateLimiter | None, patience_s: float) -> None:
        self.faults = faults
        self._node = node
        self._usual = usual
        self._patience_s = patience_s

    def limiter(self) -> RateLimiter | None:
        return self.faults.limiter(self._node, self._usual, asyncio.get_running_loop().time())

    async def carry(self) -> None:
        """Wait while the link is cut: the peer hears nothing, as from a wire that was pulled.

        Raises:
            TransferError: it is still cut when the peer must have given up.
        """
        cut_for_s = self.faults.cut_for_s(self._node, asyncio.get_running_loop().time())
        if cut_for_s > 0:
            await asyncio.sleep(min(cut_for_s, self._patience_s))
            if cut_for_s > self._patience_s:
                raise TransferError(f"the link to {self._node!r} is cut, on purpose")


class _Sender:
    """Writes answers, at the pace of the link if that is limited."""

    def __init__(self, stream: SocketStream, link: _Link) -> None:
        self._stream = stream
        self._link = link

    async def pages(self, pull: Pull, pinned: PinnedPages, page_bytes: int) -> None:
        pages = list(pinned.pages)
        complete = len(pages) == len(pull.request.tags)
        assert len(pages) <= len(pull.request.tags)
        if complete and pull.request.tail_index is not None:
            complete = pinned.tail is not None
            pages += [pinned.tail] if pinned.tail is not None else []
        assert all(page.nbytes == page_bytes for page in pages)
        for group in _groups(pages):
            await self._link.carry()
            if self._link.limiter() is None:
                await self._send_gathered(pull.request_id, group)
            else:
                for index, page in group:
                    await self._send_paced(_page_answer(pull.request_id, index, page), self._link.faults.payload(page))
        await self._stream.send(_last_answer(pull.request_id, FrameType.END if complete else FrameType.GONE, len(pages)))

    async def probe_data(self, probe: Probe) -> None:
        answer = frames.encode_answer(Answer(FrameType.PROBE_DATA, probe.request_id, 0, 0, probe.size_bytes))
        left = probe.size_bytes
        while left > 0:
            piece = memoryview(_PROBE_PIECE)[:left]
            await self._send_paced(answer, piece)
            answer = b""
            left -= len(piece)

    async def _send_gathered(self, request_id: int, group: Sequence[tuple[int, memoryview]]) -> None:
        buffers: list[Bytes] = []
        for index, page in group:
            buffers += (_page_answer(request_id, index, page), self._link.faults.payload(page))
        await self._stream.send(*buffers)

    async def _send_paced(self, prologue: bytes, payload: memoryview) -> None:
        # The prologue goes ahead unpaced: its arrival is what the receiver's meter measures from.
        await self._link.carry()
        if self._link.limiter() is None:
            await self._stream.send(prologue, payload)
            return
        await self._stream.send(prologue)
        now_s = asyncio.get_running_loop().time
        while payload:
            # Asked for every piece: a fault may begin or end within a page.
            limiter = self._link.limiter()
            chunk = payload[: limiter.chunk_bytes] if limiter is not None else payload
            if limiter is not None:
                await asyncio.sleep(limiter.delay_s(len(chunk), now_s()))
            await self._link.carry()
            await self._stream.send(chunk)
            payload = payload[len(chunk) :]


def _groups(pages: Sequence[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    size = min(max(1, _GATHER_BYTES // len(pages[0])), _GATHER_PAGES) if pages else 1
    numbered = list(enumerate(pages))
    return (numbered[start : start + size] for start in range(0, len(numbered), size))


def _page_answer(request_id: int, index: int, page: memoryview) -> bytes:
    return frames.encode_answer(Answer(FrameType.PAGE, request_id, index, frames.checksum(page), len(page)))


def _last_answer(request_id: int, type_: FrameType, index: int) -> bytes:
    return frames.encode_answer(Answer(type_, request_id, index, 0, 0))
