"""Gossip packets and their encoding: MessagePack arrays, with every length bounded on decoding.

    prober -> target    Ping, answered with Ack of the same `seq`
    prober -> relay     PingReq; the relay pings the target and answers IndirectAck, or Nack
                        without an ack of the target
    any -> any          Push: updates that do not wait for a packet to be piggybacked on
    any -> any          Digest, answered with Delta: what the sender of the digest lacks, and in
                        `wants` what it has and the other lacks; a Delta with `wants` is answered
                        with a Delta without

Every packet begins with its sender's epoch and incarnation, and shows that the sender is alive. The
sender's name comes from the transport, which has authenticated the packet.
"""

from enum import IntEnum
from typing import Annotated

import msgspec

from kvrs.errors import GossipError
from kvrs.ids import NodeId

MAX_NAME_CHARS = 64
MAX_ADDRESS_CHARS = 128
MAX_SUSPECTORS = 8
MAX_UPDATES = 2048
MAX_ENTRIES = 256  # Of one node's record.
MAX_VALUE_BYTES = 512
MAX_PACKET_BYTES = 65536  # Over a stream; datagrams are bounded by `gossip.packet_bytes`.

MAX_NUMBER = (1 << 63) - 1  # What msgspec can compare.

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Node = Annotated[NodeId, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Epoch = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]  # Of a process run.
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]


class Status(IntEnum):
    """In order of precedence: of two updates with equal epoch and incarnation the higher holds."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3  # Announced by the node itself.


class MemberUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """State of a member. The larger (epoch, incarnation, status) is the newer; only the node itself
    raises the first two.
    """

    id: Node
    epoch: Epoch
    incarnation: Natural
    status: Status
    address: Address
    # Nodes that could not reach it, in the order of their suspicions.
    suspectors: Annotated[tuple[Node, ...], msgspec.Meta(max_length=MAX_SUSPECTORS)] = ()


class KnownMember(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Entry of a digest: a member's newest state and record version at the sender."""

    id: Node
    epoch: Natural  # 0: the member is unknown.
    incarnation: Natural
    status: Status
    version: Natural
    floor: Natural  # Tombstones up to this version are forgotten.


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    kind: Natural  # Of `facts.Kind`; unknown kinds are passed on undecoded.
    name: Name
    version: Natural
    # Since its owner wrote it, summed over the clocks of the nodes that passed it on: no two clocks
    # are compared.
    age_ms: Natural
    value: Value | None  # None: a tombstone.


class RecordDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Changes of a node's record from version `start` (exclusive) to `end`."""

    id: Node
    epoch: Natural
    start: Natural
    end: Natural
    floor: Natural
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]


MemberUpdates = Annotated[tuple[MemberUpdate, ...], msgspec.Meta(max_length=MAX_UPDATES)]
KnownMembers = Annotated[tuple[KnownMember, ...], msgspec.Meta(max_length=MAX_UPDATES)]


class Ping(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    stream: bool = False  # The ping came over a stream, and so does the ack.
    updates: MemberUpdates = ()


class Ack(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    updates: MemberUpdates = ()


class PingReq(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    target: Node
    updates: MemberUpdates = ()


class IndirectAck(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    target: Node
    target_epoch: Natural
    target_incarnation: Natural
    updates: MemberUpdates = ()


class Nack(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    updates: MemberUpdates = ()


class Push(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    epoch: Natural
    incarnation: Natural
    updates: MemberUpdates


class Digest(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """Covers every node whose id lies in (after, until]; an empty bound is open."""

    epoch: Natural
    incarnation: Natural
    room_bytes: Natural  # Maximum size of the answer.
    after: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    until: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    known: KnownMembers
    updates: MemberUpdates = ()


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    epoch: Natural
    incarnation: Natural
    room_bytes: Natural
    updates: MemberUpdates
    records: Annotated[tuple[RecordDelta, ...], msgspec.Meta(max_length=MAX_UPDATES)]
    wants: KnownMembers = ()


Packet = Ping | Ack | PingReq | IndirectAck | Nack | Push | Digest | Delta

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)


def encode(packet: Packet) -> bytes:
    return _encoder.encode(packet)


def decode(data: bytes) -> Packet:
    """Raises GossipError: the data is too long, not MessagePack, of another shape, or exceeds a
    bound.
    """
    if len(data) > MAX_PACKET_BYTES:
        raise GossipError(f"a packet of {len(data)} bytes; allowed: at most {MAX_PACKET_BYTES}")
    try:
        packet: Packet = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GossipError(f"not a packet: {error}") from None
    return packet


# Sizes are upper bounds of the encoded parts. They are summed before encoding, so that no packet is
# built that does not fit.

HEADER_BYTES = 64  # Of any packet, without its names and list entries.
_INTEGER_BYTES = tuple(
    1 if bits < 8 else 3 if bits <= 16 else 5 if bits <= 32 else 9 for bits in range(65)
)


def integer_bytes(value: int) -> int:
    return _INTEGER_BYTES[value.bit_length()]


def text_bytes(text: str) -> int:
    return 2 + (len(text) if text.isascii() else len(text.encode()))


def update_bytes(update: MemberUpdate) -> int:
    names = (
        text_bytes(update.id) + text_bytes(update.address) + sum(map(text_bytes, update.suspectors))
    )
    return 3 + names + integer_bytes(update.epoch) + integer_bytes(update.incarnation)


def known_member_bytes(known: KnownMember) -> int:
    numbers = (known.epoch, known.incarnation, known.version, known.floor)
    return 2 + text_bytes(known.id) + sum(map(integer_bytes, numbers))


def entry_bytes(name: str, version: int, value: bytes | None) -> int:
    # Upper bounds: header 1, kind 9, age 9 bytes.
    return (
        1
        + 9
        + 9
        + text_bytes(name)
        + integer_bytes(version)
        + (3 + len(value) if value is not None else 1)
    )


def record_bytes(node: str) -> int:
    """Size of a record delta without its entries."""
    return 1 + 3 + text_bytes(node) + 4 * 9
