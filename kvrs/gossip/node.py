"""One member of the cluster, driven by a transport and a clock.

    for send in gossip.handle(packet, sender, now_s): ...   on an authenticated, decoded packet
    for send in gossip.tick(now_s): ...                     at `gossip.next_tick_s`, or earlier
    for event in gossip.take_events(): ...                  after either

`now_s` is any clock of this machine; clocks of two machines are never compared. Whatever it jumps
by, the node's own time advances only while the node is called:

    now_s      ---tick---tick------(stopped, or the clock jumped)------tick---tick---
    own time   ---tick---tick|tick---tick---      the same instant on both sides of the bar

so time in which a node was stopped never counts as silence of another node.
"""

from collections.abc import Mapping
from math import inf
from typing import assert_never

from kvrs.errors import GossipError
from kvrs.gossip.detector import Detector
from kvrs.gossip.exchange import Exchange
from kvrs.gossip.facts import Event, Fact, FactKind, FactRecord, encode_fact, kind_of
from kvrs.gossip.members import Member, Random
from kvrs.gossip.sender import Send
from kvrs.gossip.wire import (
    MAX_ADDRESS_CHARS,
    MAX_ENTRIES,
    MAX_NAME_CHARS,
    Ack,
    Delta,
    Digest,
    IndirectAck,
    MemberUpdate,
    Nack,
    Packet,
    Ping,
    PingReq,
    Push,
    Status,
)
from kvrs.ids import NodeId

TOMBSTONE_S = 60.0  # Time for which the tombstone of a removed entry is kept.
# Share of a probe interval: a tick that is late by less, because the event loop is busy, does not
# stop the node's own time.
_LATE_SHARE = 0.1


