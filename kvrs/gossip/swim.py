"""One member of the gossip, driven by a transport and a clock: SWIM (Das et al., DSN 2002, sections
3, 4) with Lifeguard (arXiv 1707.00788), and scuttlebutt's anti-entropy of records (van Renesse et
al., LADIS 2008). Pure.

    for send in gossip.handle(packet, sender, now_s): ...   on an authenticated, decoded packet
    for send in gossip.tick(now_s): ...                     at `gossip.next_tick_s`, or earlier
    for event in gossip.take_events(): ...                  after either

`now_s` is any clock of this machine; clocks of two machines are never compared. Whatever it jumps
by, the node's own time advances only while the node is called:

    now_s      ---tick---tick------(stopped, or the clock jumped)------tick---tick---
    own time   ---tick---tick|tick---tick---      the same instant on both sides of the bar

so time in which a node was stopped never counts as silence of another node.

The state of a member only grows, in the order (epoch, incarnation, status), and only the member
itself raises the first two; so all nodes converge, whatever the order and the number of updates
that arrive. A new process has a higher epoch than all before it, so no update about an older
process applies to it.

A member is probed by pings of this node and of relays. One interval, with a silent target and three
relays:

    0            1/3                            2/3                            1
    Ping ------- Ping, PingReq to 3 relays ---- Ping, PingReq to 3 others ---- failed

Updates of members go to a few peers at once, and are then piggybacked on other packets a bounded
number of times (SWIM, section 4.1). What that missed, and records, come by anti-entropy: two nodes
compare digests of all members, and each sends the deltas that the other lacks.

The member table: one entry per known node, with this node.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, inf, log, log10
from typing import Generic, NamedTuple, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from kvrs.errors import GossipError
from kvrs.gossip.facts import (
    Event,
    Fact,
    FactKind,
    FactRecord,
    MemberChanged,
    RecordChanged,
    Superseded,
    encode_fact,
    kind_of,
    start_for,
)
from kvrs.gossip.wire import (
    HEADER_BYTES,
    MAX_ADDRESS_CHARS,
    MAX_ENTRIES,
    MAX_NAME_CHARS,
    MAX_NUMBER,
    MAX_PACKET_BYTES,
    MAX_SUSPECTORS,
    Ack,
    Delta,
    Digest,
    IndirectAck,
    KnownMember,
    MemberUpdate,
    Nack,
    Packet,
    Ping,
    PingReq,
    Push,
    RecordDelta,
    State,
    Status,
    encoded_bytes,
    text_bytes,
)
from kvrs.ids import NodeId

Random = Callable[[], float]  # Function that returns random numbers, uniform in [0, 1).


class Member:
    """Known state of one node: its newest update, the copy of its record, and the digest entry of
    both.
    """

    def __init__(self, update: MemberUpdate, since_s: float) -> None:
        self.id = update.id
        self.record: FactRecord | None = None
        self.set(update, since_s)

    def set(self, update: MemberUpdate, since_s: float) -> None:
        self.update, self.since_s = update, since_s
        self.update_bytes = encoded_bytes(update)
        self.state = self.epoch, self.incarnation, self.status = update.state
        self.address, self.suspectors = update.address, update.suspectors
        self._known: tuple[KnownMember, int] | None = None

    @property
    def reachable(self) -> bool:
        return self.status <= Status.SUSPECT

    def known(self) -> tuple[KnownMember, int]:
        """Return the member's digest entry and its size in bytes; computed once per change."""
        if self._known is None:
            record = self.record
            version, floor = (record.version, record.floor) if record else (0, 0)
            made = KnownMember(self.id, *self.state, version, floor)
            self._known = made, encoded_bytes(made)
        return self._known

    def record_changed(self) -> None:
        self._known = None


class Members:
    """Members by id, and the reachable ones in a list, so that one is drawn in constant time."""

    def __init__(self, me: Member, random: Random) -> None:
        self._random = random
        self.table: dict[NodeId, Member] = {me.id: me}
        # Ids of all members, sorted, because a digest covers a range of ids.
        self.ids: list[NodeId] = [me.id]
        self.peers: list[Member] = []  # Members that are alive or suspect, without this node.
        self._round: list[Member] = []  # Members that are still to be probed in the present round.

    def add(self, member: Member) -> None:
        self.table[member.id] = member
        insort(self.ids, member.id)
        if member.reachable:
            self.peers.append(member)
            # A new member is probed at a random place of the present round (SWIM, section 4.3).
            self._round.insert(int(self._random() * (len(self._round) + 1)), member)

    def remove(self, member: Member) -> None:
        assert not member.reachable
        del self.table[member.id]
        self.ids.remove(member.id)

    def set(self, member: Member, update: MemberUpdate, now_s: float) -> None:
        """Set a member's update, and add the member to the reachable ones or remove it."""
        was_reachable = member.reachable
        member.set(update, now_s)
        if member.reachable and not was_reachable:
            self.peers.append(member)
        elif was_reachable and not member.reachable:
            self.peers.remove(member)

    def random_peers(self, count: int, but: tuple[NodeId, ...] = ()) -> list[Member]:
        """Return up to `count` distinct random peers whose ids are not in `but`."""
        found = list[Member]()
        peers, random = self.peers, self._random
        if len(peers) <= count + len(but):
            return [member for member in peers if member.id not in but][:count]
        while len(found) < count:
            member = peers[int(random() * len(peers))]
            if member.id not in but and member not in found:
                found.append(member)
        return found

    def next_to_probe(self) -> Member | None:
        """Return the next member to probe; None: there are no peers. Each round probes all in a new
        random order (SWIM, section 4.3), so no member waits longer than two rounds.
        """
        while True:
            while self._round:
                member = self._round.pop()
                if member.reachable and self.table.get(member.id) is member:
                    return member
            if not self.peers:
                return None
            self._round = self.peers.copy()
            for i in range(len(self._round) - 1, 0, -1):
                j = int(self._random() * (i + 1))
                self._round[i], self._round[j] = self._round[j], self._round[i]

    def between(self, after: str, until: str) -> list[NodeId]:
        """Return the ids in (after, until]; an empty bound does not limit them."""
        first = bisect_right(self.ids, after) if after else 0
        last = bisect_right(self.ids, until) if until else len(self.ids)
        return self.ids[first:last]


