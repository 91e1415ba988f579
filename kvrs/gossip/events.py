"""Outputs of gossip: packets to send, and events."""

from typing import NamedTuple

import msgspec

from kvrs.gossip.wire import Packet, Status
from kvrs.ids import NodeId


class Send(msgspec.Struct, frozen=True, gc=False):
    to: NodeId  # `Gossip.address_of` has its address.
    packet: Packet
    # Over TCP: too large for a datagram, or a last try where datagrams may be what fails.
    stream: bool = False


class MemberChanged(NamedTuple):
    """Another node has joined, left, become suspect, dead or alive again, or was restarted (a new
    `epoch`).
    """

    id: NodeId
    epoch: int
    incarnation: int
    status: Status
    suspectors: tuple[NodeId, ...]  # Of a suspicion and a death: the nodes that could not reach it.


class RecordChanged(NamedTuple):
    """An entry of a reachable node's record was written or removed; `Gossip.facts` reflects it."""

    node: NodeId
    kind: int
    name: str


class Superseded(NamedTuple):
    """A newer process runs under this node's name, with this epoch; this one sends nothing more."""

    epoch: int


Event = MemberChanged | RecordChanged | Superseded
