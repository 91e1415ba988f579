"""Packets that a node sends: updates of members go to a few peers at once, and are then piggybacked
on other packets a bounded number of times (SWIM, section 4.1).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf, log10

import msgspec

from kvrs.gossip.members import Member, Members
from kvrs.gossip.wire import (
    HEADER_BYTES,
    MAX_PACKET_BYTES,
    MemberUpdate,
    Packet,
    Push,
    Status,
)
from kvrs.ids import NodeId

# Number of times that a new update is pushed to some peers. The other nodes get it by piggybacking,
# and then by anti-entropy.
_PUSHES = 2
_PUSH_SHARE = 0.2  # Share of a probe interval between two pushes.
FANOUT = 3  # Number of peers to which a push is sent.
_RETRANSMIT_MULT = 4  # An update is piggybacked on this many packets, times log10(members).
ROOM_BYTES = MAX_PACKET_BYTES - HEADER_BYTES


class Send(msgspec.Struct, frozen=True, gc=False):
    to: NodeId  # Receiver; `Gossip.address_of` returns its address.
    packet: Packet


@dataclass(slots=True, eq=False)
class _Broadcast:
    member: Member
    pushes: int = _PUSHES  # Number of times that the update is still to be pushed.
    sent: int = 0  # Number of packets on which the update was piggybacked.


class PacketSender:
    """Collects packets to send in `sends`, and keeps updates of members until they were sent often
    enough: at most one per member, of its present state.
    """

    def __init__(self, me: Member, members: Members, interval_s: float) -> None:
        self.sends: list[Send] = []
        self.push_at_s = inf
        self._me = me
        self._members = members
        self._push_interval_s = interval_s * _PUSH_SHARE
        self._broadcasts: dict[NodeId, _Broadcast] = {}
        self._limit = 0  # Number of packets on which an update is piggybacked before it is dropped.

    def send(self, to: NodeId, packet: Packet) -> None:
        self.sends.append(Send(to, packet))

    def broadcast(self, member: Member, now_s: float) -> None:
        """Send the present state of a member with this node's next packets, so that all nodes get
        it.
        """
        self._broadcasts.pop(member.id, None)
        self._broadcasts[member.id] = _Broadcast(member)
        count = len(self._members.peers) + 2
        self._limit = _RETRANSMIT_MULT * max(1, ceil(log10(count)))
        self.push_at_s = min(self.push_at_s, now_s + self._push_interval_s)

    def forget(self, member: Member) -> None:
        self._broadcasts.pop(member.id, None)

    def piggyback(self, to: NodeId, room: int = ROOM_BYTES) -> tuple[MemberUpdate, ...]:
        """Return the updates to add to a packet for a member, at most `room` bytes. A suspicion or
        death of the member itself comes first, so that it can refute (Lifeguard, Buddy System).
        """
        member, updates = self._members.table.get(to), list[MemberUpdate]()
        if member is not None and member.status is not Status.ALIVE:
            updates.append(member.update)
            room -= member.update_bytes
        for broadcast in self._fitting(self._broadcasts.values(), room):
            if broadcast.member is not member:
                updates.append(broadcast.member.update)
            broadcast.sent += 1
            self._end_if_sent(broadcast)
        return tuple(updates)

    def push(self, now_s: float) -> None:
        """Send new updates to some peers; what does not fit waits for the next push."""
        peers = self._members.random_peers(FANOUT)
        new = [broadcast for broadcast in self._broadcasts.values() if broadcast.pushes]
        # If there are no peers, the updates wait for the next push.
        if peers and (pushed := self._fitting(new, ROOM_BYTES)):
            updates = tuple(broadcast.member.update for broadcast in pushed)
            push = Push(self._me.epoch, self._me.incarnation, updates)
            for member in peers:
                self.send(member.id, push)
            for broadcast in pushed:
                broadcast.pushes -= 1
                self._end_if_sent(broadcast)
        waits = any(broadcast.pushes for broadcast in new)
        self.push_at_s = now_s + self._push_interval_s if waits else inf

    def _fitting(self, broadcasts: Iterable[_Broadcast], room: int) -> list[_Broadcast]:
        """Return the broadcasts that fit into `room` bytes, the least often sent first."""
        found = list[_Broadcast]()
        for broadcast in sorted(broadcasts, key=lambda broadcast: broadcast.sent):
            room -= broadcast.member.update_bytes
            if room < 0:
                break
            found.append(broadcast)
        return found

    def _end_if_sent(self, broadcast: _Broadcast) -> None:
        if broadcast.pushes == 0 and broadcast.sent >= self._limit:
            del self._broadcasts[broadcast.member.id]