F = TypeVar("F", bound=Fact)


class Report(msgspec.Struct, Generic[F], frozen=True):
    """A fact, and the time at which its owner wrote it, by this node's clock."""

    fact: F
    written_s: float


class Facts:
    """Facts in the records of all reachable nodes, by (publishing node, name)."""

    def __init__(self, members: Mapping[NodeId, Member]) -> None:
        self._members = members
        self.unread = 0  # Number of received values that could not be decoded.

    def of(self, kind: type[F]) -> dict[tuple[NodeId, str], Report[F]]:
        return {
            (node, name): Report(report.fact, report.written_s)
            for _, node, name, report in self.all()
            if isinstance(report.fact, kind)
        }

    def about(self, kind: FactKind, name: str) -> Iterator[tuple[NodeId, Fact]]:
        """Return each fact of this kind and name, with the node that published it."""
        for member in self._members.values():
            if member.record is not None and member.reachable:
                held = member.record.entries.get((kind, name))
                if held is not None and held.fact is not None:
                    yield member.id, held.fact

    def all(self) -> Iterator[tuple[FactKind, NodeId, str, Report[Fact]]]:
        """Return kind, publishing node, name and report of every fact."""
        for member in self._members.values():
            if member.record is None or not member.reachable:
                continue
            for (kind, name), held in member.record.entries.items():
                if held.fact is not None:
                    yield FactKind(kind), member.id, name, Report(held.fact, held.written_s)


# Suspicions.

# Length of a suspicion that `CONFIRMATIONS` other members confirm, in probe intervals times
# log10(members). An unconfirmed suspicion is `SUSPICION_MAX_MULT` times as long.
SUSPICION_MULT = 2.0
SUSPICION_MAX_MULT = 6.0
CONFIRMATIONS = 3

# Probes.

_WAVES = 3
# Number of members that are asked for an indirect ping with the second ping of a probe, and again
# with the third.
RELAYS = 3
# Upper bound of the local health score (Lifeguard): timeouts are at most 1 + this times as long.
HEALTH_MAX = 8
# Share of the requester's timeout after which a relay sends a nack (Lifeguard, LHA-Probe).
_NACK_SHARE = 0.8
_MAX_RELAYED = 1024  # Most relayed pings that wait for an ack; a further one drops the oldest.
# Mean number of peers that probe a suspect as soon as they learn of the suspicion. Without these
# probes a suspicion would wait for confirmations until the suspect's turn in the other nodes'
# rounds.
_EXPECTED_PROBERS = 8
# With fewer peers a node probes up to twice as often, because each peer then gets probes from few
# nodes.
_FULL_RATE_PEERS = 8

# The member table.

# Most members in the table; a further one replaces the member dead for longest, and is refused if
# all are reachable.
MEMBERS_MAX = 4096
# Probe intervals after the first received packet in which an update with a higher epoch is taken
# for one about the process before this one; later it means that a newer process runs.
_STARTUP_INTERVALS = 20.0
FORGET_S = 3600.0  # Time for which a member that is dead or has left stays in the table.
TOMBSTONE_S = 60.0  # Time for which the tombstone of a removed entry is kept.
# Share of a probe interval: a tick that is late by less, because the event loop is busy, does not
# stop the node's own time.
_LATE_SHARE = 0.1

# Updates.

# Number of times that a new update is pushed to some peers. The other nodes get it by piggybacking,
# and then by anti-entropy.
_PUSHES = 2
_PUSH_SHARE = 0.2  # Share of a probe interval between two pushes.
FANOUT = 3  # Number of peers to which a push is sent.
_RETRANSMIT_MULT = 4  # An update is piggybacked on this many packets, times log10(members).
ROOM_BYTES = MAX_PACKET_BYTES - HEADER_BYTES

# Anti-entropy.

# Probe intervals between two exchanges with a random peer, and between two attempts to reach a dead
# member or a lost seed.
_SYNC_INTERVALS = 2.0
RECONNECT_INTERVALS = 10.0
_DELTAS = 16  # Most packets that answer a digest; the next exchange brings the rest.
_WANTS_SHARE = 0.5  # Largest share of a delta's bytes that `wants` may take.
# Share of the interval at which exchanges repeat for `_BUSY_INTERVALS` after one that has brought
# records, since more may be missing and packets may be lost.
_BUSY_SHARE = 0.2
_BUSY_INTERVALS = 2.0


