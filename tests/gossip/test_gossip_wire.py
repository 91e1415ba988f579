"""Encoding of gossip packets: every length is bounded, and no size is underestimated."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import GossipError
from kvrs.gossip import wire
from kvrs.gossip.wire import (
    Ack,
    Delta,
    Digest,
    Entry,
    KnownMember,
    MemberUpdate,
    Packet,
    Ping,
    PingReq,
    Push,
    RecordDelta,
    Status,
    decode,
    encode,
)
from kvrs.ids import NodeId

A, B = NodeId("a"), NodeId("b")
UPDATE = MemberUpdate(A, 1, 2, Status.SUSPECT, "10.0.0.1:7", (B,))
ENTRY = Entry(1, "d0", 3, 17, b"value")
PACKETS = (
    Ping(1, 0, 5, (UPDATE,)),
    Ack(1, 0, 5),
    PingReq(1, 0, 5, B),
    wire.IndirectAck(1, 0, 5, NodeId("b"), 1, 2),
    wire.Nack(1, 0, 5),
    Push(1, 0, (UPDATE, UPDATE)),
    Digest(1, 0, "", "zz", (KnownMember(A, 1, 2, Status.ALIVE, 9, 0),), (UPDATE,)),
    Delta(
        1,
        0,
        (),
        (RecordDelta(A, 1, 0, 3, 0, (ENTRY, Entry(2, "n1", 2, 0, None))),),
        (KnownMember(B, 0, 0, Status.ALIVE, 0, 0),),
    ),
)

naturals = st.integers(0, (1 << 63) - 1)
printable = st.characters(exclude_categories=["C", "Z"])
names = st.text(printable, min_size=1, max_size=wire.MAX_NAME_CHARS)
nodes = names.map(NodeId)
statuses = st.sampled_from(Status)
updates = st.builds(
    MemberUpdate,
    nodes,
    st.integers(1, (1 << 63) - 1),
    naturals,
    statuses,
    st.text(printable, max_size=wire.MAX_ADDRESS_CHARS),
    st.lists(nodes, max_size=wire.MAX_SUSPECTORS).map(tuple),
)
digest_entries = st.builds(KnownMember, nodes, naturals, naturals, statuses, naturals, naturals)


@pytest.mark.parametrize("packet", PACKETS, ids=lambda packet: type(packet).__name__)
def test_a_packet_comes_back_as_it_was(packet: Packet) -> None:
    """Encoding loses nothing."""
    assert decode(encode(packet)) == packet


@given(updates, digest_entries, nodes, naturals, st.sampled_from((0, 1, 15, 16, 300)))
def test_packets_are_never_larger_than_the_sum_of_their_parts(
    update: MemberUpdate, known: KnownMember, name: NodeId, number: int, count: int
) -> None:
    """Packets are filled by the sizes of their parts, and a bound for the rest."""
    some, entries, head = (update,) * count, (known,) * count, (number, number)
    parts = wire.HEADER_BYTES + count * wire.encoded_bytes(update)
    digest = parts + count * wire.encoded_bytes(known)
    texts = wire.text_bytes(name)

    assert len(encode(wire.IndirectAck(*head, number, name, number, number, some))) <= parts + texts
    assert len(encode(PingReq(*head, number, name, some))) <= parts + texts
    assert len(encode(Digest(*head, name, name, entries, some))) <= digest + 2 * texts
    assert len(encode(Delta(*head, some, (), entries))) <= digest


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
        _with(PACKETS[0], updates=(msgspec.structs.replace(UPDATE, status=7),)),
        _with(PACKETS[0], updates=(msgspec.structs.replace(UPDATE, epoch=0),)),
        _with(PACKETS[0], updates=(msgspec.structs.replace(UPDATE, suspectors=(B,) * 9),)),
        _with(PACKETS[0], updates=(msgspec.structs.replace(UPDATE, address="x" * 129),)),
        _with(PACKETS[7], records=(RecordDelta(A, 1, 0, 3, 0, (ENTRY,) * 257),)),
        _with(
            PACKETS[7],
            records=(
                RecordDelta(A, 1, 0, 3, 0, (msgspec.structs.replace(ENTRY, value=bytes(513)),)),
            ),
        ),
        bytes(wire.MAX_PACKET_BYTES + 1),
        b"\x91" * 50_000,
    ],
    ids=lambda data: f"{len(data)}:{data[:12].hex()}",
)
def test_malformed_packets_and_exceeded_bounds_are_rejected(data: bytes) -> None:
    """With GossipError and no other exception."""
    with pytest.raises(GossipError):
        decode(data)
