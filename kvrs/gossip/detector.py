"""Failure detector: SWIM (Das et al., DSN 2002, sections 3, 4) with Lifeguard (arXiv 1707.00788).

The state of a member only grows, in the order (epoch, incarnation, status), and only the member
itself raises the first two; so all nodes converge, whatever the order and the number of updates
that arrive. A new process has a higher epoch than all before it, so no update about an older
process applies to it. All times are of the node's own clock, which stops while the node is stopped
(see `node`).
"""

from math import inf, log, log10

from msgspec.structs import replace

from kvrs.gossip.facts import Event, MemberChanged, Superseded
from kvrs.gossip.members import Facts, Member, Members, Random
from kvrs.gossip.probes import Prober
from kvrs.gossip.sender import PacketSender
from kvrs.gossip.wire import (
    MAX_NUMBER,
    MAX_SUSPECTORS,
    Ack,
    IndirectAck,
    MemberUpdate,
    Push,
    State,
    Status,
)
from kvrs.ids import NodeId

# Length of a suspicion that `CONFIRMATIONS` other members confirm, in probe intervals times
# log10(members). An unconfirmed suspicion is `SUSPICION_MAX_MULT` times as long.
SUSPICION_MULT = 2.0
SUSPICION_MAX_MULT = 6.0
CONFIRMATIONS = 3
# Most members in the table; a further one replaces the member dead for longest, and is refused if
# all are reachable.
MEMBERS_MAX = 4096
# Mean number of peers that probe a suspect as soon as they learn of the suspicion. Without these
# probes a suspicion would wait for confirmations until the suspect's turn in the other nodes'
# rounds.
_EXPECTED_PROBERS = 8
# With fewer peers a node probes up to twice as often, because each peer then gets probes from few
# nodes.
_FULL_RATE_PEERS = 8
# Probe intervals after the first received packet in which an update with a higher epoch is taken
# for one about the process before this one; later it means that a newer process runs.
_STARTUP_INTERVALS = 20.0


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