class Send(msgspec.Struct, frozen=True, gc=False):
    to: NodeId  # Receiver; `Gossip.address_of` returns its address.
    packet: Packet


class Suspicion:
    """Suspicion of one incarnation of one member (SWIM, section 4.2).

    Each further suspector shortens it: probes of a dead node fail from everywhere, while a lost
    packet, or a suspector that does not receive, is confirmed by no other node. A node declares a
    member dead only if a probe of its own failed during this suspicion (`own_probe_failed`).
    """

    def __init__(self, interval_s: float, members: int, since_s: float) -> None:
        """`members`: number of reachable members, with this node and the suspect."""
        self.since_s = since_s
        self.least_s = SUSPICION_MULT * max(1.0, log10(members)) * interval_s
        self.max_s = self.least_s * SUSPICION_MAX_MULT
        # All members except the suspect and the first suspector can confirm the suspicion.
        self.confirmations = max(0, min(CONFIRMATIONS, members - 2))
        self.own_probe_failed = False
        # The suspicion's time is over, and a probe by this node is in progress.
        self.probing = False

    def ends_s(self, suspectors: int) -> float:
        """Return the time at which the suspicion ends, after `most - (most - least) * log(c + 1) /
        log(k + 1)` seconds with c of k confirmations (Lifeguard, LHA-Suspicion); `suspectors` is c
        + 1.
        """
        if self.confirmations == 0:
            return self.since_s + self.least_s
        share = min(1.0, log(max(1, suspectors)) / log(self.confirmations + 1))
        return self.since_s + self.max_s - (self.max_s - self.least_s) * share


@dataclass(slots=True, eq=False)
class _Probe:
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


