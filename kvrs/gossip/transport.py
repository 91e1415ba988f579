"""Carries sealed gossip between nodes: datagrams, and TCP on the same port for what is too long for one or must arrive.

What a payload says is not known here. All is one-way: an answer is a packet of its own. There is no queue of our own: received
packets are handed on at once, and those that wait for their turn are in the kernel's buffer, of bounded size; what cannot be sent
at once is dropped and counted, because gossip says everything more than once. A flood is bounded by `ReceiveRates`, a crowd by
the number of connections.

A first contact costs one round trip: the receiver cannot tell yet whether the packet is new (see `seal`), says so, and the packet
is sealed and sent again. A run that another has replaced is told so by whatever `outdated` says.
"""

import asyncio
import contextlib
import errno
import socket
import struct
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvrs.gossip.rates import Address, Rates, ReceiveRates
from kvrs.gossip.seal import MAX_OVERHEAD_BYTES, MAX_PAYLOAD_BYTES, Opened, Outdated, Seal, Unproven
from kvrs.ids import NodeId

_LENGTH = struct.Struct("!I")
_DATAGRAMS_PER_TURN = 64  # Then others have the event loop.
_SOCKET_BUFFER_BYTES = 1 << 20  # About a thousand datagrams.
_MAX_UNHEARD = 1024  # Nodes to which the last packet is kept, because they were never heard.
_UNHEARD_S = 1.0  # What is older says nothing new.
_PORT_TRIES = 16


class Drop(StrEnum):
    """Why something was dropped that is no fault of a packet; those are counted by `Seal.refused`."""

    RATE = "rate"  # More packets than are looked at.
    CONNECTIONS = "connections"  # More connections than are served.
    SLOW = "slow"  # A connection that took too long, from here or from there.
    CUT = "cut"  # A connection that ended before its packet did, or was not to be had.
    LONG = "long"  # A connection announced more than a frame's most bytes.
    NO_ADDRESS = "no_address"  # Nobody knows where the node is.
    SOCKET = "socket"  # The kernel took no datagram.
    SENDING = "sending"  # More connections to others than are held at once.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    datagram_payload_bytes: int = 1280  # With what is around it, this fits every usual link in one piece.
    rates: Rates = field(default_factory=Rates)
    stream_s: float = 5.0  # All that one connection may take; gossip is stale after that.
    accepted: int = 16  # Connections from others at a time; half of them from one host. Each holds a frame at most.
    sending: int = 16  # Connections to others at a time.
    sending_to_one: int = 2  # So that one who does not answer leaves room for the rest.


