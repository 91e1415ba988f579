"""Everything that this process sends to other nodes: who sends when, by class of traffic, within the rate of the link."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf

from kvrs.errors import TransferError
from kvrs.ids import NodeId
from kvrs.protocol.frames import Bytes, TrafficClass
from kvrs.transfer.config import TransferSettings
from kvrs.transfer.faults import SendingFaults
from kvrs.transfer.limiter import LinkTurns, Turn
from kvrs.transfer.stream import SocketStream

# A peer gives up an end that is silent for as long as it is patient. Who is kept waiting by others of a higher class shows
# several times in that span that it is there.
_SIGNS_OF_LIFE = 4

# Small pages are gathered up to this much per system call: about what the sockets hold, so that sender and receiver
# do not take turns more often than they must when they share a CPU. The kernel takes at most 1024 buffers, two per page.
_GATHER_BYTES = 1 << 20
_GATHER_PAGES = 256


class SendingLinks:
    """The links from this process to every node. One per process, shared by all that sends pages in it."""

    def __init__(self, settings: TransferSettings, faults: SendingFaults, own_node: NodeId) -> None:
        self.faults = faults
        self._settings = settings
        self._own_node = own_node
        self._links: dict[NodeId, SendingLink] = {}

    def to(self, node: NodeId) -> "SendingLink":
        """The link to a node. Within the own node nothing is limited: there is no link."""
        if (link := self._links.get(node)) is None:
            usual = None if node == self._own_node else self._settings.link_bytes_per_s
            link = self._links[node] = SendingLink(self.faults, node, usual, self._settings.stall_timeout_s)
        return link


class SendingLink:
    """The way to one node: its usual rate, what faults on purpose make of it at the moment, and who waits to send."""

    def __init__(self, faults: SendingFaults, node: NodeId, usual_bytes_per_s: float | None, patience_s: float) -> None:
        self.faults = faults
        self._node = node
        self._usual_bytes_per_s = usual_bytes_per_s
        self._patience_s = patience_s
        self._turns = LinkTurns()
        self._waiting: dict[Turn, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def sending(self, stream: SocketStream, traffic: TrafficClass) -> Iterator["Sender"]:
        """One transfer over this link, from its first byte to its last."""
        self._turns.begin(traffic)
        try:
            yield Sender(stream, self, traffic)
        finally:
            self._turns.end(traffic)
            if self._turns.somebody_waits:
                self._serve()

    async def turn(self, traffic: TrafficClass, wanted_bytes: int) -> int:
        """Wait for the right to send; returns how many bytes, at least one.

        Raises:
            TransferError: the link is cut, on purpose, and still is when the peer must have given up: it hears nothing, as from
                a wire that was pulled.
        """
        now_s = asyncio.get_running_loop().time
        turn = self._turns.ask(traffic, wanted_bytes, now_s())
        try:
            self._serve()
            gives_up_s = now_s() + self._patience_s
            while not turn.granted_bytes:
                await self._wait(turn)
                if turn.granted_bytes or self._turns.grant_sign_of_life(turn, now_s()):
                    break
                if self._turns.is_cut and now_s() >= gives_up_s:
                    raise TransferError(f"the link to {self._node!r} is cut, on purpose")
        finally:
            if not turn.granted_bytes:
                self._turns.withdraw(turn)
        return turn.granted_bytes

    async def _wait(self, turn: Turn) -> None:
        """Until it has its turn, or until it is time to show that this end is there."""
        self._waiting[turn] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._patience_s / _SIGNS_OF_LIFE):
                await self._waiting[turn]
        except TimeoutError:
            # A fault may have begun or ended, which nobody announces.
            self._serve()
        finally:
            del self._waiting[turn]

    def _serve(self) -> None:
        """Give everybody its turn whose turn it is, and come back when it is the next one's."""
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
        if self._turns.somebody_waits:
            due_s = min(rate.until_s, self._turns.next_s() or inf)
            self._timer = loop.call_at(due_s, self._serve) if due_s < inf else None


class Sender:
    """Writes to one connection, whenever its class of traffic has its turn on the link."""

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

    def on_its_way(self, page: memoryview) -> memoryview:
        """What is sent for a page whose checksum was taken: the page, unless a fault damages it."""
        return self._link.faults.payload(page)


def split(buffers: Sequence[Bytes], size: int) -> tuple[list[Bytes], list[Bytes]]:
    """The first `size` bytes of `buffers`, and the rest."""
    first: list[Bytes] = []
    for index, buffer in enumerate(buffers):
        if size < len(buffer):
            view = memoryview(buffer)
            return [*first, view[:size]] if size else first, [view[size:], *buffers[index + 1 :]]
        first.append(buffer)
        size -= len(buffer)
    return first, []


def groups(pages: Sequence[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """Pages with their numbers, as many at a time as are worth a system call."""
    size = min(max(1, _GATHER_BYTES // len(pages[0])), _GATHER_PAGES) if pages else 1
    numbered = list(enumerate(pages))
    return (numbered[start : start + size] for start in range(0, len(numbered), size))
