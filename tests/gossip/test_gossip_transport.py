import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvrs.gossip.rates import Address, Rates
from kvrs.gossip.seal import MAX_OVERHEAD_BYTES, MAX_PAYLOAD_BYTES, Refusal, Seal
from kvrs.gossip.transport import Drop, Limits, Transport
from kvrs.ids import NodeId
from tests.gossip.sealing import A, B, C, seal_of

WAIT_S = 20.0
LENGTH = struct.Struct("!I")


@dataclass
class Node:
    seal: Seal
    transport: Transport
    port: int = 0
    heard: list[tuple[NodeId, bytes]] = field(default_factory=list)

    @property
    def address(self) -> Address:
        return "127.0.0.1", self.port


class Net:
    """Nodes on loopback that know each other's addresses."""

    def __init__(self) -> None:
        self.addresses: dict[NodeId, Address] = {}
        self._nodes: list[Node] = []

    async def add(self, name: NodeId, limits: Limits | None = None, seal: Seal | None = None, known: bool = True) -> Node:
        seal = seal or seal_of(name)
        heard: list[tuple[NodeId, bytes]] = []
        transport = Transport(
            seal,
            self.addresses.get,
            lambda sender, payload: heard.append((sender, payload)),
            time.monotonic,
            limits or Limits(),
        )
        node = Node(seal, transport, await transport.start(), heard)
        self._nodes.append(node)
        if known:
            self.addresses[name] = node.address
        return node

    async def close(self) -> None:
        for node in self._nodes:
            await node.transport.close()


@asynccontextmanager
async def open_net() -> AsyncIterator[Net]:
    net = Net()
    try:
        yield net
    finally:
        await net.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_payload_arrives_with_its_senders_name() -> None:
    """The first one too, although the receiver could not know at first that it is new."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B)

        a.transport.send(B, b"first")
        await until(lambda: b.heard)
        b.transport.send(A, b"answer")
        await until(lambda: a.heard)

        assert b.heard == [(A, b"first")]
        assert a.heard == [(B, b"answer")]
        assert b.seal.refused == {Refusal.UNPROVEN: 1}


async def test_a_newcomer_that_nobody_knows_is_answered_where_it_called_from() -> None:
    """Its address is known only from what it says, and that is not taken before it is proven."""
    async with open_net() as net:
        a, b = await net.add(A, known=False), await net.add(B)

        a.transport.send(B, b"I am new")
        await until(lambda: b.heard)

        b.transport.send(A, b"hello")
        assert b.transport.dropped == {Drop.NO_ADDRESS: 1}


@pytest.mark.parametrize("size", ["a datagram's most", "one more", "the most"])
async def test_payloads_travel_by_size(size: str) -> None:
    """What does not fit a datagram takes TCP, and it is seen in nothing else."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B)
        room = Limits().datagram_payload_bytes
        payload = b"x" * {"a datagram's most": room, "one more": room + 1, "the most": MAX_PAYLOAD_BYTES}[size]

        a.transport.send(B, payload)
        await until(lambda: b.heard)

        assert b.heard == [(A, payload)]
        assert not b.transport.dropped


