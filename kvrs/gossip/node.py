"""One member of the cluster, as a transport and a clock drive it.

    for send in gossip.handle(packet, sender, now_s): ...   a packet came in, authenticated and decoded
    for send in gossip.tick(now_s): ...                     at `gossip.next_tick_s`, or any earlier
    for event in gossip.take_events(): ...                  after either

`now_s` is any clock of this machine; no two machines' clocks are ever compared. Whatever it jumps by, the node's own time only
moves on while it is attended to:

    now_s      ---tick---tick------(stopped, or the clock jumped)------tick---tick---
    own time   ---tick---tick|tick---tick---                the same instant left and right of the bar

so a node that slept has not waited for anybody, and cannot conclude from silence that it did not listen to.
"""

from collections.abc import Mapping
from math import inf

from kvrs.errors import GossipError
from kvrs.gossip.config import GossipSettings
from kvrs.gossip.detector import Detector
from kvrs.gossip.events import Event, MemberChanged, Send
from kvrs.gossip.exchange import Exchange
from kvrs.gossip.facts import Fact, Facts, Kind, encode_fact, kind_of
from kvrs.gossip.members import Member, Random
from kvrs.gossip.records import Record
from kvrs.gossip.wire import (
    MAX_ADDRESS_CHARS,
    MAX_ENTRIES,
    MAX_NAME_CHARS,
    Ack,
    Ask,
    Delta,
    Digest,
    Nack,
    Packet,
    Ping,
    Statement,
    Status,
    Vouch,
)
from kvrs.ids import NodeId

_LATE_SHARE = 0.1  # Of an interval; what a busy event loop is late by is not worth a thought.