class Detector:
    """States and suspicions of all members. `prober` makes the probes, and `sender` collects the
    packets to send.
    """

    def __init__(self, me: MemberUpdate, interval_s: float, random: Random, now_s: float) -> None:
        self.me = Member(me, now_s)
        self.members = Members(self.me, random)
        self.sender = PacketSender(self.me, self.members, interval_s)
        self.prober = Prober(self.me, self.members, self.sender, interval_s)
        self.facts = Facts(self.members.table)
        self.events: list[Event] = []
        self.over = False  # Another process has this node's name, or this node has left.
        self._random = random
        self._interval_s = interval_s
        self._suspicions: dict[NodeId, Suspicion] = {}
        self._probe_at_s = now_s + random() * self._interval_s
        self._suspicion_at_s = inf
        self._startup_until_s = inf
        self.sender.broadcast(self.me, now_s)

    @property
    def due_s(self) -> float:
        return min(self._probe_at_s, self.sender.push_at_s, self._suspicion_at_s, self.prober.due_s)

    def tick(self, now_s: float) -> None:
        for probe in self.prober.due(now_s):
            target = self.prober.next_wave(probe, now_s)
            if target is not None:
                self._probe_failed(target, now_s)
        if now_s >= self._suspicion_at_s:
            self._check_suspicions(now_s)
        if now_s >= self._probe_at_s:
            share = min(1.0, max(0.5, len(self.members.peers) / _FULL_RATE_PEERS))
            self._probe_at_s = now_s + self._interval_s * share * (1 + self.prober.health)
            if (target := self.members.next_to_probe()) is not None:
                self.prober.probe(target, now_s)
        self.prober.send_nacks(now_s)
        if now_s >= self.sender.push_at_s:
            self.sender.push(now_s)

    # The methods below handle received packets.

    def on_heard_from(self, sender: NodeId, epoch: int, incarnation: int, now_s: float) -> bool:
        """Note that the sender of a packet, of any type, is alive. Returns False if a newer process
        has replaced the sender, so that the packet must be dropped.
        """
        if self._startup_until_s == inf:
            self._startup_until_s = now_s + _STARTUP_INTERVALS * self._interval_s
        member = self.members.table.get(sender)
        if member is None or epoch > member.epoch:
            # An unknown sender is added by its own update, with its address, which its first
            # packets carry.
            return True
        if epoch < member.epoch:
            # The older of two processes with one name has to learn of the newer one.
            self.sender.send(sender, Push(self.me.epoch, self.me.incarnation, (member.update,)))
            return False
        self._note_alive(member, incarnation, now_s)
        return True

    def on_ack(self, sender: NodeId, ack: Ack, now_s: float) -> None:
        if self.prober.on_ack(sender, ack):
            self._probe_succeeded(sender, now_s)

    def on_indirect_ack(self, ack: IndirectAck, now_s: float) -> None:
        if not self.prober.on_indirect_ack(ack):
            return
        self._probe_succeeded(ack.target, now_s)
        if ack.target_epoch == (member := self.members.table[ack.target]).epoch:
            self._note_alive(member, ack.target_incarnation, now_s)

    def apply_update(self, update: MemberUpdate, now_s: float) -> None:
        """Apply an update about any member, if it is newer than the member's state."""
        if update.id == self.me.id:
            self.on_update_about_self(update.state, now_s)
            return
        member = self.members.table.get(update.id)
        if member is None:
            if update.status <= Status.SUSPECT and self._has_room():
                member = Member(update, now_s)
                self.members.add(member)
                self._on_changed(member, now_s)
        elif update.state > member.state:
            self._change(member, update, now_s)
        elif update.status is Status.SUSPECT and update.state == member.state:
            self._confirm(member, update.suspectors, now_s)

    def on_update_about_self(self, state: State, now_s: float) -> None:
        """Take an update about this node: refute a suspicion or death; stop if a newer process has
        the node's name.
        """
        if self.over or state <= self.me.state:
            return
        epoch, incarnation, status = state
        if epoch == self.me.epoch and status in (Status.SUSPECT, Status.DEAD):
            self.prober.worsen_health()
            self._set_self(epoch, incarnation + 1, Status.ALIVE, now_s)
        elif now_s < self._startup_until_s:
            # The process before this one had that epoch, and this one began with too low an epoch.
            self._set_self(epoch + 1, 0, Status.ALIVE, now_s)
        else:
            self._end(epoch)

    # This node's clock, transport and process call the methods below.

    def on_wakeup(self, now_s: float) -> None:
        """Drop running probes, which prove nothing, and announce this node as alive: it was stopped
        for longer than an interval, so others may have declared it dead.
        """
        self.prober.worsen_health()
        self.prober.clear()
        for suspicion in self._suspicions.values():
            suspicion.own_probe_failed = suspicion.probing = False
        self._schedule_suspicions()
        self._probe_at_s = now_s
        self._set_self(self.me.epoch, self.me.incarnation + 1, Status.ALIVE, now_s)
        self.sender.push_at_s = now_s

    def leave(self, now_s: float) -> None:
        self._set_self(self.me.epoch, self.me.incarnation + 1, Status.LEFT, now_s)
        self.sender.push(now_s)
        self.over = True

    def probe_now(self, target: NodeId, now_s: float) -> None:
        """Probe a member out of turn, because something outside of gossip indicates its death."""
        member = self.members.table.get(target)
        if member is not None and member is not self.me and member.reachable:
            self.prober.probe(member, now_s)

    def forget(self, member: Member) -> None:
        self.members.remove(member)
        self.sender.forget(member)

    # The methods below handle outcomes of probes.

    def _probe_succeeded(self, target: NodeId, now_s: float) -> None:
        suspicion = self._suspicions.get(target)
        if suspicion is not None:
            # The suspect is alive and knows of the suspicion: its refutation is awaited, for a new
            # suspicion's time if the time was over.
            if suspicion.probing:
                suspicion.since_s = now_s
            suspicion.own_probe_failed = suspicion.probing = False
            self._schedule_suspicions()

    def _probe_failed(self, target: Member, now_s: float) -> None:
        if target.status is Status.ALIVE:
            suspect = replace(target.update, status=Status.SUSPECT, suspectors=(self.me.id,))
            self._change(target, suspect, now_s)
        else:
            self._confirm(target, (self.me.id,), now_s)
        suspicion = self._suspicions[target.id]
        suspicion.own_probe_failed, suspicion.probing = True, False
        self._schedule_suspicions()

    # The methods below change suspicions.

    def _confirm(self, member: Member, by: tuple[NodeId, ...], now_s: float) -> None:
        # More suspectors do not shorten the suspicion further, and are not worth their bytes.
        most = min(MAX_SUSPECTORS, CONFIRMATIONS + 1)
        suspectors = tuple(dict.fromkeys(member.suspectors + by))[:most]
        if suspectors != member.suspectors:
            member.set(replace(member.update, suspectors=suspectors), member.since_s)
            self.sender.broadcast(member, now_s)
            self._schedule_suspicions()

    def _check_suspicions(self, now_s: float) -> None:
        for node, suspicion in list(self._suspicions.items()):
            member = self.members.table[node]
            if suspicion.probing or suspicion.ends_s(len(member.suspectors)) > now_s:
                continue
            if suspicion.own_probe_failed:
                by = tuple(dict.fromkeys((self.me.id, *member.suspectors)))[:MAX_SUSPECTORS]
                dead = replace(member.update, status=Status.DEAD, suspectors=by)
                self._change(member, dead, now_s)
            else:
                suspicion.probing = True
                self.prober.probe(member, now_s)
        self._schedule_suspicions()

    def _schedule_suspicions(self) -> None:
        table = self.members.table
        ends_s = (
            suspicion.ends_s(len(table[node].suspectors))
            for node, suspicion in self._suspicions.items()
            if not suspicion.probing
        )
        self._suspicion_at_s = min(ends_s, default=inf)

    # The methods below change the member table.

    def _has_room(self) -> bool:
        """Make room for a new member: if the table is full, forget the unreachable member whose
        state is oldest. Returns False if all members are reachable.
        """
        if len(self.members.table) >= MEMBERS_MAX:
            lost = [member for member in self.members.table.values() if not member.reachable]
            if not lost:
                return False
            self.forget(min(lost, key=lambda member: member.since_s))
        return True

    def _note_alive(self, member: Member, incarnation: int, now_s: float) -> None:
        if incarnation > member.incarnation:
            alive = MemberUpdate(member.id, member.epoch, incarnation, Status.ALIVE, member.address)
            self.apply_update(alive, now_s)

    def _change(self, member: Member, update: MemberUpdate, now_s: float) -> None:
        if update.epoch != member.epoch:
            member.record = None
            self.prober.end_of(member.id)
        self.members.set(member, update, now_s)
        self._on_changed(member, now_s)

    def _on_changed(self, member: Member, now_s: float) -> None:
        previous = self._suspicions.pop(member.id, None)
        if member.status is Status.SUSPECT:
            count = len(self.members.peers) + 1
            self._suspicions[member.id] = Suspicion(self._interval_s, count, now_s)
            if self._random() * count < _EXPECTED_PROBERS and self.me.id not in member.suspectors:
                self.prober.probe(member, now_s)
        if previous is not None or member.status is Status.SUSPECT:
            self._schedule_suspicions()
        if not member.reachable:
            self.prober.end_of(member.id)
        self.sender.broadcast(member, now_s)
        self.events.append(MemberChanged(member.id, *member.state, member.suspectors))

    def _set_self(self, epoch: int, incarnation: int, status: Status, now_s: float) -> None:
        if incarnation > MAX_NUMBER:
            epoch, incarnation = epoch + 1, 0
        if epoch > MAX_NUMBER:  # All valid epochs are used up.
            self._end(MAX_NUMBER)
            return
        me = MemberUpdate(self.me.id, epoch, incarnation, status, self.me.address)
        self.me.set(me, now_s)
        self.sender.broadcast(self.me, now_s)

    def _end(self, epoch: int) -> None:
        """Stop this node, because a newer process, of this epoch, has its name."""
        self.over = True
        self.events.append(Superseded(epoch))
