"""Transport of sealed gossip packets: datagrams, and TCP on the same port for packets that are too
long for one or must arrive.

Payloads are opaque here. All packets are one-way: an answer is a packet of its own. There is no
queue in user space: received packets are delivered at once, waiting ones are in the kernel's buffer
of bounded size, and what cannot be sent at once is dropped and counted, because gossip sends
everything more than once. `ReceiveRates` bounds the packets, a limit the number of connections.

A first contact costs one round trip: the receiver cannot decide yet whether the packet is a replay
(see `authenticator`), answers with an empty packet, and the packet is sealed and sent again. A run
that was replaced gets the payload that `outdated` returns.
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
from functools import partial
from typing import Any, assert_never

from kvrs.gossip.authenticator import (
    MAX_OVERHEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    Address,
    Opened,
    Outdated,
    PacketAuthenticator,
    Rates,
    ReceiveRates,
    Rejection,
    Unproven,
)
from kvrs.ids import NodeId

_LENGTH = struct.Struct("!I")
_DATAGRAMS_PER_TURN = 64  # Then other callbacks of the event loop run.
_SOCKET_BUFFER_BYTES = 1 << 20  # About a thousand datagrams.
_MAX_PENDING = 1024  # Nodes of which no packet was accepted yet: the last packet to each is kept.
_PENDING_S = 1.0  # Older packets are not sent again.
_PORT_TRIES = 16


class Drop(StrEnum):
    """Reason for which a packet or connection was dropped before or after authentication;
    `PacketAuthenticator.rejected` counts the others.
    """

    RATE = "rate"  # Above the limits of `ReceiveRates`.
    CONNECTIONS = "connections"  # Too many incoming connections.
    SLOW = "slow"  # A connection that took too long, in either direction.
    CUT = "cut"  # A connection that failed, or ended within a packet.
    LONG = "long"  # A connection announced a packet above the maximum size.
    NO_ADDRESS = "no_address"  # The address of the node is unknown.
    SOCKET = "socket"  # The kernel refused a datagram.
    SENDING = "sending"  # Too many outgoing connections.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    datagram_payload_bytes: int = 1280  # With all headers this fits the usual MTU.
    rates: Rates = field(default_factory=Rates)
    stream_s: float = 5.0  # Maximum duration of a connection; its packet would be stale.
    # Incoming connections at a time. Each buffers one packet at most.
    accepted: int = 64
    # Above it the oldest of the host that has most of them is closed for a new one of another host,
    # and for any new one after this time, in which an honest exchange is over.
    accepted_s: float = 0.5
    sending: int = 16  # Outgoing connections at a time.
    sending_to_one: int = 2  # One node that does not answer leaves room for the others.


class Transport:
    """Calls `receive(sender, payload)` for accepted packets; `address_of` returns a node's address,
    if it is known.

    `outdated(sender, epoch)` returns the payload for a run of the sender that this epoch replaced.
    """

    def __init__(
        self,
        authenticator: PacketAuthenticator,
        address_of: Callable[[NodeId], Address | None],
        receive: Callable[[NodeId, bytes], None],
        clock: Callable[[], float],
        limits: Limits = Limits(),
        outdated: Callable[[NodeId, int], bytes] = lambda sender, epoch: b"",
    ) -> None:
        self._authenticator, self._address_of, self._receive = authenticator, address_of, receive
        self._clock, self._limits, self._outdated = clock, limits, outdated
        self._rates = ReceiveRates(limits.rates, clock())
        # One byte more than allowed: a longer datagram is recognised as oversized.
        self._buffer = bytearray(limits.datagram_payload_bytes + MAX_OVERHEAD_BYTES + 1)
        self._pending: dict[NodeId, tuple[bytes, float]] = {}
        # Hosts and starts of incoming connections, the oldest first.
        self._accepted: dict[asyncio.Task[None], tuple[str, float]] = {}
        self._sending: dict[asyncio.Task[None], NodeId] = {}
        self.dropped: Counter[Drop] = Counter()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen at a numeric address; return the port, which is the same for UDP and TCP.

        Raises:
            OSError: the port is in use, or there is no such address.
        """
        self._udp, tcp = _bind(host, port, self._limits.accepted)
        self._server = await asyncio.start_server(
            self._accept, sock=tcp, backlog=self._limits.accepted
        )
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
        """Send without waiting: as a datagram, or over TCP if `stream` is set or the payload too
        long.
        """
        if (address := self._address_of(to)) is None:
            self.dropped[Drop.NO_ADDRESS] += 1
            return
        # The answer is not to be crowded out by unknown sources.
        self._rates.on_authentic(address, self._clock())
        self._rates.on_authentic(_tcp_source(address[0]), self._clock())
        if stream or len(payload) > self._limits.datagram_payload_bytes:
            self._start_sending(to, address, payload)
        else:
            if to not in self._authenticator.senders and len(self._pending) < _MAX_PENDING:
                self._pending[to] = payload, self._clock()
            self._send_datagram(address, self._authenticator.seal(to, payload))

    def _send_datagram(self, address: Address, packet: bytes) -> None:
        try:
            self._udp.sendto(packet, address)
        except OSError:  # Buffer full or no route: as a lost packet.
            self.dropped[Drop.SOCKET] += 1

    def _read_datagrams(self) -> None:
        view = memoryview(self._buffer)
        for _ in range(_DATAGRAMS_PER_TURN):
            try:
                size, source = self._udp.recvfrom_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:  # An error of an earlier send, reported here.
                self.dropped[Drop.SOCKET] += 1
                continue
            self._receive_datagram(view[:size], source[:2])

    def _receive_datagram(self, packet: memoryview, source: Address) -> None:
        answer = self._take(packet, source, self._limits.datagram_payload_bytes)
        if answer is not None:
            # To the source address, because a new member's address is not known yet. A replayed
            # packet with a forged source is answered once, and the answer is not longer.
            self._send_datagram(source, answer)

    def _take(
        self, packet: bytes | memoryview, source: Address, max_payload_bytes: int
    ) -> bytes | None:
        """Deliver an accepted packet; return what is sent back to an authentic one that is not."""
        now_s = self._clock()
        if not self._rates.admit(source, self._authenticator.is_answer(packet), now_s):
            self.dropped[Drop.RATE] += 1
            return None
        match self._authenticator.open(packet, max_payload_bytes):
            case Opened(sender, payload):
                self._rates.on_authentic(source, now_s)
                self._deliver(sender, payload)
            case Unproven(sender):
                return self._authenticator.seal(sender, b"")
            case Outdated(sender, run, epoch):
                return self._authenticator.seal(sender, self._outdated(sender, epoch), run)
            case Rejection():
                pass  # Counted by the authenticator.
            case never:
                assert_never(never)
        return None

    def _deliver(self, sender: NodeId, payload: bytes) -> None:
        waiting = self._pending.pop(sender, None)
        if waiting is not None and self._clock() - waiting[1] <= _PENDING_S:
            self.send(sender, waiting[0])
        if payload:
            self._receive(sender, payload)

    def _start_sending(self, to: NodeId, address: Address, payload: bytes) -> None:
        to_one = sum(node == to for node in self._sending.values())
        if len(self._sending) >= self._limits.sending or to_one >= self._limits.sending_to_one:
            self.dropped[Drop.SENDING] += 1
            return
        task = asyncio.create_task(self._with_timeout(self._send_stream(to, address, payload)))
        self._sending[task] = to
        task.add_done_callback(self._sending.pop)

    async def _with_timeout(self, work: Coroutine[Any, Any, None]) -> None:
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
            # The second time has the receiver's run to echo, if the first lacked it.
            for _ in range(2):
                packet = self._authenticator.seal(to, payload)
                await _write_packet(writer, packet)
                answer = await self._read_packet(reader, self._limits.datagram_payload_bytes)
                match None if answer is None else self._authenticator.open(answer):
                    case Opened(sender, b"") if sender == to:
                        continue
                    case Opened(sender, reply) if sender == to:
                        self._receive(sender, reply)
                    case _:
                        pass  # No answer, or not its answer: it is asked again later.
                return
        finally:
            # A close would wait for unsent bytes.
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        host = peer[0] if peer else ""  # The connection may be closed already.
        if len(self._accepted) >= self._limits.accepted:
            self.dropped[Drop.CONNECTIONS] += 1
            if not self._drop_oldest(host):
                writer.transport.abort()
                return
        task = asyncio.create_task(self._serve(reader, writer, _tcp_source(host)))
        self._accepted[task] = host, self._clock()
        task.add_done_callback(partial(self._finished, writer))

    def _finished(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        # Here and not in the task, which may have been cancelled before it ran at all.
        writer.close()
        self._accepted.pop(task, None)

    def _drop_oldest(self, newcomer: str) -> bool:
        """Drop the oldest connection of the host with most of them. False: it is too young to be
        dropped for another one of that host.
        """
        ((crowd, _),) = Counter(host for host, _ in self._accepted.values()).most_common(1)
        task, since_s = next(
            (task, since_s) for task, (host, since_s) in self._accepted.items() if host == crowd
        )
        if newcomer == crowd and self._clock() - since_s < self._limits.accepted_s:
            return False
        del self._accepted[task]
        task.cancel()
        return True

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: Address
    ) -> None:
        await self._with_timeout(self._receive_stream(reader, writer, source))

    async def _receive_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: Address
    ) -> None:
        # Closing the connection ends the exchange; an empty packet asks for the same payload,
        # sealed again.
        for _ in range(2):
            packet = await self._read_packet(reader, MAX_PAYLOAD_BYTES)
            answer = None if packet is None else self._take(packet, source, MAX_PAYLOAD_BYTES)
            if answer is None:
                return
            await _write_packet(writer, answer)

    async def _read_packet(
        self, reader: asyncio.StreamReader, max_payload_bytes: int
    ) -> bytes | None:
        """The next packet of a connection; None at its end, or if it is too long.

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
        if size > max_payload_bytes + MAX_OVERHEAD_BYTES:
            self.dropped[Drop.LONG] += 1
            return None
        return await reader.readexactly(size)


async def _write_packet(writer: asyncio.StreamWriter, packet: bytes) -> None:
    writer.write(_LENGTH.pack(len(packet)) + packet)
    await writer.drain()


def _tcp_source(host: str) -> Address:
    """Source of TCP packets: all connections of a host share a bucket, whatever their ports."""
    return host, 0


def _bind(host: str, port: int, backlog: int) -> tuple[socket.socket, socket.socket]:
    """A datagram and a listening socket on one port; 0: any port that is free for both."""
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
                tcp.listen(backlog)  # With SO_REUSEADDR only this fails if the port is in use.
            except OSError as error:
                if port or not left or error.errno != errno.EADDRINUSE:
                    raise
                continue
            opened.pop_all()
            return udp, tcp
    raise AssertionError("the last try either returns or raises")
