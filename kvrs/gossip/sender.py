"""Packets that a node sends: piggybacked updates, and pushes of new ones (SWIM, section 4.1)."""

from math import inf

from kvrs.config.gossip import GossipSettings
from kvrs.gossip.events import Send
from kvrs.gossip.members import Member, Members
from kvrs.gossip.piggyback import BroadcastQueue
from kvrs.gossip.wire import HEADER_BYTES, MemberUpdate, Packet, Push, Status
from kvrs.ids import NodeId


class PacketSender:
    """Collects packets in `sends`, and updates of members until they were sent often enough."""

    def __init__(self, me: Member, members: Members, settings: GossipSettings) -> None:
        self.sends: list[Send] = []
        self.room = settings.packet_bytes - HEADER_BYTES
        self.push_at_s = inf
        self._me = me
        self._members = members
        self._settings = settings
        self._broadcasts = BroadcastQueue(settings.retransmit_mult)

    def send(self, to: NodeId, packet: Packet, stream: bool = False) -> None:
        self.sends.append(Send(to, packet, stream))

    def piggyback_updates(self, to: NodeId, room: int | None = None) -> tuple[MemberUpdate, ...]:
        member = self._members.table.get(to)
        if not self._broadcasts and (member is None or member.status is Status.ALIVE):
            return ()
        return self._broadcasts.piggyback(member, self.room if room is None else room)

    def broadcast(self, member: Member, now_s: float) -> None:
        """Send the state of a member to all others, over time."""
        self._broadcasts.add(member, len(self._members.peers) + 1)
        self.push_at_s = min(self.push_at_s, now_s + self._settings.gossip_interval_s)

    def push(self, now_s: float) -> None:
        peers = self._members.random_peers(self._settings.fanout)
        # Without peers the updates wait.
        if peers and (updates := self._broadcasts.updates_to_push(self.room)):
            push = Push(self._me.epoch, self._me.incarnation, updates)
            for member in peers:
                self.send(member.id, push)
        interval_s = self._settings.gossip_interval_s
        self.push_at_s = now_s + interval_s if self._broadcasts.to_push else inf

    def forget(self, member: Member) -> None:
        self._broadcasts.forget(member)
