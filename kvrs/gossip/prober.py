"""Probes of this node, and pings on behalf of others (SWIM, section 3.1)."""

from kvrs.config.gossip import GossipSettings
from kvrs.gossip.members import Member, Members
from kvrs.gossip.probes import WAVES, Probe, Probes, RelayedPings
from kvrs.gossip.sender import PacketSender
from kvrs.gossip.suspicion import LocalHealth
from kvrs.gossip.wire import Ack, IndirectAck, Nack, Ping, PingReq, text_bytes
from kvrs.ids import NodeId

# Share of the requester's timeout after which a relay sends a nack (Lifeguard, LHA-Probe).
_NACK_SHARE = 0.8


class Prober:
    """Sends pings, ping-reqs, acks and nacks. The detector learns the outcome of a probe from what
    `on_ack`, `on_indirect_ack` and `next_wave` return.
    """

    def __init__(
        self,
        me: Member,
        members: Members,
        sender: PacketSender,
        health: LocalHealth,
        settings: GossipSettings,
    ) -> None:
        self._me = me
        self._members = members
        self._sender = sender
        self._health = health
        self._settings = settings
        self._probes = Probes()
        self._relayed = RelayedPings()
        self._seq = 0

    @property
    def due_s(self) -> float:
        return min(self._probes.due_s, self._relayed.due_s)

    def __contains__(self, target: NodeId) -> bool:
        return target in self._probes

    def probe(self, target: Member, now_s: float) -> None:
        gap_s = self._settings.probe_interval_s * (1 + self._health.score) / WAVES
        probe = Probe(target.id, target.epoch, self._next_seq(), gap_s)
        self._probes.add(probe)
        self.next_wave(probe, now_s)

    def due(self, now_s: float) -> list[Probe]:
        """Probes whose next wave or failure is due."""
        return self._probes.due(now_s) if now_s >= self._probes.due_s else []

    def next_wave(self, probe: Probe, now_s: float) -> Member | None:
        """Send the next pings of a probe; return its target if it has failed instead."""
        target = self._members.table.get(probe.target)
        if target is None or not target.reachable or target.epoch != probe.epoch:
            self._probes.end(probe)
            return None
        if probe.waves == WAVES:
            self._probes.end(probe)
            self._health.worsen(len(probe.relays) - len(probe.nacks) if probe.relays else 1)
            return target
        me, sender, is_last = self._me, self._sender, probe.waves == WAVES - 1
        updates = sender.piggyback_updates(target.id)
        sender.send(target.id, Ping(me.epoch, me.incarnation, probe.seq, is_last, updates), is_last)
        if probe.waves > 0:
            excluded = (target.id, *probe.relays)
            relays = self._members.random_peers(self._settings.relays, but=excluded)
            probe.relays += tuple(relay.id for relay in relays)
            room = sender.room - text_bytes(target.id)
            for relay in relays:
                updates = sender.piggyback_updates(relay.id, room)
                request = PingReq(me.epoch, me.incarnation, probe.seq, target.id, updates)
                sender.send(relay.id, request)
        probe.waves += 1
        self._probes.wait(probe, now_s + probe.gap_s)
        return None

    def end_of(self, target: NodeId) -> None:
        self._probes.end_of(target)

    def clear(self) -> None:
        self._probes.clear()
        self._relayed.clear()

    # Received packets.

    def on_ping(self, sender: NodeId, ping: Ping) -> None:
        updates = self._sender.piggyback_updates(sender)
        ack = Ack(self._me.epoch, self._me.incarnation, ping.seq, updates)
        self._sender.send(sender, ack, ping.stream)

    def on_ack(self, sender: NodeId, ack: Ack) -> Probe | None:
        """End a probe of this node and return it, or pass the ack on to the requester."""
        probe = self._probes.get(ack.seq)
        if probe is not None:
            return self._succeeded(probe) if probe.target == sender else None
        relayed = self._relayed.acked(ack.seq, sender)
        if relayed is not None:
            requester, seq = relayed
            me, room = self._me, self._sender.room - text_bytes(sender)
            updates = self._sender.piggyback_updates(requester, room)
            answer = IndirectAck(
                me.epoch, me.incarnation, seq, sender, ack.epoch, ack.incarnation, updates
            )
            self._sender.send(requester, answer)
        return None

    def on_indirect_ack(self, ack: IndirectAck) -> Probe | None:
        """End a probe of this node and return it; None: the ack is late, perhaps for an earlier
        process of this name.
        """
        probe = self._probes.get(ack.seq)
        return None if probe is None or probe.target != ack.target else self._succeeded(probe)

    def on_nack(self, sender: NodeId, nack: Nack) -> None:
        probe = self._probes.get(nack.seq)
        # Counted once per relay: a duplicated PingReq is answered twice, and more nacks than relays
        # would raise the health score above its maximum.
        if probe is not None and sender in probe.relays:
            probe.nacks.add(sender)

    def on_ping_req(self, sender: NodeId, request: PingReq, now_s: float) -> None:
        target = self._members.table.get(request.target)
        if target is None or target is self._me:
            self._send_nack(sender, request.seq)
            return
        me, seq = self._me, self._next_seq()
        nack_s = now_s + self._settings.probe_interval_s / WAVES * _NACK_SHARE
        self._relayed.add(seq, target.id, sender, request.seq, nack_s)
        updates = self._sender.piggyback_updates(target.id)
        self._sender.send(target.id, Ping(me.epoch, me.incarnation, seq, False, updates))

    def send_nacks(self, now_s: float) -> None:
        """Answer requesters whose targets have not acknowledged in time."""
        if now_s >= self._relayed.due_s:
            for requester, seq in self._relayed.expired(now_s):
                self._send_nack(requester, seq)

    def _send_nack(self, requester: NodeId, seq: int) -> None:
        updates = self._sender.piggyback_updates(requester)
        self._sender.send(requester, Nack(self._me.epoch, self._me.incarnation, seq, updates))

    def _succeeded(self, probe: Probe) -> Probe:
        self._probes.end(probe)
        self._health.improve()
        return probe

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq
