"""Transport of sealed gossip packets as datagrams.

Payloads are opaque here. All packets are one-way: an answer is a packet of its own. There is no
queue in user space: received packets are delivered at once, waiting ones are in the kernel's buffer
of bounded size, and what cannot be sent at once is dropped and counted, because gossip sends
everything more than once. `ReceiveRates` bounds the packets.

A first contact costs one round trip: the receiver cannot decide yet whether the packet is a replay
(see `authenticator`), answers with an empty packet, and the packet is sealed and sent again. A run
that was replaced gets the payload that `outdated` returns.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import assert_never

from kvrs.gossip.authenticator import (
    MAX_OVERHEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    RATES,
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

# Most datagrams that are read before other callbacks of the event loop run.
_DATAGRAMS_PER_TURN = 64
_SOCKET_BUFFER_BYTES = 1 << 20  # Size of the kernel's receive buffer: about a thousand datagrams.
# Most nodes without an accepted packet for which the last packet to them is kept, to be sent again.
_MAX_PENDING = 1024
_PENDING_S = 1.0  # Age up to which a kept packet is sent again once the node has answered.


class Drop(StrEnum):
    """Reason for which a packet was dropped before or after authentication;
    `PacketAuthenticator.rejected` counts the others.
    """

    RATE = "rate"  # The packet exceeds the limits of `ReceiveRates`.
    NO_ADDRESS = "no_address"  # The address of the node is unknown.
    SOCKET = "socket"  # The kernel refused a datagram.


class Transport:
    """Sends and receives packets: `receive(sender, payload)` is called for each accepted packet,
    and `address_of` returns a node's address or None.

    `outdated(sender, epoch)` returns the payload of the answer to a run of the sender that the run
    with this epoch has replaced.
    """

    def __init__(
        self,
        authenticator: PacketAuthenticator,
        address_of: Callable[[NodeId], Address | None],
        receive: Callable[[NodeId, bytes], None],
        clock: Callable[[], float],
        rates: Rates = RATES,
        outdated: Callable[[NodeId, int], bytes] = lambda sender, epoch: b"",
    ) -> None:
        self._authenticator, self._address_of, self._receive = authenticator, address_of, receive
        self._clock, self._outdated = clock, outdated
        self._rates = ReceiveRates(rates, clock())
        # One byte more than allowed, so that an oversized datagram is recognised.
        self._buffer = bytearray(MAX_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES + 1)
        self._pending: dict[NodeId, tuple[bytes, float]] = {}
        self.dropped: Counter[Drop] = Counter()

    def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Receive at a numeric address; return the port.

        Raises:
            OSError: the port is in use, or there is no such address.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._udp = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._udp.setblocking(False)
            self._udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
            self._udp.bind((host, port))
        except OSError:
            self._udp.close()
            raise
        asyncio.get_running_loop().add_reader(self._udp, self._read_datagrams)
        bound: int = self._udp.getsockname()[1]
        return bound

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._udp)
        self._udp.close()

    def send(self, to: NodeId, payload: bytes) -> None:
        """Send a packet without waiting; a packet that cannot be sent is dropped and counted."""
        if (address := self._address_of(to)) is None:
            self.dropped[Drop.NO_ADDRESS] += 1
            return
        # The receiver gets a bucket of its own, so that packets of unknown sources cannot crowd out
        # its answer.
        self._rates.on_authentic(address, self._clock())
        if to not in self._authenticator.senders and len(self._pending) < _MAX_PENDING:
            self._pending[to] = payload, self._clock()
        self._send_datagram(address, self._authenticator.seal(to, payload))

    def _send_datagram(self, address: Address, packet: bytes) -> None:
        try:
            self._udp.sendto(packet, address)
        # A full buffer and a missing route are treated like a packet lost on its way.
        except OSError:
            self.dropped[Drop.SOCKET] += 1

    def _read_datagrams(self) -> None:
        view = memoryview(self._buffer)
        for _ in range(_DATAGRAMS_PER_TURN):
            try:
                size, source = self._udp.recvfrom_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:  # The kernel reports the error of an earlier send here.
                self.dropped[Drop.SOCKET] += 1
                continue
            self._take(view[:size], source[:2])

    def _take(self, packet: memoryview, source: Address) -> None:
        """Deliver an accepted packet; answer an authentic one that is not accepted.

        The answer goes to the source address, because a new member's address is not known yet. A
        replayed packet with a forged source is answered once, and the answer is not longer.
        """
        now_s = self._clock()
        if not self._rates.admit(source, self._authenticator.is_answer(packet), now_s):
            self.dropped[Drop.RATE] += 1
            return
        match self._authenticator.open(packet):
            case Opened(sender, payload):
                self._rates.on_authentic(source, now_s)
                self._deliver(sender, payload)
            case Unproven(sender):
                self._send_datagram(source, self._authenticator.seal(sender, b""))
            case Outdated(sender, run, epoch):
                answer = self._authenticator.seal(sender, self._outdated(sender, epoch), run)
                self._send_datagram(source, answer)
            case Rejection():
                pass  # The authenticator counts the rejection.
            case never:
                assert_never(never)

    def _deliver(self, sender: NodeId, payload: bytes) -> None:
        waiting = self._pending.pop(sender, None)
        if waiting is not None and self._clock() - waiting[1] <= _PENDING_S:
            self.send(sender, waiting[0])
        if payload:
            self._receive(sender, payload)