class Gossip:
    """State of one member of the gossip. Decisions read `facts` and `members`."""

    def __init__(
        self,
        me: NodeId,
        address: str,
        epoch: int,
        probe_interval_s: float,
        random: Random,
        now_s: float,
        seeds: Mapping[NodeId, str] | None = None,
        tombstone_s: float = TOMBSTONE_S,
    ) -> None:
        """`epoch` is higher than that of every earlier process of this name; `seeds`: addresses of
        the nodes to contact first, by id.
        """
        assert epoch >= 1
        assert 0 < len(me) <= MAX_NAME_CHARS
        assert len(address) <= MAX_ADDRESS_CHARS
        self.id = me
        self._interval_s = probe_interval_s
        self._tombstone_s = tombstone_s
        self._seeds = {node: where for node, where in (seeds or {}).items() if node != me}
        self._detector = Detector(
            MemberUpdate(me, epoch, 0, Status.ALIVE, address), probe_interval_s, random, now_s
        )
        self.facts = self._detector.facts
        self._exchange = Exchange(self._detector, probe_interval_s, self._seeds, random, now_s)
        self._record = self._detector.me.record = FactRecord()
        self._own_s = now_s
        # Time that the node's own time has missed: own time is `now_s` minus this.
        self._missed_s = 0.0
        self._late_s = probe_interval_s * _LATE_SHARE
        self._due_s = now_s
        self._collect_at_s = now_s + tombstone_s

    # The transport calls the methods below.

    @property
    def next_tick_s(self) -> float:
        """Time of the next tick; infinite for a node that is `over`."""
        return self._due_s + self._missed_s

    def handle(self, packet: Packet, sender: NodeId, now_s: float) -> list[Send]:
        """Process a packet of an authenticated sender; return the packets to send."""
        own_s, detector = self._advance(now_s), self._detector
        if (
            detector.over
            or sender == self.id
            or not detector.on_heard_from(sender, packet.epoch, packet.incarnation, own_s)
        ):
            return self._take_sends()
        for update in packet.updates:
            detector.apply_update(update, own_s)
        match packet:
            case Ping():
                detector.prober.on_ping(sender, packet)
            case Ack():
                detector.on_ack(sender, packet, own_s)
            case PingReq():
                detector.prober.on_ping_req(sender, packet, own_s)
            case IndirectAck():
                detector.on_indirect_ack(packet, own_s)
            case Nack():
                detector.prober.on_nack(sender, packet)
            case Digest():
                self._exchange.on_digest(sender, packet, own_s, now_s)
            case Delta():
                self._exchange.on_delta(sender, packet, own_s, now_s)
            case Push():
                pass  # A Push has only updates, which were applied above.
            case _:
                assert_never(packet)
        return self._take_sends()

    def tick(self, now_s: float) -> list[Send]:
        own_s = self._advance(now_s)
        if self._detector.over:
            return self._take_sends()
        self._detector.tick(own_s)
        if own_s >= self._exchange.due_s:
            self._exchange.tick(own_s)
        if own_s >= self._collect_at_s:
            self._collect_at_s = own_s + self._tombstone_s
            self._record.collect(now_s - self._tombstone_s)
            self._detector.me.record_changed()
        return self._take_sends()

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._detector.events = self._detector.events, []
        return events

    def address_of(self, node: NodeId) -> str | None:
        """Return the address of a node that it has published, or else its configured one; None:
        neither.
        """
        member = self._detector.members.table.get(node)
        return member.address if member is not None else self._seeds.get(node)

    # The node's process calls the methods below.

    def publish(self, name: str, fact: Fact, now_s: float) -> None:
        """Write a fact into this node's record.

        Raises:
            GossipError: the record is full, or the fact cannot be encoded.
        """
        kind, value = kind_of(fact), encode_fact(fact)
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise GossipError(f"a name of {len(name)} characters; allowed: 1 to {MAX_NAME_CHARS}")
        if (kind, name) not in self._record.entries and len(self._record.entries) >= MAX_ENTRIES:
            raise GossipError(
                f"a record of more than {MAX_ENTRIES} entries, recent tombstones included"
            )
        self._write(kind, name, value, now_s)

    def withdraw(self, kind: FactKind, name: str, now_s: float) -> None:
        """Remove a fact from this node's record; without effect if it has none."""
        held = self._record.entries.get((kind, name))
        if held is not None and held.value is not None:
            self._write(kind, name, None, now_s)

    def _write(self, kind: FactKind, name: str, value: bytes | None, now_s: float) -> None:
        self._record.write((kind, name), value, now_s)
        self._detector.me.record_changed()

    def probe_now(self, node: NodeId, now_s: float) -> list[Send]:
        """Probe a node out of turn: a closed connection, for example, indicates its death."""
        self._detector.probe_now(node, self._advance(now_s))
        return self._take_sends()

    def leave(self, now_s: float) -> list[Send]:
        """Announce that this node leaves; after that it sends and applies nothing."""
        self._detector.leave(self._advance(now_s))
        return self._take_sends()

    # The methods below read the state.

    @property
    def members(self) -> Mapping[NodeId, Member]:
        """All known members, this node and dead ones included. Read-only."""
        return self._detector.members.table

    @property
    def epoch(self) -> int:
        """The epoch given at the start, or a higher one if an earlier process had that epoch."""
        return self._detector.me.epoch

    @property
    def health(self) -> int:
        """Lifeguard's local health score; 0: healthy. A higher score gives other members more time
        to answer.
        """
        return self._detector.prober.health

    @property
    def over(self) -> bool:
        """True once the node has left or another process has its name: then it sends nothing."""
        return self._detector.over

    def _advance(self, now_s: float) -> float:
        own_s = now_s - self._missed_s
        # A tick at `next_tick_s` is never too early, although the sum is rounded.
        if now_s >= self.next_tick_s:
            own_s = max(own_s, self._due_s)
        if own_s < self._own_s:  # The caller's clock was set back.
            self._missed_s -= self._own_s - own_s
            own_s = self._own_s
        elif own_s > self._due_s + self._late_s:
            missed_s = own_s - max(self._due_s, self._own_s)
            self._missed_s += missed_s
            own_s -= missed_s
            if missed_s > self._interval_s and not self._detector.over:
                self._detector.on_wakeup(own_s)
                self._exchange.sync_now(own_s)
        self._own_s = own_s
        return own_s

    def _take_sends(self) -> list[Send]:
        detector = self._detector
        sends, detector.sender.sends = detector.sender.sends, []
        if detector.over:
            self._due_s = inf
        else:
            self._due_s = max(
                min(detector.due_s, min(self._exchange.due_s, self._collect_at_s)), self._own_s
            )
        return sends
