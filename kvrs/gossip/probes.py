"""Probes of this node, and pings on behalf of others (SWIM, section 3.1).

One interval, with a silent target and three relays:

0            1/3                            2/3                            1
Ping ------- Ping, PingReq to 3 relays ---- Ping, PingReq to 3 others ---- failed
"""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kvrs.gossip.members import Member, Members
from kvrs.gossip.sender import ROOM_BYTES, PacketSender
from kvrs.gossip.wire import Ack, IndirectAck, Nack, Ping, PingReq, text_bytes
from kvrs.ids import NodeId

_WAVES = 3
# Number of members that are asked for an indirect ping with the second ping of a probe, and again
# with the third.
RELAYS = 3
# Upper bound of the local health score (Lifeguard): timeouts are at most 1 + this times as long.
HEALTH_MAX = 8
# Share of the requester's timeout after which a relay sends a nack (Lifeguard, LHA-Probe).
_NACK_SHARE = 0.8
_MAX_RELAYED = 1024  # Most relayed pings that wait for an ack; a further one drops the oldest.


@dataclass(slots=True, eq=False)
class Probe:
    target: NodeId
    epoch: int
    seq: int
    gap_s: float
    due_s: float = inf
    waves: int = 0
    relays: tuple[NodeId, ...] = ()
    # Relays that reported no ack of the target.
    nacks: set[NodeId] = field(default_factory=set)


class _Relayed(NamedTuple):
    """A ping on behalf of another node, the requester, which gets a nack if there is no ack by
    `nack_s`.
    """

    target: NodeId
    requester: NodeId
    seq: int  # Number that the requester gave to its probe.
    nack_s: float


