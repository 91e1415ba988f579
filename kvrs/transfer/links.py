"""Senders to other nodes, by class of traffic and within each link's rate.

The event loop's side of `limiter.py`.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

from kvrs.config.sections import TransferSettings
from kvrs.errors import TransferError
from kvrs.ids import NodeId
from kvrs.protocol.frames import Bytes
from kvrs.protocol.pages import TrafficClass
from kvrs.transfer.limiter import LinkTurns, SendingFaults, Turn
from kvrs.transfer.stream import SocketStream

# Number of keepalive bytes that a waiting transfer sends per stall timeout, because a peer gives up
# a connection on which nothing comes.
_KEEPALIVES = 4

# Bytes of small pages that are gathered for one system call: about what the sockets hold, so that
# sender and receiver on a shared CPU do not alternate more than needed. `_GATHER_PAGES`: the kernel
# takes at most 1024 buffers, two per page.
_GATHER_BYTES = 1 << 20
_GATHER_PAGES = 256


class SendingLinks:
    """The links from this process to every node, one object for all senders of the process."""

    def __init__(self, settings: TransferSettings, faults: SendingFaults, own_node: NodeId) -> None:
        self.faults = faults
        self._settings = settings
        self._own_node = own_node
        self._links: dict[NodeId, SendingLink] = {}

    def to(self, node: NodeId) -> "SendingLink":
        """The link to a node. Traffic within the own node is unlimited."""
        if (link := self._links.get(node)) is None:
            usual = None if node == self._own_node else self._settings.link_bytes_per_s
            link = self._links[node] = SendingLink(
                self.faults, node, usual, self._settings.stall_timeout_s
            )
        return link


class SendingLink:
    """The link to one node: its usual rate, its rate under injected faults, and its waiting
    transfers.
    """

    def __init__(
        self,
        faults: SendingFaults,
        node: NodeId,
        usual_bytes_per_s: float | None,
        stall_timeout_s: float,
    ) -> None:
        self.faults = faults
        self._node = node
        self._usual_bytes_per_s = usual_bytes_per_s
        self._stall_timeout_s = stall_timeout_s
        self._turns = LinkTurns()
        self._waiting: dict[Turn, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def sending(self, stream: SocketStream, traffic: TrafficClass) -> Iterator["Sender"]:
        """Make a `Sender` for one transfer over this link, which lasts for the block."""
        self._turns.begin(traffic)
        try:
            yield Sender(stream, self, traffic)
        finally:
            self._turns.end(traffic)
            if self._turns.has_waiting:
                self._serve()

    async def turn(self, traffic: TrafficClass, wanted_bytes: int) -> int:
        """Wait for the right to send; return the number of bytes that may be sent now, at least
        one.

        Raises:
            TransferError: the link was cut by a fault for the whole stall timeout, so that the
                peer has given up.
        """
        now_s = asyncio.get_running_loop().time
        turn = self._turns.ask(traffic, wanted_bytes, now_s())
        try:
            self._serve()
            gives_up_s = now_s() + self._stall_timeout_s
            while not turn.granted_bytes:
                await self._wait(turn)
                if turn.granted_bytes or self._turns.grant_keepalive(turn, now_s()):
                    break
                if self._turns.is_cut and now_s() >= gives_up_s:
                    raise TransferError(f"the link to {self._node!r} is cut by an injected fault")
        finally:
            if not turn.granted_bytes:
                self._turns.withdraw(turn)
        return turn.granted_bytes

    async def _wait(self, turn: Turn) -> None:
        """Wait for the turn, or until a keepalive is due."""
        self._waiting[turn] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._stall_timeout_s / _KEEPALIVES):
                await self._waiting[turn]
        except TimeoutError:
            # An injected fault may have begun or ended meanwhile, which changes the link's rate.
            self._serve()
        finally:
            del self._waiting[turn]

    def _serve(self) -> None:
        """Grant due turns, and schedule the next call of this method."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        rate = self.faults.rate(self._node, self._usual_bytes_per_s, now_s)
        self._turns.set_rate(rate.bytes_per_s, now_s)
        for turn in self._turns.grant(now_s):
            if (waiting := self._waiting.get(turn)) is not None and not waiting.done():
                waiting.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._turns.has_waiting:
            due_s = min(rate.until_s, self._turns.next_s() or inf)
            self._timer = loop.call_at(due_s, self._serve) if due_s < inf else None


class Sender:
    """Writes to one connection, in the turns of its traffic class."""

    def __init__(self, stream: SocketStream, link: SendingLink, traffic: TrafficClass) -> None:
        self._stream = stream
        self._link = link
        self._traffic = traffic

    async def send(self, *buffers: Bytes) -> None:
        left: Sequence[Bytes] = buffers
        size = sum(len(buffer) for buffer in buffers)
        while size > 0:
            granted = await self._link.turn(self._traffic, size)
            now, left = (left, ()) if granted == size else split(left, granted)
            await self._stream.send(*now)
            size -= granted

    def payload(self, page: memoryview) -> memoryview:
        """Return the bytes to send for a checksummed page: the page itself, or a damaged copy while
        a fault damages pages.
        """
        return self._link.faults.payload(page)


def split(buffers: Sequence[Bytes], size: int) -> tuple[list[Bytes], list[Bytes]]:
    """Return the first `size` bytes of `buffers`, and the rest."""
    first: list[Bytes] = []
    for index, buffer in enumerate(buffers):
        if size < len(buffer):
            view = memoryview(buffer)
            return [*first, view[:size]] if size else first, [view[size:], *buffers[index + 1 :]]
        first.append(buffer)
        size -= len(buffer)
    return first, []


def groups(pages: Sequence[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """Return the pages with their indexes, in groups of about `_GATHER_BYTES` for one system call
    each.
    """
    size = min(max(1, _GATHER_BYTES // len(pages[0])), _GATHER_PAGES) if pages else 1
    numbered = list(enumerate(pages))
    return (numbered[start : start + size] for start in range(0, len(numbered), size))