class Transport:
    """Hands what others sent to `receive(sender, payload)`; `address_of` says where a node is, if that is known.

    `outdated(sender, epoch)` is what a run of the sender hears that was replaced by that epoch.
    """

    def __init__(
        self,
        seal: Seal,
        address_of: Callable[[NodeId], Address | None],
        receive: Callable[[NodeId, bytes], None],
        clock: Callable[[], float],
        limits: Limits = Limits(),
        outdated: Callable[[NodeId, int], bytes] = lambda sender, epoch: b"",
    ) -> None:
        self._seal, self._address_of, self._receive, self._clock, self._limits = seal, address_of, receive, clock, limits
        self._outdated = outdated
        self._rates = ReceiveRates(limits.rates, clock())
        # One byte more than allowed, so that a datagram that is too long is seen to be.
        self._buffer = bytearray(limits.datagram_payload_bytes + MAX_OVERHEAD_BYTES + 1)
        self._unheard: dict[NodeId, tuple[bytes, float]] = {}
        self._accepted: dict[asyncio.Task[None], str] = {}
        self._sending: dict[asyncio.Task[None], NodeId] = {}
        self.dropped: Counter[Drop] = Counter()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen at a numeric address; the port, which is the same for both ways.

        Raises:
            OSError: the port is in use, or there is no such address.
        """
        self._udp, tcp = _bind(host, port, self._limits.accepted)
        self._server = await asyncio.start_server(self._accept, sock=tcp, backlog=self._limits.accepted)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._udp, self._read_datagrams)
        bound: int = self._udp.getsockname()[1]
        return bound

    async def close(self) -> None:
        self._loop.remove_reader(self._udp)
        self._udp.close()
        self._server.close()
        tasks = [*self._accepted, *self._sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    def send(self, to: NodeId, payload: bytes, *, stream: bool = False) -> None:
        """Send without waiting: as a datagram, or over TCP if that is asked for or the payload needs it."""
        if (address := self._address_of(to)) is None:
            self.dropped[Drop.NO_ADDRESS] += 1
            return
        # Whom we speak to may answer, whatever strangers send meanwhile.
        self._rates.trust(address, self._clock())
        self._rates.trust(_tcp_source(address[0]), self._clock())
        if stream or len(payload) > self._limits.datagram_payload_bytes:
            self._start_sending(to, address, payload)
        else:
            if not self._seal.can_prove_to(to) and len(self._unheard) < _MAX_UNHEARD:
                self._unheard[to] = payload, self._clock()
            self._send_datagram(address, self._seal.seal(to, payload))

    def _send_datagram(self, address: Address, packet: bytes) -> None:
        try:
            self._udp.sendto(packet, address)
        except OSError:  # Its buffer is full, or there is no way: as if lost on the way.
            self.dropped[Drop.SOCKET] += 1

    def _read_datagrams(self) -> None:
        view = memoryview(self._buffer)
        for _ in range(_DATAGRAMS_PER_TURN):
            try:
                size, source = self._udp.recvfrom_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:  # An error of something sent earlier, which was reported here.
                self.dropped[Drop.SOCKET] += 1
                continue
            self._take_datagram(view[:size], source[:2])

    def _take_datagram(self, packet: memoryview, source: Address) -> None:
        now_s = self._clock()
        if not self._rates.admit(source, now_s):
            self.dropped[Drop.RATE] += 1
            return
        match self._seal.open(packet, self._limits.datagram_payload_bytes):
            case Opened(sender, payload):
                self._rates.trust(source, now_s)
                self._hand_on(sender, payload)
            case Unproven(sender):
                # To where it came from, because a newcomer's address is not known yet. A packet that was recorded and is sent
                # with another's address has this effect once, and the answer is not longer than the packet.
                self._send_datagram(source, self._seal.seal(sender, b""))
            case Outdated() as old:
                self._send_datagram(source, self._news_for(old))

    def _news_for(self, old: Outdated) -> bytes:
        return self._seal.seal(old.sender, self._outdated(old.sender, old.epoch), old.run)

    def _hand_on(self, sender: NodeId, payload: bytes) -> None:
        waiting = self._unheard.pop(sender, None)
        if waiting is not None and self._clock() - waiting[1] <= _UNHEARD_S:
            self.send(sender, waiting[0])
        if payload:
            self._receive(sender, payload)

    def _start_sending(self, to: NodeId, address: Address, payload: bytes) -> None:
        to_one = sum(node == to for node in self._sending.values())
        if len(self._sending) >= self._limits.sending or to_one >= self._limits.sending_to_one:
            self.dropped[Drop.SENDING] += 1
            return
        task = asyncio.create_task(self._in_time(self._send_stream(to, address, payload)))
        self._sending[task] = to
        task.add_done_callback(self._sending.pop)

    async def _in_time(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._limits.stream_s):
                await work
        except TimeoutError:
            self.dropped[Drop.SLOW] += 1
        except (OSError, EOFError):
            self.dropped[Drop.CUT] += 1

    async def _send_stream(self, to: NodeId, address: Address, payload: bytes) -> None:
        reader, writer = await asyncio.open_connection(*address)
        try:
            # The second time knows what to echo, if that was what the first time lacked.
            for _ in range(2):
                packet = self._seal.seal(to, payload)
                await _write_packet(writer, packet)
                answer = await self._read_packet(reader, self._limits.datagram_payload_bytes)
                match None if answer is None else self._seal.open(answer):
                    case Opened(sender, b"") if sender == to:
                        continue
                    case Opened(sender, news) if sender == to:
                        self._receive(sender, news)
                return
        finally:
            # Whatever is still to be sent would be waited for.
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        host = peer[0] if peer else ""  # It may be gone already.
        of_host = sum(other == host for other in self._accepted.values())
        if len(self._accepted) >= self._limits.accepted or of_host >= max(1, self._limits.accepted // 2):
            self.dropped[Drop.CONNECTIONS] += 1
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer, _tcp_source(host)))
        self._accepted[task] = host
        task.add_done_callback(self._accepted.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: Address) -> None:
        try:
            await self._in_time(self._take_stream(reader, writer, source))
        finally:
            writer.close()

    async def _take_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: Address) -> None:
        # The end of the connection says that the packet was taken, or refused; a packet, that it is to be sealed again.
        for _ in range(2):
            if not self._rates.admit(source, self._clock()):
                self.dropped[Drop.RATE] += 1
                return
            packet = await self._read_packet(reader, MAX_PAYLOAD_BYTES)
            if packet is None:
                return
            match self._seal.open(packet):
                case Opened(sender, payload):
                    self._rates.trust(source, self._clock())
                    self._hand_on(sender, payload)
                    return
                case Unproven(sender):
                    await _write_packet(writer, self._seal.seal(sender, b""))
                case Outdated() as old:
                    await _write_packet(writer, self._news_for(old))
                    return
                case _:
                    return

    async def _read_packet(self, reader: asyncio.StreamReader, most_payload_bytes: int) -> bytes | None:
        """The next packet of a connection; None at its end, or if it is longer than it may be.

        Raises:
            EOFError: the connection ended in the middle of a packet.
        """
        try:
            head = await reader.readexactly(_LENGTH.size)
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return None
            raise
        (size,) = _LENGTH.unpack(head)
        if size > most_payload_bytes + MAX_OVERHEAD_BYTES:
            self.dropped[Drop.LONG] += 1
            return None
        return await reader.readexactly(size)


async def _write_packet(writer: asyncio.StreamWriter, packet: bytes) -> None:
    writer.write(_LENGTH.pack(len(packet)) + packet)
    await writer.drain()


def _tcp_source(host: str) -> Address:
    """Connections come from any port, so those of one host share a bucket."""
    return host, 0


def _bind(host: str, port: int, backlog: int) -> tuple[socket.socket, socket.socket]:
    """A datagram and a listening socket on one port; 0 is any that both can have."""
    for left in reversed(range(_PORT_TRIES)):
        with contextlib.ExitStack() as opened:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            udp = opened.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            tcp = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            udp.setblocking(False)
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
            udp.bind((host, port))
            try:
                tcp.bind(udp.getsockname()[:2])
                tcp.listen(backlog)  # With SO_REUSEADDR only this finds out whether somebody listens there.
            except OSError as error:
                if port or not left or error.errno != errno.EADDRINUSE:
                    raise
                continue
            opened.pop_all()
            return udp, tcp
    raise AssertionError("the last try either returns or raises")
