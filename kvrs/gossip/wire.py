"""What gossip packets hold, and their encoding: MessagePack arrays, every length bounded before anything is believed.

    prober -> target    Ping, answered with Ack of the same `seq`
    prober -> relay     Ask; the relay pings the target itself and answers Vouch, or Nack when it heard nothing
    anyone -> anyone    Push: news that cannot wait for a ping to ride on
    anyone -> anyone    Digest, answered with Delta: what the asker lacks, and in `wants` what the asker has and the other lacks;
                        a Delta with `wants` is answered with a Delta without

Every packet begins with its sender's epoch and incarnation: whoever hears from a node has heard that it is alive.
Who the sender is comes from the transport, which has authenticated it.
"""

from enum import IntEnum
from typing import Annotated

import msgspec

from kvrs.errors import GossipError
from kvrs.ids import NodeId

MAX_NAME_CHARS = 64
MAX_ADDRESS_CHARS = 128
MAX_ACCUSERS = 8
MAX_STATEMENTS = 2048
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
    """In the order of their weight: of two words with equal epoch and incarnation, the heavier one holds."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3  # Said goodbye; nobody but the node itself says so.


class Statement(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is held of a node. The larger (epoch, incarnation, status) is the newer; only the node itself raises the first two."""

    id: Node
    epoch: Epoch
    incarnation: Natural
    status: Status
    address: Address
    by: Annotated[tuple[Node, ...], msgspec.Meta(max_length=MAX_ACCUSERS)] = ()  # Who could not reach it, first accuser first.


class Known(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much of one node somebody knows: the newest statement, and the record up to `version`."""

    id: Node
    epoch: Natural  # 0: nothing is known.
    incarnation: Natural
    status: Status
    version: Natural
    floor: Natural  # Tombstones up to this version are forgotten.


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    kind: Natural  # Of `facts.Kind`; one that this release does not know is carried on unread.
    name: Name
    version: Natural
    age_ms: Natural  # Since its owner wrote it, by the clocks of those who held it: no two clocks are compared.
    value: Value | None  # None: taken out.


class RecordDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All that changed in a node's record from version `start` (exclusive) to `end`."""

    id: Node
    epoch: Natural
    start: Natural
    end: Natural
    floor: Natural
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]


Statements = Annotated[tuple[Statement, ...], msgspec.Meta(max_length=MAX_STATEMENTS)]
Knowns = Annotated[tuple[Known, ...], msgspec.Meta(max_length=MAX_STATEMENTS)]


class Ping(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    stream: bool = False  # Came over a stream, and the answer is to go over one.
    news: Statements = ()


class Ack(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    news: Statements = ()


class Ask(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    target: Node
    news: Statements = ()


class Vouch(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    target: Node
    target_epoch: Natural
    target_incarnation: Natural
    news: Statements = ()


class Nack(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    epoch: Natural
    incarnation: Natural
    seq: Natural
    news: Statements = ()


class Push(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    epoch: Natural
    incarnation: Natural
    news: Statements


class Digest(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """Of every node whose id lies in (after, until]; an empty bound is none."""

    epoch: Natural
    incarnation: Natural
    room_bytes: Natural  # How large the answer may be.
    after: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    until: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    known: Knowns
    news: Statements = ()


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    epoch: Natural
    incarnation: Natural
    room_bytes: Natural
    news: Statements
    records: Annotated[tuple[RecordDelta, ...], msgspec.Meta(max_length=MAX_STATEMENTS)]
    wants: Knowns = ()


Packet = Ping | Ack | Ask | Vouch | Nack | Push | Digest | Delta

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)


def encode(packet: Packet) -> bytes:
    return _encoder.encode(packet)


def decode(data: bytes) -> Packet:
    """Raises GossipError: longer than any packet, not MessagePack, another shape, or a bound exceeded."""
    if len(data) > MAX_PACKET_BYTES:
        raise GossipError(f"a packet of {len(data)} bytes; allowed: at most {MAX_PACKET_BYTES}")
    try:
        packet: Packet = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GossipError(f"not a packet: {error}") from None
    return packet


# Sizes are summed up before encoding, so that no packet is built that does not fit. They bound what `encode` makes of a part.

HEADER_BYTES = 64  # Of any packet, without its names and what is in its lists.
_INTEGER_BYTES = tuple(1 if bits < 8 else 3 if bits <= 16 else 5 if bits <= 32 else 9 for bits in range(65))


def integer_bytes(value: int) -> int:
    return _INTEGER_BYTES[value.bit_length()]


def text_bytes(text: str) -> int:
    return 2 + (len(text) if text.isascii() else len(text.encode()))


def statement_bytes(statement: Statement) -> int:
    names = text_bytes(statement.id) + text_bytes(statement.address) + sum(map(text_bytes, statement.by))
    return 3 + names + integer_bytes(statement.epoch) + integer_bytes(statement.incarnation)


def known_bytes(known: Known) -> int:
    numbers = (known.epoch, known.incarnation, known.version, known.floor)
    return 2 + text_bytes(known.id) + sum(map(integer_bytes, numbers))


def entry_bytes(name: str, version: int, value: bytes | None) -> int:
    # Header, kind and age (ten years in milliseconds take nine bytes) are taken at their largest.
    return 1 + 9 + 9 + text_bytes(name) + integer_bytes(version) + (3 + len(value) if value is not None else 1)


def record_bytes(node: str) -> int:
    """A record delta without its entries."""
    return 1 + 3 + text_bytes(node) + 4 * 9