class Gossip:
    """All that is known here. Deciding needs no call: `facts` and `members` are dictionaries."""

    def __init__(
        self,
        me: NodeId,
        address: str,
        epoch: int,
        settings: GossipSettings,
        random: Random,
        now_s: float,
        seeds: Mapping[NodeId, str] | None = None,
    ) -> None:
        """`epoch` is higher than that of every earlier process of this name; `seeds` says where to find others at first."""
        assert epoch >= 1
        assert 0 < len(me) <= MAX_NAME_CHARS
        assert len(address) <= MAX_ADDRESS_CHARS
        self.id = me
        self.facts = Facts()
        self._settings = settings
        self._seeds = {node: where for node, where in (seeds or {}).items() if node != me}
        self._detector = Detector(Statement(me, epoch, 0, Status.ALIVE, address), settings, random, now_s)
        self._exchange = Exchange(self._detector, self.facts, settings, self._seeds, random, now_s)
        self._record = self._detector.me.stored = Record()
        self._shown: dict[NodeId, int] = {me: epoch}  # Of which life of whom the facts are.
        self._read = 0  # How many of the events that nobody has taken yet the facts reflect.
        self._own_s = now_s
        self._missed_s = 0.0  # now_s less this is the node's own time.
        self._late_s = settings.probe_interval_s * _LATE_SHARE
        self._due_s = now_s
        self._collect_at_s = now_s + settings.tombstone_s

    # The transport's side.

    @property
    def next_tick_s(self) -> float:
        """Infinite for a node that is `over`."""
        return self._due_s + self._missed_s

    def handle(self, packet: Packet, sender: NodeId, now_s: float) -> list[Send]:
        """A packet from `sender`, who was authenticated; returns what to send now."""
        own_s, detector = self._attend(now_s), self._detector
        if detector.over or sender == self.id or not detector.hear(sender, packet.epoch, packet.incarnation, own_s):
            return self._finish()
        for statement in packet.news:
            detector.believe(statement, own_s)
        match packet:
            case Ping():
                detector.on_ping(sender, packet)
            case Ack():
                detector.on_ack(sender, packet, own_s)
            case Ask():
                detector.on_ask(sender, packet, own_s)
            case Vouch():
                detector.on_vouch(packet, own_s)
            case Nack():
                detector.on_nack(sender, packet)
            case Digest():
                self._exchange.on_digest(sender, packet, own_s, now_s)
            case Delta():
                self._exchange.on_delta(sender, packet, own_s, now_s)
        return self._finish()

    def tick(self, now_s: float) -> list[Send]:
        own_s = self._attend(now_s)
        if self._detector.over:
            return self._finish()
        self._detector.tick(own_s)
        if own_s >= self._exchange.due_s:
            self._exchange.tick(own_s)
        if own_s >= self._collect_at_s:
            self._collect_at_s = own_s + self._settings.tombstone_s
            self._record.collect(now_s - self._settings.tombstone_s)
            self._detector.me.record_changed()
        return self._finish()

    def take_events(self) -> list[Event]:
        """What has become known since the last call."""
        events, self._detector.events = self._detector.events, []
        self._read = 0
        return events

    def address_of(self, node: NodeId) -> str | None:
        """As the node itself says, or else the configuration."""
        member = self._detector.members.table.get(node)
        return member.address if member is not None else self._seeds.get(node)

    # The node's side.

    def publish(self, name: str, fact: Fact, now_s: float) -> None:
        """Write into this node's record. Raises GossipError: the record is full, or the fact cannot be carried."""
        kind, value = kind_of(fact), encode_fact(fact)
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise GossipError(f"a name of {len(name)} characters; allowed: 1 to {MAX_NAME_CHARS}")
        if (kind, name) not in self._record.entries and len(self._record.entries) >= MAX_ENTRIES:
            raise GossipError(f"a record of more than {MAX_ENTRIES} entries, those taken out of late among them")
        self._record.write((kind, name), value, now_s)
        self._detector.me.record_changed()
        self.facts.put(self.id, kind, name, value, now_s)

    def withdraw(self, kind: Kind, name: str, now_s: float) -> None:
        """Take an entry out of this node's record."""
        held = self._record.entries.get((kind, name))
        if held is None or held.value is None:
            return
        self._record.write((kind, name), None, now_s)
        self._detector.me.record_changed()
        self.facts.put(self.id, kind, name, None, now_s)

    def doubt(self, node: NodeId, now_s: float) -> list[Send]:
        """Something outside of gossip, a closed connection for example, says that the node may be gone: it is probed now."""
        self._detector.doubt(node, self._attend(now_s))
        return self._finish()

    def leave(self, now_s: float) -> list[Send]:
        """Say goodbye, so that nobody has to find out; nothing is sent or believed after that."""
        self._detector.leave(self._attend(now_s))
        return self._finish()

    # To be read.

    @property
    def members(self) -> Mapping[NodeId, Member]:
        """Everybody who is known, this node and the dead among them. Not to be changed."""
        return self._detector.members.table

    @property
    def epoch(self) -> int:
        """As given at the start, unless the process before this one was found to have had it."""
        return self._detector.me.epoch

    @property
    def health(self) -> int:
        """0: this node trusts itself; the higher, the more time it gives others."""
        return self._detector.health.score

    @property
    def over(self) -> bool:
        """Another process has this node's name, or it has left: it is silent for good."""
        return self._detector.over

    def _attend(self, now_s: float) -> float:
        own_s = now_s - self._missed_s
        if now_s >= self.next_tick_s:  # A rounded difference must not make it too early for ever.
            own_s = max(own_s, self._due_s)
        if own_s < self._own_s:  # The clock went back.
            self._missed_s -= self._own_s - own_s
            own_s = self._own_s
        elif own_s > self._due_s + self._late_s:
            missed_s = own_s - max(self._due_s, self._own_s)
            self._missed_s += missed_s
            own_s -= missed_s
            if missed_s > self._settings.probe_interval_s and not self._detector.over:
                self._detector.woke(own_s)
                self._exchange.soon(own_s)
        self._own_s = own_s
        return own_s

    def _finish(self) -> list[Send]:
        detector = self._detector
        sends, detector.sends = detector.sends, []
        if detector.over:
            self._due_s = inf
        else:
            self._due_s = max(min(detector.due_s, min(self._exchange.due_s, self._collect_at_s)), self._own_s)
        if len(detector.events) > self._read:
            self._show(detector.events[self._read :])
            self._read = len(detector.events)
        return sends

    def _show(self, events: list[Event]) -> None:
        """Keep the facts to those of the living, and of the life that they live now."""
        for event in events:
            if not isinstance(event, MemberChanged):
                continue
            member = self._detector.members.table.get(event.id)
            living = member is not None and member.reachable
            epoch = member.epoch if member is not None and living else None
            if self._shown.get(event.id) == epoch:
                continue
            self.facts.forget(event.id)
            if member is None or epoch is None:
                self._shown.pop(event.id, None)
                continue
            self._shown[event.id] = epoch
            if member.stored is not None:
                for (kind, name), held in member.stored.entries.items():
                    if held.value is not None:
                        self.facts.put(event.id, kind, name, held.value, held.written_s)
