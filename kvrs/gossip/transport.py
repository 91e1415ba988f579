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

_DATAGRAMS_PER_TURN = 64  # Datagrams before other callbacks of the event loop run.
_SOCKET_BUFFER_BYTES = 1 << 20  # Room for about a thousand datagrams.
_MAX_PENDING = 1024  # Most nodes without an accepted packet; the last packet to each is kept.
_PENDING_S = 1.0  # Age up to which a kept packet is sent again.


class Drop(StrEnum):
    """Reason for which a packet was dropped before or after authentication;
    `PacketAuthenticator.rejected` counts the others.
    """

    RATE = "rate"  # The packet exceeds the limits of `ReceiveRates`.
    NO_ADDRESS = "no_address"  # The address of the node is unknown.
    SOCKET = "socket"  # The kernel refused a datagram.


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
        """Send a packet without waiting."""
        if (address := self._address_of(to)) is None:
            self.dropped[Drop.NO_ADDRESS] += 1
            return
        # Unknown sources must not crowd out the answer.
        self._rates.on_authentic(address, self._clock())
        if to not in self._authenticator.senders and len(self._pending) < _MAX_PENDING:
            self._pending[to] = payload, self._clock()
        self._send_datagram(address, self._authenticator.seal(to, payload))

    def _send_datagram(self, address: Address, packet: bytes) -> None:
        try:
            self._udp.sendto(packet, address)
        except OSError:  # A full buffer or a missing route counts as a lost packet.
            self.dropped[Drop.SOCKET] += 1

    def _read_datagrams(self) -> None:
        view = memoryview(self._buffer)
        for _ in range(_DATAGRAMS_PER_TURN):
            try:
                size, source = self._udp.recvfrom_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:  # An earlier send reports its error here.
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