class Prober:
    """Sends pings, ping-reqs, acks and nacks. The results of `on_ack`, `on_indirect_ack` and
    `next_wave` tell the detector the outcome of a probe.
    """

    def __init__(
        self, me: Member, members: Members, sender: PacketSender, interval_s: float
    ) -> None:
        # Lifeguard's local health score: 0 is healthy. A node whose own probes fail where those of
        # others do not, or that has to refute, gives other members more time.
        self.health = 0
        self._me = me
        self._members = members
        self._sender = sender
        self._interval_s = interval_s
        self._probes: dict[int, Probe] = {}  # Probes by number; at most one per target.
        # Relayed pings by their own number, in the order in which their nacks are due.
        self._relayed: dict[int, _Relayed] = {}
        self._seq = 0

    @property
    def due_s(self) -> float:
        first = next(iter(self._relayed.values()), None)
        nack_s = inf if first is None else first.nack_s
        return min(nack_s, min((probe.due_s for probe in self._probes.values()), default=inf))

    def worsen_health(self, by: int = 1) -> None:
        self.health = min(HEALTH_MAX, self.health + by)

    def probe(self, target: Member, now_s: float) -> None:
        """Begin a probe of a member, unless one is in progress."""
        if any(probe.target == target.id for probe in self._probes.values()):
            return
        gap_s = self._interval_s * (1 + self.health) / _WAVES
        probe = Probe(target.id, target.epoch, self._next_seq(), gap_s)
        self._probes[probe.seq] = probe
        self.next_wave(probe, now_s)

    def due(self, now_s: float) -> list[Probe]:
        """Return the probes whose next pings, or whose failure, is due."""
        return [probe for probe in self._probes.values() if probe.due_s <= now_s]

    def next_wave(self, probe: Probe, now_s: float) -> Member | None:
        """Send the next pings of a probe; return its target if all pings remained unanswered, so
        that the probe has failed. None: it goes on, or its target is gone.
        """
        target = self._members.table.get(probe.target)
        if target is None or not target.reachable or target.epoch != probe.epoch:
            del self._probes[probe.seq]
            return None
        if probe.waves == _WAVES:
            del self._probes[probe.seq]
            self.worsen_health(len(probe.relays) - len(probe.nacks) if probe.relays else 1)
            return target
        me, sender = self._me, self._sender
        updates = sender.piggyback(target.id)
        sender.send(target.id, Ping(me.epoch, me.incarnation, probe.seq, updates))
        if probe.waves > 0:
            excluded = (target.id, *probe.relays)
            relays = self._members.random_peers(RELAYS, but=excluded)
            probe.relays += tuple(relay.id for relay in relays)
            room = ROOM_BYTES - text_bytes(target.id)
            for relay in relays:
                updates = sender.piggyback(relay.id, room)
                request = PingReq(me.epoch, me.incarnation, probe.seq, target.id, updates)
                sender.send(relay.id, request)
        probe.waves += 1
        probe.due_s = now_s + probe.gap_s
        return None

    def end_of(self, target: NodeId) -> None:
        for probe in self._probes.values():
            if probe.target == target:
                del self._probes[probe.seq]
                return

    def clear(self) -> None:
        self._probes.clear()
        self._relayed.clear()

    # The methods below handle received packets.

    def on_ping(self, sender: NodeId, ping: Ping) -> None:
        updates = self._sender.piggyback(sender)
        ack = Ack(self._me.epoch, self._me.incarnation, ping.seq, updates)
        self._sender.send(sender, ack)

    def on_ack(self, sender: NodeId, ack: Ack) -> bool:
        """End a probe of this node that the ack answers, and return True; else pass the ack on to
        the node that requested the ping, and return False.
        """
        if ack.seq in self._probes:
            return self._succeeded(ack.seq, sender)
        relayed = self._relayed.get(ack.seq)
        if relayed is not None and relayed.target == sender:
            del self._relayed[ack.seq]
            me, room = self._me, ROOM_BYTES - text_bytes(sender)
            updates = self._sender.piggyback(relayed.requester, room)
            answer = IndirectAck(
                me.epoch, me.incarnation, relayed.seq, sender, ack.epoch, ack.incarnation, updates
            )
            self._sender.send(relayed.requester, answer)
        return False

    def on_indirect_ack(self, ack: IndirectAck) -> bool:
        """End the probe of this node that the ack answers, and return True. False: the ack is late,
        perhaps for an earlier process of this name.
        """
        return self._succeeded(ack.seq, ack.target)

    def on_nack(self, sender: NodeId, nack: Nack) -> None:
        probe = self._probes.get(nack.seq)
        # A relay counts once: a duplicated PingReq gets two answers, and more nacks than relays
        # would raise the health score above its maximum.
        if probe is not None and sender in probe.relays:
            probe.nacks.add(sender)

    def on_ping_req(self, sender: NodeId, request: PingReq, now_s: float) -> None:
        target = self._members.table.get(request.target)
        if target is None or target is self._me:
            self._send_nack(sender, request.seq)
            return
        me, seq = self._me, self._next_seq()
        nack_s = now_s + self._interval_s / _WAVES * _NACK_SHARE
        self._relayed[seq] = _Relayed(target.id, sender, request.seq, nack_s)
        if len(self._relayed) > _MAX_RELAYED:
            del self._relayed[next(iter(self._relayed))]
        updates = self._sender.piggyback(target.id)
        self._sender.send(target.id, Ping(me.epoch, me.incarnation, seq, updates))

    def send_nacks(self, now_s: float) -> None:
        """Send a nack to each requester whose target has not acknowledged in time."""
        for seq, relayed in list(self._relayed.items()):
            if relayed.nack_s > now_s:
                return
            del self._relayed[seq]
            self._send_nack(relayed.requester, relayed.seq)

    def _send_nack(self, requester: NodeId, seq: int) -> None:
        updates = self._sender.piggyback(requester)
        self._sender.send(requester, Nack(self._me.epoch, self._me.incarnation, seq, updates))

    def _succeeded(self, seq: int, target: NodeId) -> bool:
        probe = self._probes.get(seq)
        if probe is None or probe.target != target:
            return False
        del self._probes[seq]
        self.health = max(0, self.health - 1)
        return True

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq
