"""What comes out of gossip: packets to send, and what has become known."""

from typing import NamedTuple

import msgspec

from kvrs.gossip.wire import Packet, Status
from kvrs.ids import NodeId


class Send(msgspec.Struct, frozen=True, gc=False):
    to: NodeId  # `Gossip.address_of` says where that is.
    packet: Packet
    stream: bool = False  # Over TCP: too large for a datagram, or a last try where datagrams may be what fails.


class MemberChanged(NamedTuple):
    """Another node has become known, suspected, dead, gone, or alive again, or lives a new life (`epoch`)."""

    id: NodeId
    epoch: int
    incarnation: int
    status: Status
    by: tuple[NodeId, ...]  # Of a suspicion and a death: by whose word.


class RecordChanged(NamedTuple):
    """An entry of a living node's record was written or taken out; `Gossip.facts` has it already."""

    node: NodeId
    kind: int
    name: str


class Superseded(NamedTuple):
    """Another process runs under this node's name, with this epoch; this one is the older, and silent from now on."""

    epoch: int


Event = MemberChanged | RecordChanged | Superseded
