import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvrs.gossip import membership
from kvrs.gossip.authenticator import (
    MAX_OVERHEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    RATES,
    Address,
    PacketAuthenticator,
    Rates,
    Rejection,
)
from kvrs.gossip.membership import Drop, Transport
from kvrs.ids import NodeId
from tests.gossip.authenticators import A, B, seal_of

pytestmark = pytest.mark.network

WAIT_S = 60.0


@dataclass
class Node:
    seal: PacketAuthenticator
    transport: Transport
    port: int = 0
    received: list[tuple[NodeId, bytes]] = field(default_factory=list)

    @property
    def address(self) -> Address:
        return "127.0.0.1", self.port


class Net:
    """Nodes on loopback that know each other's addresses."""

    def __init__(self) -> None:
        self.addresses: dict[NodeId, Address] = {}
        self._nodes: list[Node] = []

    async def add(
        self,
        name: NodeId,
        rates: Rates = RATES,
        seal: PacketAuthenticator | None = None,
        known: bool = True,
    ) -> Node:
        seal = seal or seal_of(name)
        received: list[tuple[NodeId, bytes]] = []
        transport = Transport(
            seal,
            self.addresses.get,
            lambda sender, payload: received.append((sender, payload)),
            time.monotonic,
            rates,
        )
        node = Node(seal, transport, transport.start(), received)
        self._nodes.append(node)
        if known:
            self.addresses[name] = node.address
        return node

    async def close(self) -> None:
        for node in self._nodes:
            node.transport.close()


@asynccontextmanager
async def open_net() -> AsyncIterator[Net]:
    net = Net()
    try:
        yield net
    finally:
        await net.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first packet is not to be too old, however long a busy machine takes for the next ones."""
    monkeypatch.setattr(membership, "_PENDING_S", 60.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_payload_arrives_with_its_senders_name() -> None:
    """The first one too, although the receiver cannot exclude a replay at first."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B)

        a.transport.send(B, b"first")
        await until(lambda: b.received)
        b.transport.send(A, b"answer")
        await until(lambda: a.received)

        assert b.received == [(A, b"first")]
        assert a.received == [(B, b"answer")]
        assert b.seal.rejected == {Rejection.UNPROVEN: 1}


async def test_an_unknown_sender_is_answered_at_its_source_address() -> None:
    """Its own address is in a payload that is not accepted yet."""
    async with open_net() as net:
        a, b = await net.add(A, known=False), await net.add(B)

        a.transport.send(B, b"I am new")
        await until(lambda: b.received)

        b.transport.send(A, b"hello")
        assert b.transport.dropped == {Drop.NO_ADDRESS: 1}


async def test_a_payload_of_the_maximum_size_arrives() -> None:
    """It fits into a datagram with all headers."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B)
        payload = b"x" * MAX_PAYLOAD_BYTES

        a.transport.send(B, payload)
        await until(lambda: b.received)

        assert b.received == [(A, payload)]
        assert not b.transport.dropped


async def test_packets_reach_a_restarted_node_and_come_from_it() -> None:
    """It has another run and a higher epoch; each direction needs one packet more."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B)
        a.transport.send(B, b"1")
        await until(lambda: b.received)
        again = await net.add(B, seal=seal_of(B, epoch=2))

        a.transport.send(B, b"lost")
        await until(lambda: again.seal.rejected[Rejection.UNPROVEN])
        await until(lambda: a.seal.senders[B].epoch == 2)
        a.transport.send(B, b"2")
        await until(lambda: again.received)
        again.transport.send(A, b"3")
        await until(lambda: a.received)

        assert (again.received, a.received) == ([(A, b"2")], [(B, b"3")])


async def test_a_replaced_run_is_answered() -> None:
    """Its packets are rejected, so no other packet would inform it."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B, seal=seal_of(B, epoch=2))
        b.transport.send(A, b"1")
        await until(lambda: a.received)
        older = await net.add(B, seal=seal_of(B, epoch=1))
        a.transport._outdated = lambda sender, epoch: f"{sender} has epoch {epoch}".encode()

        older.transport.send(A, b"2")
        await until(lambda: older.received)

        assert set(older.received) == {(A, b"n1 has epoch 2")}
        assert a.received == [(B, b"1")]


async def test_bad_datagrams_are_counted_and_the_socket_stays_open() -> None:
    """The attacker sends every kind of datagram that is rejected."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B)
        a.transport.send(B, b"1")
        await until(lambda: b.received)
        recorded = a.seal.seal(B, b"2")
        forged = recorded[:-1] + bytes([recorded[-1] ^ 1])

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
            for packet in (
                recorded,
                recorded,
                forged,
                b"",
                b"x" * 40,
                b"x" * (MAX_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES + 1),
                b"x" * 60_000,
            ):
                attacker.sendto(packet, b.address)
        await until(lambda: sum(b.seal.rejected.values()) == 7)

        wanted = {
            Rejection.UNPROVEN: 1,
            Rejection.REPLAYED: 1,
            Rejection.FORGED: 1,
            Rejection.TRUNCATED: 2,
            Rejection.OVERSIZED: 2,
        }
        assert b.seal.rejected == wanted
        a.transport.send(B, b"3")
        await until(lambda: (A, b"3") in b.received)


async def test_a_flood_from_unknown_sources_leaves_members_their_share() -> None:
    """Packets above the rate are not even authenticated."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flooder:
        await assert_a_member_is_heard(lambda a: flooder, b"x" * 100)


async def test_forged_datagrams_with_a_member_s_address_cost_it_nothing() -> None:
    """They lack the random number that only its own packets echo."""
    forged = seal_of(A).seal(B, b"x" * 100)[:-1] + b"x"
    await assert_a_member_is_heard(lambda a: a.transport._udp, forged)


async def assert_a_member_is_heard(source: Callable[[Node], socket.socket], packet: bytes) -> None:
    async with open_net() as net:
        rates = Rates(member_per_s=1000, unknown_per_s=5, total_per_s=1000, burst_s=2)
        a, b = await net.add(A), await net.add(B, rates)
        a.transport.send(B, b"1")
        await until(lambda: b.received)

        for _ in range(500):
            source(a).sendto(packet, b.address)
        checked = Rejection.NOT_GOSSIP, Rejection.FORGED
        await until(
            lambda: b.transport.dropped[Drop.RATE] + sum(b.seal.rejected[r] for r in checked) == 500
        )
        a.transport.send(B, b"2")
        await until(lambda: len(b.received) == 2)

        # Authenticated: ten at most at the start, five in each second of this test.
        assert b.transport.dropped[Drop.RATE] > 350


async def test_a_node_that_has_just_started_is_reached_through_a_flood() -> None:
    """No source has a bucket of its own yet, except those that the node sends to."""
    async with open_net() as net:
        rates = Rates(member_per_s=1000, unknown_per_s=1e-9, total_per_s=1000, burst_s=2)
        a, b = await net.add(A), await net.add(B, rates)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flooder:
            for _ in range(50):
                flooder.sendto(b"x" * 100, b.address)
        await until(lambda: b.transport.dropped[Drop.RATE] == 49)

        b.transport.send(A, b"here I am")
        await until(lambda: a.received)
        a.transport.send(B, b"welcome")
        await until(lambda: b.received)

        assert b.transport.dropped == {Drop.RATE: 49}


async def test_a_port_in_use_is_an_error() -> None:
    """Raised at the start."""
    async with open_net() as net:
        a = await net.add(A)
        other = Transport(
            seal_of(B), lambda node: None, lambda sender, payload: None, time.monotonic
        )

        with pytest.raises(OSError, match="in use"):
            other.start(port=a.port)