@dataclass(slots=True, eq=False)
class _Broadcast:
    member: Member
    pushes: int = _PUSHES  # Number of times that the update is still to be pushed.
    sent: int = 0  # Number of packets on which the update was piggybacked.


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
        self.over = False  # The node has left, or another process has its name: it sends nothing.
        # Lifeguard's local health score: 0 is healthy. A node whose own probes fail where those of
        # others do not, or that has to refute, gives other members more time.
        self.health = 0
        self._interval_s = probe_interval_s
        self._tombstone_s = tombstone_s
        self._random = random
        self._seeds = {node: where for node, where in (seeds or {}).items() if node != me}
        self._me = Member(MemberUpdate(me, epoch, 0, Status.ALIVE, address), now_s)
        self._record = self._me.record = FactRecord()
        self._members = Members(self._me, random)
        self.facts = Facts(self._members.table)
        self._events: list[Event] = []
        self._sends: list[Send] = []

        # Own time.
        self._own_s = now_s
        # Time that the node's own time has missed: own time is `now_s` minus this.
        self._missed_s = 0.0
        self._due_s = now_s
        self._startup_until_s = inf
        self._collect_at_s = now_s + tombstone_s

        # Probes and suspicions.
        self._seq = 0
        self._probes: dict[int, _Probe] = {}  # Probes by number; at most one per target.
        # Relayed pings by their own number, in the order in which their nacks are due.
        self._relayed: dict[int, _Relayed] = {}
        self._suspicions: dict[NodeId, Suspicion] = {}
        self._probe_at_s = now_s + random() * probe_interval_s
        self._suspicion_at_s = inf

        # Updates: at most one per member, of its present state, until it was sent often enough.
        self._broadcasts: dict[NodeId, _Broadcast] = {}
        self._limit = 0  # Number of packets on which an update is piggybacked before it is dropped.
        self._push_at_s = inf

        # Anti-entropy. `_after` is the last node id of the last digest, behind which the next
        # digest begins; "": at the table's start.
        self._after = ""
        self._sync_at_s = self._synced_s = self._busy_until_s = now_s
        self._reconnect_at_s = now_s + RECONNECT_INTERVALS * probe_interval_s
        self._is_first_sync = True
        self._broadcast(self._me, now_s)

    # The transport calls the methods below.

    @property
    def next_tick_s(self) -> float:
        """Time of the next tick; infinite for a node that is `over`."""
        return self._due_s + self._missed_s

    def handle(self, packet: Packet, sender: NodeId, now_s: float) -> list[Send]:
        """Process a packet of an authenticated sender; return the packets to send."""
        own_s = self._advance(now_s)
        if (
            self.over
            or sender == self.id
            or not self._heard_from(sender, packet.epoch, packet.incarnation, own_s)
        ):
            return self._take_sends()
        for update in packet.updates:
            self._apply_update(update, own_s)
        match packet:
            case Ping():
                self._on_ping(sender, packet)
            case Ack():
                self._on_ack(sender, packet, own_s)
            case PingReq():
                self._on_ping_req(sender, packet, own_s)
            case IndirectAck():
                self._on_indirect_ack(packet, own_s)
            case Nack():
                self._on_nack(sender, packet)
            case Digest():
                self._on_digest(sender, packet, own_s, now_s)
            case Delta():
                self._on_delta(sender, packet, own_s, now_s)
            case Push():
                pass  # A Push has only updates, which were applied above.
            case _:
                assert_never(packet)
        return self._take_sends()

    def tick(self, now_s: float) -> list[Send]:
        """Do what is due; return the packets to send."""
        own_s = self._advance(now_s)
        if self.over:
            return self._take_sends()
        for probe in [each for each in self._probes.values() if each.due_s <= own_s]:
            target = self._next_wave(probe, own_s)
            if target is not None:
                self._probe_failed(target, own_s)
        if own_s >= self._suspicion_at_s:
            self._check_suspicions(own_s)
        if own_s >= self._probe_at_s:
            share = min(1.0, max(0.5, len(self._members.peers) / _FULL_RATE_PEERS))
            self._probe_at_s = own_s + self._interval_s * share * (1 + self.health)
            if (target := self._members.next_to_probe()) is not None:
                self._probe(target, own_s)
        self._send_nacks(own_s)
        if own_s >= self._push_at_s:
            self._push(own_s)
        if own_s >= self._sync_at_s:
            self._sync(own_s)
        if own_s >= self._reconnect_at_s:
            self._reconnect_at_s = own_s + RECONNECT_INTERVALS * self._interval_s
            self._reconnect()
        if own_s >= self._collect_at_s:
            self._collect_at_s = own_s + self._tombstone_s
            self._record.collect(now_s - self._tombstone_s)
            self._me.record_changed()
        return self._take_sends()

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def address_of(self, node: NodeId) -> str | None:
        """Return the address of a node that it has published, or else its configured one; None:
        neither.
        """
        member = self._members.table.get(node)
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
        self._me.record_changed()

    def probe_now(self, node: NodeId, now_s: float) -> list[Send]:
        """Probe a node out of turn: a closed connection, for example, indicates its death."""
        own_s, member = self._advance(now_s), self._members.table.get(node)
        if member is not None and member is not self._me and member.reachable:
            self._probe(member, own_s)
        return self._take_sends()

    def leave(self, now_s: float) -> list[Send]:
        """Announce that this node leaves; after that it sends and applies nothing."""
        own_s = self._advance(now_s)
        self._set_self(self._me.epoch, self._me.incarnation + 1, Status.LEFT, own_s)
        self._push(own_s)
        self.over = True
        return self._take_sends()

    @property
    def members(self) -> Mapping[NodeId, Member]:
        """All known members, this node and dead ones included. Read-only."""
        return self._members.table

    @property
    def epoch(self) -> int:
        """The epoch given at the start, or a higher one if an earlier process had that epoch."""
        return self._me.epoch

    # The methods below keep the node's own time.

    def _advance(self, now_s: float) -> float:
        own_s = now_s - self._missed_s
        # A tick at `next_tick_s` is never too early, although the sum is rounded.
        if now_s >= self.next_tick_s:
            own_s = max(own_s, self._due_s)
        if own_s < self._own_s:  # The caller's clock was set back.
            self._missed_s -= self._own_s - own_s
            own_s = self._own_s
        elif own_s > self._due_s + _LATE_SHARE * self._interval_s:
            missed_s = own_s - max(self._due_s, self._own_s)
            self._missed_s += missed_s
            own_s -= missed_s
            if missed_s > self._interval_s and not self.over:
                self._woke_up(own_s)
        self._own_s = own_s
        return own_s

    def _woke_up(self, now_s: float) -> None:
        """Drop running probes, which prove nothing, and announce this node as alive: it was stopped
        for longer than an interval, so others may have declared it dead.
        """
        self._worsen_health()
        self._probes.clear()
        self._relayed.clear()
        for suspicion in self._suspicions.values():
            suspicion.own_probe_failed = suspicion.probing = False
        self._schedule_suspicions()
        self._set_self(self._me.epoch, self._me.incarnation + 1, Status.ALIVE, now_s)
        self._probe_at_s = self._push_at_s = self._sync_at_s = self._reconnect_at_s = now_s

    def _take_sends(self) -> list[Send]:
        """Return the packets to send, and set the time of the next tick."""
        sends, self._sends = self._sends, []
        if self.over:
            self._due_s = inf
            return sends
        first = next(iter(self._relayed.values()), None)
        nack_s = inf if first is None else first.nack_s
        wave_s = min((probe.due_s for probe in self._probes.values()), default=inf)
        due_s = min(
            *(self._probe_at_s, wave_s, nack_s, self._suspicion_at_s, self._push_at_s),
            *(self._sync_at_s, self._reconnect_at_s, self._collect_at_s),
        )
        self._due_s = max(due_s, self._own_s)
        return sends

    def _send(self, to: NodeId, packet: Packet) -> None:
        self._sends.append(Send(to, packet))

    # The methods below probe members, also for others.

    def _worsen_health(self, by: int = 1) -> None:
        self.health = min(HEALTH_MAX, self.health + by)

    def _probe(self, target: Member, now_s: float) -> None:
        """Begin a probe of a member, unless one is in progress."""
        if any(probe.target == target.id for probe in self._probes.values()):
            return
        gap_s = self._interval_s * (1 + self.health) / _WAVES
        probe = _Probe(target.id, target.epoch, self._next_seq(), gap_s)
        self._probes[probe.seq] = probe
        self._next_wave(probe, now_s)

    def _next_wave(self, probe: _Probe, now_s: float) -> Member | None:
        """Send the next pings of a probe; return its target if all pings remained unanswered, so
        that the probe has failed. None: it goes on, or its target is gone.
        """
        target = self._members.table.get(probe.target)
        if target is None or not target.reachable or target.epoch != probe.epoch:
            del self._probes[probe.seq]
            return None
        if probe.waves == _WAVES:
            del self._probes[probe.seq]
            self._worsen_health(len(probe.relays) - len(probe.nacks) if probe.relays else 1)
            return target
        me = self._me
        updates = self._piggyback(target.id)
        self._send(target.id, Ping(me.epoch, me.incarnation, probe.seq, updates))
        if probe.waves > 0:
            excluded = (target.id, *probe.relays)
            relays = self._members.random_peers(RELAYS, but=excluded)
            probe.relays += tuple(relay.id for relay in relays)
            room = ROOM_BYTES - text_bytes(target.id)
            for relay in relays:
                updates = self._piggyback(relay.id, room)
                request = PingReq(me.epoch, me.incarnation, probe.seq, target.id, updates)
                self._send(relay.id, request)
        probe.waves += 1
        probe.due_s = now_s + probe.gap_s
        return None

    def _end_probe_of(self, target: NodeId) -> None:
        for probe in self._probes.values():
            if probe.target == target:
                del self._probes[probe.seq]
                return

    def _on_ping(self, sender: NodeId, ping: Ping) -> None:
        updates = self._piggyback(sender)
        ack = Ack(self._me.epoch, self._me.incarnation, ping.seq, updates)
        self._send(sender, ack)

    def _on_ack(self, sender: NodeId, ack: Ack, now_s: float) -> None:
        """End a probe of this node that the ack answers, or pass the ack on to the node that
        requested the ping.
        """
        if ack.seq in self._probes:
            self._succeeded(ack.seq, sender, now_s)
            return
        relayed = self._relayed.get(ack.seq)
        if relayed is not None and relayed.target == sender:
            del self._relayed[ack.seq]
            me, room = self._me, ROOM_BYTES - text_bytes(sender)
            updates = self._piggyback(relayed.requester, room)
            answer = IndirectAck(
                me.epoch, me.incarnation, relayed.seq, sender, ack.epoch, ack.incarnation, updates
            )
            self._send(relayed.requester, answer)

    def _on_indirect_ack(self, ack: IndirectAck, now_s: float) -> None:
        # A late ack may be that of an earlier process of this name.
        if not self._succeeded(ack.seq, ack.target, now_s):
            return
        if ack.target_epoch == (member := self._members.table[ack.target]).epoch:
            self._note_alive(member, ack.target_incarnation, now_s)

    def _on_nack(self, sender: NodeId, nack: Nack) -> None:
        probe = self._probes.get(nack.seq)
        # A relay counts once: a duplicated PingReq gets two answers, and more nacks than relays
        # would raise the health score above its maximum.
        if probe is not None and sender in probe.relays:
            probe.nacks.add(sender)

    def _on_ping_req(self, sender: NodeId, request: PingReq, now_s: float) -> None:
        target = self._members.table.get(request.target)
        if target is None or target is self._me:
            self._send_nack(sender, request.seq)
            return
        me, seq = self._me, self._next_seq()
        nack_s = now_s + self._interval_s / _WAVES * _NACK_SHARE
        self._relayed[seq] = _Relayed(target.id, sender, request.seq, nack_s)
        if len(self._relayed) > _MAX_RELAYED:
            del self._relayed[next(iter(self._relayed))]
        updates = self._piggyback(target.id)
        self._send(target.id, Ping(me.epoch, me.incarnation, seq, updates))

    def _send_nacks(self, now_s: float) -> None:
        """Send a nack to each requester whose target has not acknowledged in time."""
        for seq, relayed in list(self._relayed.items()):
            if relayed.nack_s > now_s:
                return
            del self._relayed[seq]
            self._send_nack(relayed.requester, relayed.seq)

    def _send_nack(self, requester: NodeId, seq: int) -> None:
        updates = self._piggyback(requester)
        self._send(requester, Nack(self._me.epoch, self._me.incarnation, seq, updates))

    def _succeeded(self, seq: int, target: NodeId, now_s: float) -> bool:
        """End the probe of this node that an ack of its target answers, and return True. False: no
        such probe is in progress.
        """
        probe = self._probes.get(seq)
        if probe is None or probe.target != target:
            return False
        del self._probes[seq]
        self.health = max(0, self.health - 1)
        suspicion = self._suspicions.get(target)
        if suspicion is not None:
            # The suspect is alive and knows of the suspicion: its refutation is awaited, for a new
            # suspicion's time if the time was over.
            if suspicion.probing:
                suspicion.since_s = now_s
            suspicion.own_probe_failed = suspicion.probing = False
            self._schedule_suspicions()
        return True

    def _probe_failed(self, target: Member, now_s: float) -> None:
        if target.status is Status.ALIVE:
            suspect = replace(target.update, status=Status.SUSPECT, suspectors=(self.id,))
            self._change(target, suspect, now_s)
        else:
            self._confirm(target, (self.id,), now_s)
        suspicion = self._suspicions[target.id]
        suspicion.own_probe_failed, suspicion.probing = True, False
        self._schedule_suspicions()

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    # The methods below change the member table.

    def _heard_from(self, sender: NodeId, epoch: int, incarnation: int, now_s: float) -> bool:
        """Note that the sender of a packet, of any type, is alive. Returns False if a newer process
        has replaced the sender, so that the packet must be dropped.
        """
        if self._startup_until_s == inf:
            self._startup_until_s = now_s + _STARTUP_INTERVALS * self._interval_s
        member = self._members.table.get(sender)
        if member is None or epoch > member.epoch:
            # An unknown sender is added by its own update, with its address, which its first
            # packets carry.
            return True
        if epoch < member.epoch:
            # The older of two processes with one name has to learn of the newer one.
            self._send(sender, Push(self._me.epoch, self._me.incarnation, (member.update,)))
            return False
        self._note_alive(member, incarnation, now_s)
        return True

    def _note_alive(self, member: Member, incarnation: int, now_s: float) -> None:
        if incarnation > member.incarnation:
            alive = MemberUpdate(member.id, member.epoch, incarnation, Status.ALIVE, member.address)
            self._apply_update(alive, now_s)

    def _apply_update(self, update: MemberUpdate, now_s: float) -> None:
        """Apply an update about any member, if it is newer than the member's state."""
        if update.id == self.id:
            self._update_of_self(update.state, now_s)
            return
        member = self._members.table.get(update.id)
        if member is None:
            if update.status <= Status.SUSPECT and self._has_room():
                member = Member(update, now_s)
                self._members.add(member)
                self._on_changed(member, now_s)
        elif update.state > member.state:
            self._change(member, update, now_s)
        elif update.status is Status.SUSPECT and update.state == member.state:
            self._confirm(member, update.suspectors, now_s)

    def _has_room(self) -> bool:
        """Make room for a new member: if the table is full, forget the unreachable member whose
        state is oldest. Returns False if all members are reachable.
        """
        if len(self._members.table) >= MEMBERS_MAX:
            lost = [member for member in self._members.table.values() if not member.reachable]
            if not lost:
                return False
            self._forget(min(lost, key=lambda member: member.since_s))
        return True

    def _forget(self, member: Member) -> None:
        self._members.remove(member)
        self._broadcasts.pop(member.id, None)

    def _change(self, member: Member, update: MemberUpdate, now_s: float) -> None:
        if update.epoch != member.epoch:
            member.record = None
            self._end_probe_of(member.id)
        self._members.set(member, update, now_s)
        self._on_changed(member, now_s)

    def _on_changed(self, member: Member, now_s: float) -> None:
        previous = self._suspicions.pop(member.id, None)
        if member.status is Status.SUSPECT:
            count = len(self._members.peers) + 1
            self._suspicions[member.id] = Suspicion(self._interval_s, count, now_s)
            if self._random() * count < _EXPECTED_PROBERS and self.id not in member.suspectors:
                self._probe(member, now_s)
        if previous is not None or member.status is Status.SUSPECT:
            self._schedule_suspicions()
        if not member.reachable:
            self._end_probe_of(member.id)
        self._broadcast(member, now_s)
        self._events.append(MemberChanged(member.id, *member.state, member.suspectors))

    def _update_of_self(self, state: State, now_s: float) -> None:
        """Take an update about this node: refute a suspicion or death; stop if a newer process has
        the node's name.
        """
        if self.over or state <= self._me.state:
            return
        epoch, incarnation, status = state
        if epoch == self._me.epoch and status in (Status.SUSPECT, Status.DEAD):
            self._worsen_health()
            self._set_self(epoch, incarnation + 1, Status.ALIVE, now_s)
        elif now_s < self._startup_until_s:
            # The process before this one had that epoch, and this one began with too low an epoch.
            self._set_self(epoch + 1, 0, Status.ALIVE, now_s)
        else:
            self._end(epoch)

    def _set_self(self, epoch: int, incarnation: int, status: Status, now_s: float) -> None:
        if incarnation > MAX_NUMBER:
            epoch, incarnation = epoch + 1, 0
        if epoch > MAX_NUMBER:  # All valid epochs are used up.
            self._end(MAX_NUMBER)
            return
        me = MemberUpdate(self.id, epoch, incarnation, status, self._me.address)
        self._me.set(me, now_s)
        self._broadcast(self._me, now_s)

    def _end(self, epoch: int) -> None:
        """Stop this node, because a newer process, of this epoch, has its name."""
        self.over = True
        self._events.append(Superseded(epoch))

    # The methods below change suspicions.

    def _confirm(self, member: Member, by: tuple[NodeId, ...], now_s: float) -> None:
        # More suspectors do not shorten the suspicion further, and are not worth their bytes.
        most = min(MAX_SUSPECTORS, CONFIRMATIONS + 1)
        suspectors = tuple(dict.fromkeys(member.suspectors + by))[:most]
        if suspectors != member.suspectors:
            member.set(replace(member.update, suspectors=suspectors), member.since_s)
            self._broadcast(member, now_s)
            self._schedule_suspicions()

    def _check_suspicions(self, now_s: float) -> None:
        for node, suspicion in list(self._suspicions.items()):
            member = self._members.table[node]
            if suspicion.probing or suspicion.ends_s(len(member.suspectors)) > now_s:
                continue
            if suspicion.own_probe_failed:
                by = tuple(dict.fromkeys((self.id, *member.suspectors)))[:MAX_SUSPECTORS]
                dead = replace(member.update, status=Status.DEAD, suspectors=by)
                self._change(member, dead, now_s)
            else:
                suspicion.probing = True
                self._probe(member, now_s)
        self._schedule_suspicions()

    def _schedule_suspicions(self) -> None:
        table = self._members.table
        ends_s = (
            suspicion.ends_s(len(table[node].suspectors))
            for node, suspicion in self._suspicions.items()
            if not suspicion.probing
        )
        self._suspicion_at_s = min(ends_s, default=inf)

    # The methods below send updates.

    def _broadcast(self, member: Member, now_s: float) -> None:
        """Send the present state of a member with this node's next packets, so that all nodes get
        it.
        """
        self._broadcasts.pop(member.id, None)
        self._broadcasts[member.id] = _Broadcast(member)
        count = len(self._members.peers) + 2
        self._limit = _RETRANSMIT_MULT * max(1, ceil(log10(count)))
        self._push_at_s = min(self._push_at_s, now_s + self._interval_s * _PUSH_SHARE)

    def _piggyback(self, to: NodeId, room: int = ROOM_BYTES) -> tuple[MemberUpdate, ...]:
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

    def _push(self, now_s: float) -> None:
        """Send new updates to some peers; what does not fit waits for the next push."""
        peers = self._members.random_peers(FANOUT)
        new = [broadcast for broadcast in self._broadcasts.values() if broadcast.pushes]
        # If there are no peers, the updates wait for the next push.
        if peers and (pushed := self._fitting(new, ROOM_BYTES)):
            updates = tuple(broadcast.member.update for broadcast in pushed)
            push = Push(self._me.epoch, self._me.incarnation, updates)
            for member in peers:
                self._send(member.id, push)
            for broadcast in pushed:
                broadcast.pushes -= 1
                self._end_if_sent(broadcast)
        waits = any(broadcast.pushes for broadcast in new)
        self._push_at_s = now_s + self._interval_s * _PUSH_SHARE if waits else inf

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

    # The methods below exchange digests and deltas.

    def _sync(self, now_s: float) -> None:
        """Begin an exchange with a random peer; the first ones go to seeds."""
        self._synced_s = now_s
        share = _BUSY_SHARE if now_s < self._busy_until_s else 1.0
        interval_s = _SYNC_INTERVALS * self._interval_s
        self._sync_at_s = now_s + share * interval_s * (0.9 + 0.2 * self._random())
        if self._is_first_sync:
            self._is_first_sync = False
            seeds = list(self._seeds)
            for _ in range(min(FANOUT, len(seeds))):
                self._send_digest(seeds.pop(int(self._random() * len(seeds))))
            return
        peers = self._members.random_peers(1)
        if peers:
            self._send_digest(peers[0].id)
        elif self._seeds:
            self._reconnect()
        self._forget_old(now_s)

    def _reconnect(self) -> None:
        """Send a digest to a node that is not among the peers: a dead one may be alive behind a
        partition that has healed, and a seed that has left may be back without knowing this node.
        """
        table = self._members.table
        lost = [node for node in self._seeds if node not in table]
        lost += [
            member.id
            for member in table.values()
            if member.status is Status.DEAD
            or (member.status is Status.LEFT and member.id in self._seeds)
        ]
        if lost:
            self._send_digest(lost[int(self._random() * len(lost))])

    def _forget_old(self, now_s: float) -> None:
        """Forget the members that have been unreachable for `FORGET_S`."""
        table, before_s = self._members.table, now_s - FORGET_S
        if len(self._members.peers) + 1 < len(table):
            for member in list(table.values()):
                if not member.reachable and member.since_s < before_s:
                    self._forget(member)

    def _send_digest(self, node: NodeId) -> None:
        me = self._me
        known, until = self._digest_part(ROOM_BYTES - me.update_bytes)
        after, self._after = self._after, until
        # This node's own update is included, because its address is needed for the answer.
        digest = Digest(me.epoch, me.incarnation, after, until, known, (me.update,))
        self._send(node, digest)

    def _digest_part(self, room: int) -> tuple[tuple[KnownMember, ...], str]:
        """Return the digest entries behind the last digest's, as many as fit into `room` bytes, and
        the last id among them; "": they reach the end of the table.
        """
        table, found = self._members.table, list[KnownMember]()
        room -= text_bytes(self._after)
        for node in self._members.between(self._after, "") if self._after else self._members.ids:
            known, size = table[node].known()
            room -= size
            if room < 0:
                break
            found.append(known)
        else:
            return tuple(found), ""
        # The last id is sent as the digest's upper bound, and needs room as well.
        room += size
        while room < text_bytes(found[-1].id):
            room += table[found.pop().id].known()[1]
        return tuple(found), found[-1].id

    def _on_digest(self, sender: NodeId, digest: Digest, now_s: float, clock_s: float) -> None:
        """Answer a digest with the deltas that its sender lacks; the ages of entries are computed
        by `clock_s`, the caller's clock, and not by the node's own time `now_s`.
        """
        lacking, wants, matched = self._compare(digest.known, now_s)
        ids = self._members.between(digest.after, digest.until)
        if matched < len(ids):
            named = {known.id for known in digest.known}
            table = self._members.table
            lacking += [
                (table[node], None)
                for node in ids
                if node not in named and self._is_worth_sending(table[node], now_s)
            ]
        self._send_deltas(sender, lacking, wants, clock_s)

    def _on_delta(self, sender: NodeId, delta: Delta, now_s: float, clock_s: float) -> None:
        for record in delta.records:
            self._apply_record(record, clock_s)
        if delta.records:
            interval_s = _SYNC_INTERVALS * self._interval_s
            self._busy_until_s = now_s + _BUSY_INTERVALS * interval_s
            self._sync_at_s = min(self._sync_at_s, self._synced_s + _BUSY_SHARE * interval_s)
        if delta.wants:
            lacking, _, _ = self._compare(delta.wants, now_s)
            self._send_deltas(sender, lacking, [], clock_s)

    def _compare(
        self, theirs: tuple[KnownMember, ...], now_s: float
    ) -> tuple[list[tuple[Member, KnownMember | None]], list[KnownMember], int]:
        """Compare a digest's entries with the table. Returns the members of which the sender lacks
        the state or record entries, this node's entries of members to request from it, and the
        number of entries whose members are known here.
        """
        table, me = self._members.table, self._me
        lacking, wants, matched = list[tuple[Member, KnownMember | None]](), list[KnownMember](), 0
        for known in theirs:
            member = table.get(known.id)
            if member is None:
                if known.status <= Status.SUSPECT:
                    wants.append(KnownMember(known.id, 0, 0, Status.ALIVE, 0, 0))
                continue
            matched += 1
            mine = member.known()[0]
            if known == mine:
                continue
            if member is me:
                self._check_own_record(known, now_s)
                lacking.append((member, known))
                continue
            same, theirs_s, mine_s = known.epoch == mine.epoch, known.state, mine.state
            if theirs_s > mine_s or (
                same
                and member.reachable
                and start_for(mine.version, mine.floor, known.version, known.floor) is not None
            ):
                wants.append(mine)
            if theirs_s < mine_s or (
                same and start_for(known.version, known.floor, mine.version, mine.floor) is not None
            ):
                lacking.append((member, known))
        return lacking, wants, matched

    def _check_own_record(self, known: KnownMember, now_s: float) -> None:
        self._update_of_self(known.state, now_s)
        me = self._me
        if known.epoch == me.epoch and me.record is not None and known.version > me.record.version:
            # Another node has edits of this epoch that this process did not make, so an earlier
            # process had the epoch.
            newer = known.epoch, me.incarnation + 1, Status.ALIVE
            self._update_of_self(newer, now_s)

    def _send_deltas(
        self,
        to: NodeId,
        lacking: list[tuple[Member, KnownMember | None]],
        wants: list[KnownMember],
        clock_s: float,
    ) -> None:
        """Send the other node what it lacks, and request `wants` from it, in at most `_DELTAS`
        packets.
        """
        me = self._me
        # The first member is a random one, so that every member gets its turn if not all fit.
        first = int(self._random() * len(lacking)) if lacking else 0
        left = deque(lacking[first:] + lacking[:first])
        for _ in range(_DELTAS):
            if not left and not wants:
                return
            asked, room = _as_fits(wants, ROOM_BYTES)
            wants = wants[len(asked) :]
            updates, records = self._fill(left, room, clock_s)
            if asked or updates or records:
                packet = Delta(me.epoch, me.incarnation, tuple(updates), tuple(records), asked)
                self._send(to, packet)
            elif left:
                left.popleft()  # The next entry of this record fits into no packet.

    def _fill(
        self, left: deque[tuple[Member, KnownMember | None]], room: int, clock_s: float
    ) -> tuple[list[MemberUpdate], list[RecordDelta]]:
        """Remove the members from the front of `left` whose updates and entries fit into a packet,
        and return these. A member whose record fits only in part stays, with the rest.
        """
        updates, records = list[MemberUpdate](), list[RecordDelta]()
        while left:
            member, known = left[0]
            version, floor = 0, 0
            if known is not None and known.epoch == member.epoch:
                version, floor = known.version, known.floor
            if known is None or member.state > known.state:
                if member.update_bytes > room:
                    break
                updates.append(member.update)
                room -= member.update_bytes
                left[0] = member, KnownMember(member.id, *member.state, version, floor)
            record = member.record if member.reachable else None
            if record is not None:
                start = start_for(version, floor, record.version, record.floor)
                if start is not None:
                    delta = record.delta(member.id, member.epoch, start, room, clock_s)
                    if delta is None:
                        break
                    records.append(delta)
                    room -= encoded_bytes(delta)
                    if delta.end < record.version:
                        left[0] = (
                            member,
                            KnownMember(member.id, *member.state, delta.end, delta.floor),
                        )
                        break
            left.popleft()
        return updates, records

    def _apply_record(self, delta: RecordDelta, clock_s: float) -> None:
        member = self._members.table.get(delta.id)
        # Only the node itself writes its record, and each epoch has a record of its own.
        if member is None or member is self._me or member.epoch != delta.epoch:
            return
        if member.record is None:
            member.record = FactRecord()
        changed = member.record.apply(delta, clock_s)
        member.record_changed()
        if member.reachable:
            for kind, name in changed:
                held = member.record.entries.get((kind, name))
                if held is not None and held.value is not None and held.fact is None:
                    self.facts.unread += 1
                self._events.append(RecordChanged(member.id, kind, name))

    def _is_worth_sending(self, member: Member, now_s: float) -> bool:
        """Return whether to send a member: not if it has been unreachable for half of `FORGET_S`,
        because nodes that have forgotten it would get it again and again.
        """
        return member.reachable or now_s - member.since_s < FORGET_S / 2


def _as_fits(wants: list[KnownMember], room: int) -> tuple[tuple[KnownMember, ...], int]:
    kept, most = list[KnownMember](), int(room * _WANTS_SHARE)
    for want in wants:
        size = encoded_bytes(want)
        if size > most:
            break
        kept.append(want)
        most -= size
        room -= size
    return tuple(kept), room
