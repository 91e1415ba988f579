"""A member of the cluster on an event loop: `Gossip` with a transport, a timer and a log.

The epoch of a process run is the wall clock at its start, in nanoseconds: it rises without a file
that would have to outlive the process (an agent's directory is in memory, and empty after a restart
of the machine). Nothing else depends on that clock. If it is set back between two runs of one name,
the peers send the newer run the older epoch, and it takes a higher one. Of two processes that run
at once the older learns of the newer, and stops sending.

A seed may be configured by a host name, which is looked up beside the event loop, never for a
packet. A running member publishes a numeric address, which counts as long as it runs. So only seeds
that are no members, or are dead or have left, are looked up, again and again, because a name can
get another address before its process is up (a pod of a headless service).

Transport of sealed gossip packets as datagrams.

Payloads are opaque here. All packets are one-way: an answer is a packet of its own. There is no
queue in user space: received packets are delivered at once, waiting ones are in the kernel's buffer
of bounded size, and what cannot be sent at once is dropped and counted, because gossip sends
everything more than once. `ReceiveRates` bounds the packets.

A first contact costs one round trip: the receiver cannot decide yet whether the packet is a replay
(see `authenticator`), answers with an empty packet, and the packet is sealed and sent again. A run
that was replaced gets the payload that `outdated` returns.
"""

import asyncio
import logging
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import lru_cache
from typing import Any, assert_never

from msgspec.structs import asdict

from kvrs.config.settings import is_numeric
from kvrs.errors import GossipError
from kvrs.gossip.authenticator import (
    MAX_OVERHEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    RATES,
    RUN_BYTES,
    Address,
    Keyring,
    Opened,
    Outdated,
    PacketAuthenticator,
    Rates,
    ReceiveRates,
    Rejection,
    Unproven,
)
from kvrs.gossip.facts import Event, Fact, FactKind, MemberChanged, RecordChanged, Superseded
from kvrs.gossip.swim import RECONNECT_INTERVALS, Facts, Gossip, Member, Send
from kvrs.gossip.wire import MemberUpdate, Push, Status, decode, encode
from kvrs.ids import NodeId
from kvrs.net.names import first_address

log = logging.getLogger(__name__)

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


_MAX_PORT = 65535
_FIRST_LOOK_UP_S = 2.0  # Time limit of look-ups at the start; later answers count when they arrive.