async def test_what_must_arrive_takes_tcp() -> None:
    """Also when no datagram comes through: the way of a fallback probe."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B)
        asyncio.get_running_loop().remove_reader(b.transport._udp)

        a.transport.send(B, b"probe", stream=True)
        await until(lambda: b.heard)

        assert b.heard == [(A, b"probe")]


async def test_a_restarted_node_is_heard_and_hears() -> None:
    """It has another run's number and a higher epoch; each side needs one packet more."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B)
        a.transport.send(B, b"1")
        await until(lambda: b.heard)
        again = await net.add(B, seal=seal_of(B, epoch=2))

        a.transport.send(B, b"lost")
        await until(lambda: again.seal.refused[Refusal.UNPROVEN])
        await until(lambda: a.seal._senders[B].epoch == 2)
        a.transport.send(B, b"2")
        await until(lambda: again.heard)
        again.transport.send(A, b"3")
        await until(lambda: a.heard)

        assert (again.heard, a.heard) == ([(A, b"2")], [(B, b"3")])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_run_that_was_replaced_hears_so_the_way_it_came(stream: bool) -> None:
    """Its packets are refused, so nobody would tell it otherwise."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B, seal=seal_of(B, epoch=2))
        b.transport.send(A, b"1")
        await until(lambda: a.heard)
        older = await net.add(B, seal=seal_of(B, epoch=1))
        a.transport._outdated = lambda sender, epoch: f"{sender} lives in epoch {epoch}".encode()

        older.transport.send(A, b"2", stream=stream)
        await until(lambda: older.heard)

        assert set(older.heard) == {(A, b"n1 lives in epoch 2")}
        assert a.heard == [(B, b"1")]


async def test_bad_datagrams_are_counted_and_the_socket_lives_on() -> None:
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B)
        a.transport.send(B, b"1")
        await until(lambda: b.heard)
        recorded = a.seal.seal(B, b"2")
        forged = recorded[:-1] + bytes([recorded[-1] ^ 1])

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as thief:
            for packet in (
                recorded,
                recorded,
                forged,
                b"",
                b"x" * 40,
                b"x" * (Limits().datagram_payload_bytes + MAX_OVERHEAD_BYTES + 1),
                b"x" * 60_000,
            ):
                thief.sendto(packet, b.address)
        await until(lambda: sum(b.seal.refused.values()) == 7)

        wanted = {Refusal.UNPROVEN: 1, Refusal.REPLAYED: 1, Refusal.FORGED: 1, Refusal.TRUNCATED: 2, Refusal.OVERSIZED: 2}
        assert b.seal.refused == wanted
        a.transport.send(B, b"3")
        await until(lambda: (A, b"3") in b.heard)


async def test_a_flood_from_strangers_leaves_members_their_share() -> None:
    """What is too much is not even looked at."""
    async with open_net() as net:
        rates = Rates(member_per_s=1000, strangers_per_s=5, total_per_s=1000, burst_s=2)
        a, b = await net.add(A), await net.add(B, Limits(rates=rates))
        a.transport.send(B, b"1")
        await until(lambda: b.heard)

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flooder:
            for _ in range(500):
                flooder.sendto(b"x" * 100, b.address)
        await until(lambda: b.transport.dropped[Drop.RATE] + b.seal.refused[Refusal.NOT_GOSSIP] == 500)
        a.transport.send(B, b"2")
        await until(lambda: len(b.heard) == 2)

        # Looked at: ten at most in the beginning, five in each second of this test.
        assert b.transport.dropped[Drop.RATE] > 350


@pytest.mark.parametrize("stream", [False, True])
async def test_a_node_that_has_just_started_is_reached_through_a_flood(stream: bool) -> None:
    """Nobody has proved anything to it yet, so all are strangers, but for those to whom it speaks."""
    async with open_net() as net:
        rates = Rates(member_per_s=1000, strangers_per_s=1e-9, total_per_s=1000, burst_s=2)
        a, b = await net.add(A), await net.add(B, Limits(rates=rates))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flooder:
            for _ in range(50):
                flooder.sendto(b"x" * 100, b.address)
        await until(lambda: b.transport.dropped[Drop.RATE] == 49)

        b.transport.send(A, b"here I am", stream=stream)
        await until(lambda: a.heard)
        a.transport.send(B, b"welcome", stream=stream)
        await until(lambda: b.heard)

        assert b.transport.dropped == {Drop.RATE: 49}


async def test_a_length_beyond_the_most_is_refused_before_it_is_read() -> None:
    async with open_net() as net:
        b = await net.add(B)

        reader, writer = await asyncio.open_connection(*b.address)
        writer.write(LENGTH.pack(MAX_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES + 1))
        assert await reader.read() == b""
        writer.close()

        assert b.transport.dropped == {Drop.LONG: 1}


async def test_connections_are_capped_per_host_and_freed() -> None:
    """Whoever holds connections open keeps others out only until his time is over."""
    async with open_net() as net:
        a, b = await net.add(A), await net.add(B, Limits(accepted=4, stream_s=1.0))

        held = [await asyncio.open_connection(*b.address) for _ in range(5)]
        await until(lambda: b.transport.dropped[Drop.CONNECTIONS] == 3)
        for _, writer in held[:2]:
            writer.write(LENGTH.pack(100) + b"slow")
        await until(lambda: b.transport.dropped[Drop.SLOW] == 2)
        a.transport.send(B, b"x", stream=True)
        await until(lambda: b.heard)

        for _, writer in held:
            writer.close()


async def test_a_connection_cut_in_a_packet_is_counted() -> None:
    async with open_net() as net:
        b = await net.add(B)

        _, writer = await asyncio.open_connection(*b.address)
        writer.write(LENGTH.pack(100) + b"half of it")
        writer.close()
        await until(lambda: b.transport.dropped)

        assert b.transport.dropped == {Drop.CUT: 1}


async def test_who_does_not_answer_holds_few_connections() -> None:
    """The others get theirs, and each is given up after its time."""
    async with open_net() as net:
        a = await net.add(A, Limits(sending=4, sending_to_one=2, stream_s=0.5))
        b = await net.add(B)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            net.addresses[C] = silent.getsockname()

            for _ in range(5):
                a.transport.send(C, b"x", stream=True)
            a.transport.send(B, b"y", stream=True)
            await until(lambda: b.heard)
            await until(lambda: a.transport.dropped[Drop.SLOW] == 2)

            assert a.transport.dropped == {Drop.SENDING: 3, Drop.SLOW: 2}


async def test_nobody_listening_is_a_drop() -> None:
    async with open_net() as net:
        a = await net.add(A)
        with socket.create_server(("127.0.0.1", 0)) as gone:
            net.addresses[B] = gone.getsockname()

        a.transport.send(B, b"x")
        a.transport.send(B, b"x", stream=True)
        await until(lambda: a.transport.dropped[Drop.CUT])


async def test_a_port_in_use_is_an_error() -> None:
    async with open_net() as net:
        a = await net.add(A)
        other = Transport(seal_of(B), lambda node: None, lambda sender, payload: None, time.monotonic)

        with pytest.raises(OSError, match="in use"):
            await other.start(port=a.port)
