"""Gossip packets and their encoding: MessagePack arrays of bounded size.

    prober -> target    Ping, answered with Ack of the same `seq`
    prober -> relay     PingReq; the relay pings the target and answers IndirectAck, or Nack
                        without an ack of the target
    any -> any          Push: updates that do not wait for a packet to be piggybacked on
    any -> any          Digest, answered with Deltas: what the sender of the digest lacks, and in
                        `wants` what it has and the other lacks; a Delta with `wants` is answered
                        with Deltas without

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
MAX_ENTRIES = 256  # Most entries of a node's record.
MAX_VALUE_BYTES = 512
# Most bytes of an encoded packet: with headers and authentication a datagram stays below 1,400,
# which fits the usual MTU. Lists in packets are as long as fits.
MAX_PACKET_BYTES = 1280

# Highest allowed number, which is the highest bound that msgspec can check.
MAX_NUMBER = (1 << 63) - 1

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Node = Annotated[NodeId, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARS)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Epoch = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]  # Epoch of a process run.
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]


class Status(IntEnum):
    """Status of a member, in order of precedence: of two updates with equal epoch and incarnation
    the higher status holds.
    """

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3  # The node itself has announced that it leaves.


# Epoch, incarnation and status of a member: the larger tuple is the newer state.
State = tuple[int, int, Status]


class MemberUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """State of a member; only the member itself raises its epoch and incarnation."""

    id: Node
    epoch: Epoch
    incarnation: Natural
    status: Status
    address: Address
    # Nodes that could not reach the member, in the order in which they suspected it; empty if it is
    # not suspect or dead.
    suspectors: Annotated[tuple[Node, ...], msgspec.Meta(max_length=MAX_SUSPECTORS)] = ()

    @property
    def state(self) -> State:
        return self.epoch, self.incarnation, self.status


class KnownMember(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Entry of a digest: a member's newest state and record version at the sender."""

    id: Node
    epoch: Natural  # Epoch of the member's known process; 0: the member is unknown.
    incarnation: Natural
    status: Status
    version: Natural
    floor: Natural  # Version of the record up to which tombstones are forgotten.

    @property
    def state(self) -> State:
        return self.epoch, self.incarnation, self.status


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    kind: Natural  # Value of `facts.FactKind`; unknown kinds are passed on undecoded.
    name: Name
    version: Natural
    # Time since the owner wrote the entry, summed over the clocks of the nodes that passed it on:
    # no two clocks are compared.
    age_ms: Natural
    value: Value | None  # Encoded fact; None: a tombstone.


class RecordDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Changes of a node's record after version `start`, up to `end`."""

    id: Node
    epoch: Natural
    start: Natural
    end: Natural
    floor: Natural
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]


class _Packet(msgspec.Struct, frozen=True, array_like=True, gc=False):
    epoch: Natural  # Epoch of the packet's sender.
    incarnation: Natural


class Ping(_Packet, frozen=True, tag=1):
    seq: Natural
    updates: tuple[MemberUpdate, ...] = ()


class Ack(_Packet, frozen=True, tag=2):
    seq: Natural
    updates: tuple[MemberUpdate, ...] = ()


class PingReq(_Packet, frozen=True, tag=3):
    seq: Natural
    target: Node
    updates: tuple[MemberUpdate, ...] = ()


class IndirectAck(_Packet, frozen=True, tag=4):
    seq: Natural
    target: Node
    target_epoch: Natural
    target_incarnation: Natural
    updates: tuple[MemberUpdate, ...] = ()


class Nack(_Packet, frozen=True, tag=5):
    seq: Natural
    updates: tuple[MemberUpdate, ...] = ()


class Push(_Packet, frozen=True, tag=6):
    updates: tuple[MemberUpdate, ...]


class Digest(_Packet, frozen=True, tag=7):
    """Digest entries of all members that the sender knows with an id in (after, until]; an empty
    bound does not limit them.
    """

    after: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    until: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    known: tuple[KnownMember, ...]
    updates: tuple[MemberUpdate, ...] = ()


class Delta(_Packet, frozen=True, tag=8):
    updates: tuple[MemberUpdate, ...]
    records: tuple[RecordDelta, ...]
    wants: tuple[KnownMember, ...] = ()


Packet = Ping | Ack | PingReq | IndirectAck | Nack | Push | Digest | Delta

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)


def encode(packet: Packet) -> bytes:
    return _encoder.encode(packet)


def decode(data: bytes) -> Packet:
    """Decode a packet. Raises GossipError: the bytes are too long, not MessagePack, of another
    shape, or beyond a bound.
    """
    if len(data) > MAX_PACKET_BYTES:
        raise GossipError(f"a packet of {len(data)} bytes; allowed: at most {MAX_PACKET_BYTES}")
    try:
        packet: Packet = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GossipError(f"not a packet: {error}") from None
    return packet


# Upper bound of an encoded packet's bytes without its texts and the entries of its lists.
HEADER_BYTES = 64


def encoded_bytes(part: MemberUpdate | KnownMember | Entry | RecordDelta) -> int:
    """Return the encoded bytes of an entry of a packet's list, so that packets are filled before
    they are encoded.
    """
    return len(_encoder.encode(part))


def text_bytes(text: str) -> int:
    """Return an upper bound of the encoded bytes of a text."""
    return 2 + len(text.encode())