class Membership:
    """Takes part in gossip from `start` to `close`; `on_event` is called with every event, after
    the tables reflect it.
    """

    def __init__(
        self,
        me: NodeId,
        probe_interval_s: float,
        ring: Sequence[bytes],
        on_event: Callable[[Event], None] = lambda _: None,
        *,
        epoch: int | None = None,
    ) -> None:
        """`ring`: the cluster's secrets, the current one first."""
        self.id = me
        # Number of authentic packets that could not be decoded, since the start.
        self.malformed = 0
        # Number of sent packets, and of their bytes without the seal, since the start.
        self.sent: Counter[str] = Counter()
        self._interval_s = probe_interval_s
        self._on_event = on_event
        self._clock = time.monotonic
        self._epoch = time.time_ns() if epoch is None else epoch
        self._authenticator = PacketAuthenticator(
            me, self._epoch, secrets.token_bytes(RUN_BYTES), Keyring(ring)
        )
        self._transport = Transport(
            self._authenticator,
            self._address_of,
            self._receive,
            self._clock,
            outdated=self._outdated_reply,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._gossip: Gossip | None = None
        self._named_seeds: dict[NodeId, tuple[str, int]] = {}
        # Addresses of seeds with host names, as last looked up.
        self._found_seeds: dict[NodeId, Address] = {}
        self._look_ups: asyncio.Task[None] | None = None

    async def start(
        self, host: str, port: int, seeds: Mapping[NodeId, str], bind: str | None = None
    ) -> int:
        """Join through the seeds, and return the bound port: at `bind`, or else at `host`, whose
        address the other members learn.

        Raises:
            OSError: the port is not available, or a name has no address.
        """
        here = await first_address(bind or host)
        family = socket.AF_INET6 if ":" in here else socket.AF_INET
        told = await first_address(host, family) if bind else here
        hosts = {seed: text.rpartition(":")[::2] for seed, text in seeds.items()}
        self._named_seeds = {
            seed: (host, int(port)) for seed, (host, port) in hosts.items() if not is_numeric(host)
        }
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LOOK_UP_S):
                await self._look_up(self._named_seeds, family)
        bound = self._transport.start(here, port)
        address, draw = f"{told}:{bound}", random.SystemRandom().random
        self._gossip = Gossip(
            self.id, address, self._epoch, self._interval_s, draw, self._clock(), seeds
        )
        self._execute(self._gossip.tick(self._clock()))
        self._look_ups = asyncio.create_task(self._look_up_lost(family))
        return bound

    async def close(self) -> None:
        """Announce that this node leaves, and stop."""
        if self._gossip is None:
            return
        if not self._gossip.over:
            self._execute(self._gossip.leave(self._clock()))
        if self._timer is not None:
            self._timer.cancel()
        if self._look_ups is not None:
            self._look_ups.cancel()
        self._transport.close()
        self._gossip = None

    # The process publishes facts of its node by the methods below.

    def publish(self, name: str, fact: Fact) -> None:
        """Publish a fact. Raises GossipError: the record is full, or the fact cannot be encoded."""
        self._running.publish(name, fact, self._clock())

    def withdraw(self, kind: FactKind, name: str) -> None:
        self._running.withdraw(kind, name, self._clock())

    def probe_now(self, node: NodeId) -> None:
        """Probe a node out of turn: a broken connection, for example, indicates its death."""
        self._execute(self._running.probe_now(node, self._clock()))

    # The methods below read the known state, without waiting.

    @property
    def members(self) -> Mapping[NodeId, Member]:
        return self._running.members

    @property
    def health(self) -> int:
        """Return Lifeguard's local health score; 0: healthy, above: this node may miss packets."""
        return self._running.health

    @property
    def facts(self) -> Facts:
        return self._running.facts

    def is_dead(self, node: NodeId) -> bool:
        """Return whether the node is declared dead; False for an unknown node."""
        member = self._running.members.get(node)
        return member is not None and member.status is Status.DEAD

    def count(self, status: Status) -> int:
        return sum(member.status is status for member in self._running.members.values())

    def drops(self) -> dict[str, int]:
        """Return the number of packets that were not accepted or not sent, by reason, since the
        start.
        """
        rejected = {str(reason): count for reason, count in self._authenticator.rejected.items()}
        dropped = {str(reason): count for reason, count in self._transport.dropped.items()}
        return rejected | dropped | {"malformed": self.malformed}

    def describe(self) -> dict[str, Any]:
        """Return the members and their facts as plain data, for the state page and tests."""
        gossip, now_s = self._running, self._clock()
        records: dict[NodeId, dict[str, dict[str, Any]]] = {}
        for kind, node, name, report in gossip.facts.all():
            shown = asdict(report.fact) | {"written_s_ago": now_s - report.written_s}
            records.setdefault(node, {}).setdefault(kind.name.lower(), {})[name] = shown
        return {
            "id": self.id,
            "epoch": gossip.epoch,
            "health": gossip.health,
            "over": gossip.over,
            "sent": dict(self.sent),
            "dropped": self.drops(),
            "unread": gossip.facts.unread,
            "members": [
                asdict(member.update)
                | {"status": member.status.name.lower(), "record": records.get(member.id, {})}
                for member in gossip.members.values()
            ],
        }

    @property
    def _running(self) -> Gossip:
        assert self._gossip is not None, "not started, or closed"
        return self._gossip

    def _is_lost(self, seed: NodeId) -> bool:
        """Return whether the seed is unknown, dead or has left, so that its name may have another
        address by now.
        """
        member = self._running.members.get(seed)
        return member is None or not member.reachable

    def _address_of(self, node: NodeId) -> Address | None:
        if self._gossip is None or (address := self._gossip.address_of(node)) is None:
            return None
        found = self._found_seeds.get(node) if self._is_lost(node) else None
        return found or parse_address(address)

    async def _look_up_lost(self, family: socket.AddressFamily) -> None:
        while self._named_seeds:
            await asyncio.sleep(RECONNECT_INTERVALS * self._interval_s)
            await self._look_up(filter(self._is_lost, self._named_seeds), family)

    async def _look_up(self, seeds: Iterable[NodeId], family: socket.AddressFamily) -> None:
        async def look_up(seed: NodeId) -> None:
            host, port = self._named_seeds[seed]
            with suppress(OSError):  # If a look-up fails, the last found address stays in use.
                self._found_seeds[seed] = await first_address(host, family), port

        await asyncio.gather(*map(look_up, seeds))

    def _receive(self, sender: NodeId, payload: bytes) -> None:
        if self._gossip is None:
            return
        try:
            packet = decode(payload)
        except GossipError:
            self.malformed += 1
            return
        self._execute(self._gossip.handle(packet, sender, self._clock()))

    def _outdated_reply(self, node: NodeId, epoch: int) -> bytes:
        """Return the payload for a run that the run with `epoch` has replaced: an update with that
        epoch. If the receiver is in fact the newer process, it takes a higher epoch; an older
        process stops.
        """
        me = self._running.members[self.id]
        return encode(
            Push(me.epoch, me.incarnation, (MemberUpdate(node, epoch, 0, Status.ALIVE, ""),))
        )

    def _tick(self) -> None:
        self._timer = None
        self._execute(self._running.tick(self._clock()))

    def _execute(self, sends: list[Send]) -> None:
        self._authenticator.epoch = self._running.epoch
        for send in sends:
            payload = encode(send.packet)
            self.sent["packets"] += 1
            self.sent["bytes"] += len(payload)
            self._transport.send(send.to, payload)
        for event in self._running.take_events():
            _log_event(event)
            self._on_event(event)
        self._set_timer()

    def _set_timer(self) -> None:
        gossip = self._running
        if gossip.over:
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + max(0.0, gossip.next_tick_s - self._clock())
        # Early ticks do no harm, so the timer is replaced only if it would fire too late.
        if self._timer is not None:
            if self._timer_due_s <= due_s:
                return
            self._timer.cancel()
        # The time is kept beside the handle: uvloop's handle for a past time has no `when`.
        self._timer_due_s = due_s
        self._timer = loop.call_at(due_s, self._tick)


def _log_event(event: Event) -> None:
    match event:
        case MemberChanged(id, epoch, _, status, suspectors):
            level = logging.WARNING if status in (Status.SUSPECT, Status.DEAD) else logging.INFO
            facts = {
                "member": id,
                "status": status.name.lower(),
                "epoch": epoch,
                "suspectors": ",".join(suspectors),
            }
            log.log(level, "member changed", extra=facts)
        case Superseded(epoch):
            log.error(
                "another process runs under this name; this one sends no gossip any more",
                extra={"epoch": epoch},
            )
        case RecordChanged():
            pass  # These events are too frequent to log.
        case _:
            assert_never(event)


@lru_cache(4096)
def parse_address(text: str) -> Address | None:
    """Parse `host:port` with a numeric host; None for anything else, so that no member's packet
    causes a name look-up.
    """
    host, _, port = text.rpartition(":")
    if not is_numeric(host) or not port.isascii() or not port.isdecimal():
        return None
    return (host, int(port)) if 0 < int(port) <= _MAX_PORT else None
