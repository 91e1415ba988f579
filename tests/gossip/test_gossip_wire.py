"""What crosses the network between gossip nodes: bounded before it is believed, and never larger than was reckoned."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import GossipError
from kvrs.gossip import wire
from kvrs.gossip.wire import (
    Ack,
    Ask,
    Delta,
    Digest,
    Entry,
    Known,
    Packet,
    Ping,
    Push,
    RecordDelta,
    Statement,
    Status,
    decode,
    encode,
)
from kvrs.ids import NodeId

A, B = NodeId("a"), NodeId("b")
STATEMENT = Statement(A, 1, 2, Status.SUSPECT, "10.0.0.1:7", (B,))
ENTRY = Entry(1, "d0", 3, 17, b"value")
PACKETS = (
    Ping(1, 0, 5, True, (STATEMENT,)),
    Ack(1, 0, 5),
    Ask(1, 0, 5, B),
    wire.Vouch(1, 0, 5, NodeId("b"), 1, 2),
    wire.Nack(1, 0, 5),
    Push(1, 0, (STATEMENT, STATEMENT)),
    Digest(1, 0, 1280, "", "zz", (Known(A, 1, 2, Status.ALIVE, 9, 0),), (STATEMENT,)),
    Delta(
        1, 0, 1280, (), (RecordDelta(A, 1, 0, 3, 0, (ENTRY, Entry(2, "n1", 2, 0, None))),), (Known(B, 0, 0, Status.ALIVE, 0, 0),)
    ),
)

naturals = st.integers(0, (1 << 63) - 1)
names = st.text(min_size=1, max_size=wire.MAX_NAME_CHARS).filter(lambda text: text.isprintable())
nodes = names.map(NodeId)
statuses = st.sampled_from(Status)
statements = st.builds(
    Statement,
    nodes,
    st.integers(1, (1 << 63) - 1),
    naturals,
    statuses,
    st.text(max_size=wire.MAX_ADDRESS_CHARS).filter(lambda text: text.isprintable()),
    st.lists(nodes, max_size=wire.MAX_ACCUSERS).map(tuple),
)
knowns = st.builds(Known, nodes, naturals, naturals, statuses, naturals, naturals)
entries = st.builds(Entry, st.integers(0, 9), names, naturals, st.integers(0, 1 << 40), st.none() | st.binary(max_size=512))


@pytest.mark.parametrize("packet", PACKETS, ids=lambda packet: type(packet).__name__)
def test_a_packet_comes_back_as_it_was(packet: Packet) -> None:
    """Encoding loses nothing."""
    assert decode(encode(packet)) == packet


@given(statements)
def test_statements_are_never_larger_than_reckoned(statement: Statement) -> None:
    """Packets are filled by reckoned sizes, so a size may be too large, never too small."""
    assert len(msgspec.msgpack.encode(statement)) <= wire.statement_bytes(statement)


@given(knowns)
def test_knowns_are_never_larger_than_reckoned(known: Known) -> None:
    """As statements."""
    assert len(msgspec.msgpack.encode(known)) <= wire.known_bytes(known)


@given(entries)
def test_entries_are_never_larger_than_reckoned(entry: Entry) -> None:
    """As statements."""
    assert len(msgspec.msgpack.encode(entry)) <= wire.entry_bytes(entry.name, entry.version, entry.value)


@given(nodes, naturals)
def test_headers_are_never_larger_than_reckoned(name: NodeId, number: int) -> None:
    """As statements; what a packet holds beside its lists."""
    most = wire.HEADER_BYTES

    assert len(encode(wire.Vouch(number, number, number, name, number, number))) <= most + wire.text_bytes(name)
    assert len(encode(Ask(number, number, number, name))) <= most + wire.text_bytes(name)
    assert len(encode(Digest(number, number, number, name, name, ()))) <= most + 2 * wire.text_bytes(name)
    assert len(msgspec.msgpack.encode(RecordDelta(name, number, number, number, number, ()))) <= wire.record_bytes(name)


def _with(packet: Packet, **changes: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(packet, **changes))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(PACKETS[0])[:-3],
        encode(PACKETS[0]) + b"\x00",
        msgspec.msgpack.encode([99, 1, 0, 5]),
        msgspec.msgpack.encode({"epoch": 1}),
        _with(PACKETS[0], seq=-1),
        _with(PACKETS[0], seq=1 << 63),
        _with(PACKETS[0], seq="5"),
        _with(PACKETS[2], target=""),
        _with(PACKETS[2], target="x" * 65),
        _with(PACKETS[0], news=(msgspec.structs.replace(STATEMENT, status=7),)),
        _with(PACKETS[0], news=(msgspec.structs.replace(STATEMENT, epoch=0),)),
        _with(PACKETS[0], news=(msgspec.structs.replace(STATEMENT, by=(B,) * 9),)),
        _with(PACKETS[0], news=(msgspec.structs.replace(STATEMENT, address="x" * 129),)),
        _with(PACKETS[0], news=(STATEMENT,) * 2049),
        _with(PACKETS[7], records=(RecordDelta(A, 1, 0, 3, 0, (ENTRY,) * 257),)),
        _with(PACKETS[7], records=(RecordDelta(A, 1, 0, 3, 0, (msgspec.structs.replace(ENTRY, value=bytes(513)),)),)),
        bytes(wire.MAX_PACKET_BYTES + 1),
        b"\x91" * 50_000,
    ],
    ids=lambda data: f"{len(data)}:{data[:12].hex()}",
)
def test_what_is_no_packet_or_exceeds_a_bound_is_refused(data: bytes) -> None:
    """Nothing of a malformed packet is believed, and nothing but GossipError comes of it."""
    with pytest.raises(GossipError):
        decode(data)


def test_noise_is_refused_or_is_a_packet() -> None:
    """Whatever a network does to a packet, decoding ends in a packet or a GossipError."""
    draw = random.Random(0)
    for _ in range(20_000):
        data = bytearray(encode(draw.choice(PACKETS)))
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            decode(bytes(data))
        except GossipError:
            continue
