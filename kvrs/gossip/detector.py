"""Failure detector: SWIM (Das et al., DSN 2002, sections 3, 4) with Lifeguard (arXiv 1707.00788).

The state of a member only grows, in the order (epoch, incarnation, status), and only the member
itself raises the first two; so all nodes converge, whatever the order and the number of updates
that arrive. A new process has a higher epoch than all before it, so no update about an older
process applies to it. All times are of the node's own clock, which stops while the node is stopped
(see `node`).
"""

from math import inf

from kvrs.config.gossip import GossipSettings
from kvrs.gossip.events import Event, MemberChanged, Superseded
from kvrs.gossip.members import Member, Members, Random
from kvrs.gossip.prober import Prober
from kvrs.gossip.sender import PacketSender
from kvrs.gossip.suspicion import LocalHealth, Suspicion
from kvrs.gossip.wire import (
    MAX_NUMBER,
    MAX_SUSPECTORS,
    Ack,
    IndirectAck,
    MemberUpdate,
    Push,
    Status,
)
from kvrs.ids import NodeId

# Expected number of peers that probe a suspect at once when the suspicion reaches them. Without
# these probes a suspicion would wait for its confirmations until the suspect's turn in the rounds
# of other nodes.
_EXPECTED_PROBERS = 8
# With fewer peers, fewer probes per second reach each of them: nodes probe up to twice as often.
_FULL_RATE_PEERS = 8
# After its first packet a node accepts updates about the process before it for so many intervals.
_STARTUP_INTERVALS = 20.0


class Detector:
    """States and suspicions of all members. `prober` has the probes, `sender` the packets."""

    def __init__(
        self, me: MemberUpdate, settings: GossipSettings, random: Random, now_s: float
    ) -> None:
        self.me = Member(me, now_s)
        self.members = Members(self.me, random)
        self.sender = PacketSender(self.me, self.members, settings)
        self.health = LocalHealth(settings.health_max)
        self.prober = Prober(self.me, self.members, self.sender, self.health, settings)
        self.events: list[Event] = []
        self.over = False  # Another process has this node's name, or this node has left.
        self._settings = settings
        self._random = random
        self._interval_s = settings.probe_interval_s
        self._suspicions: dict[NodeId, Suspicion] = {}
        self._probe_at_s = now_s + random() * self._interval_s
        self._suspicion_at_s = inf
        self._startup_until_s = inf
        self.sender.broadcast(self.me, now_s)

    @property
    def due_s(self) -> float:
        # In pairs, because this runs after every packet: the minimum of two numbers takes no call
        # where this is compiled.
        timers_s = min(self._probe_at_s, min(self.sender.push_at_s, self._suspicion_at_s))
        return min(timers_s, self.prober.due_s)

    def tick(self, now_s: float) -> None:
        for probe in self.prober.due(now_s):
            target = self.prober.next_wave(probe, now_s)
            if target is not None:
                self._probe_failed(target, now_s)
        if now_s >= self._suspicion_at_s:
            self._check_suspicions(now_s)
        if now_s >= self._probe_at_s:
            share = min(1.0, max(0.5, len(self.members.peers) / _FULL_RATE_PEERS))
            self._probe_at_s = now_s + self._interval_s * share * (1 + self.health.score)
            target = self.members.next_to_probe()
            if target is not None and target.id not in self.prober:
                self.prober.probe(target, now_s)
        self.prober.send_nacks(now_s)
        if now_s >= self.sender.push_at_s:
            self.sender.push(now_s)

    # Received packets.

    def on_heard_from(self, sender: NodeId, epoch: int, incarnation: int, now_s: float) -> bool:
        """Take any packet as evidence that its sender is alive; False: a newer process has replaced
        the sender.
        """
        if self._startup_until_s == inf:
            self._startup_until_s = now_s + _STARTUP_INTERVALS * self._interval_s
        member = self.members.table.get(sender)
        if member is None or epoch > member.epoch:
            # The address comes with its own update, which the first packets of a new member carry.
            return True
        if epoch < member.epoch:
            # The older of two processes with one name has to learn of the newer one.
            self.sender.send(
                sender, Push(self.me.epoch, self.me.incarnation, (member.update()[0],))
            )
            return False
        if incarnation > member.incarnation:
            self.apply_update(
                MemberUpdate(sender, epoch, incarnation, Status.ALIVE, member.address), now_s
            )
        return True

    def on_ack(self, sender: NodeId, ack: Ack, now_s: float) -> None:
        if self.prober.on_ack(sender, ack) is not None:
            self._probe_succeeded(sender, now_s)

    def on_indirect_ack(self, ack: IndirectAck, now_s: float) -> None:
        if self.prober.on_indirect_ack(ack) is None:
            return
        member = self.members.table[ack.target]
        self._probe_succeeded(ack.target, now_s)
        if ack.target_epoch == member.epoch:
            alive = MemberUpdate(
                member.id, member.epoch, ack.target_incarnation, Status.ALIVE, member.address
            )
            self.apply_update(alive, now_s)

    def apply_update(self, update: MemberUpdate, now_s: float) -> None:
        """Apply an update about any member, if it is newer than the member's state."""
        if update.id == self.me.id:
            self.on_update_about_self(update.epoch, update.incarnation, update.status, now_s)
            return
        member = self.members.table.get(update.id)
        if member is None:
            if update.status <= Status.SUSPECT and self._has_room():
                self._add(update, now_s)
        elif member.is_superseded_by(update.epoch, update.incarnation, update.status):
            self._change(member, update, now_s)
        elif (
            update.status is Status.SUSPECT is member.status
            and update.incarnation == member.incarnation
            and update.epoch == member.epoch
            and update.suspectors != member.suspectors
        ):
            self._confirm(member, update.suspectors, now_s)

    def on_update_about_self(
        self, epoch: int, incarnation: int, status: Status, now_s: float
    ) -> None:
        """Refute a suspicion or death of this node; stop if a newer process has its name."""
        if self.over or not self.me.is_superseded_by(epoch, incarnation, status):
            return
        if epoch == self.me.epoch and status in (Status.SUSPECT, Status.DEAD):
            self.health.worsen(1)
            self._announce_alive(epoch, incarnation + 1, now_s)
        elif now_s < self._startup_until_s:
            # The process before this one had that epoch, and this one began with too low an epoch.
            self._announce_alive(epoch + 1, 0, now_s)
        else:
            self.over = True
            self.events.append(Superseded(epoch))

    # Events of this node.

    def on_wakeup(self, now_s: float) -> None:
        """Start anew after this node was stopped for longer than an interval: others may have
        declared it dead, and its running probes prove nothing.
        """
        self.health.worsen(1)
        self.prober.clear()
        for suspicion in self._suspicions.values():
            suspicion.own_probe_failed = suspicion.probing = False
        self._schedule_suspicions()
        self._probe_at_s = now_s
        self._announce_alive(self.me.epoch, self.me.incarnation + 1, now_s)
        self.sender.push_at_s = now_s

    def leave(self, now_s: float) -> None:
        self._set_self(self.me.epoch, self.me.incarnation + 1, Status.LEFT, now_s)
        self.sender.push(now_s)
        self.over = True

    def probe_now(self, target: NodeId, now_s: float) -> None:
        """Probe a member out of turn, because something outside of gossip indicates its death."""
        member = self.members.table.get(target)
        if (
            member is not None
            and member is not self.me
            and member.reachable
            and target not in self.prober
        ):
            self.prober.probe(member, now_s)

    def forget(self, member: Member) -> None:
        self.members.remove(member)
        self.sender.forget(member)

    # Outcomes of probes.

    def _probe_succeeded(self, target: NodeId, now_s: float) -> None:
        suspicion = self._suspicions.get(target)
        if suspicion is not None:
            # It is alive and has learned of the suspicion: wait for its refutation, anew if the
            # suspicion had run out.
            if suspicion.probing:
                suspicion.since_s = now_s
            suspicion.own_probe_failed = suspicion.probing = False
            self._schedule_suspicions()

    def _probe_failed(self, target: Member, now_s: float) -> None:
        if target.status is Status.ALIVE:
            suspect = MemberUpdate(
                target.id,
                target.epoch,
                target.incarnation,
                Status.SUSPECT,
                target.address,
                (self.me.id,),
            )
            self._change(target, suspect, now_s)
        else:
            self._confirm(target, (self.me.id,), now_s)
        suspicion = self._suspicions[target.id]
        suspicion.own_probe_failed, suspicion.probing = True, False
        self._schedule_suspicions()

    # Suspicions.

    def _confirm(self, member: Member, by: tuple[NodeId, ...], now_s: float) -> None:
        new = tuple(suspector for suspector in by if suspector not in member.suspectors)
        # More suspectors do not shorten the suspicion further, and are not worth their bytes.
        most = min(MAX_SUSPECTORS, self._settings.confirmations + 1)
        suspectors = (member.suspectors + new)[:most]
        if suspectors == member.suspectors:
            return
        update = MemberUpdate(
            member.id, member.epoch, member.incarnation, member.status, member.address, suspectors
        )
        member.set(update, member.since_s)
        self.sender.broadcast(member, now_s)
        self._schedule_suspicions()

    def _check_suspicions(self, now_s: float) -> None:
        for node, suspicion in list(self._suspicions.items()):
            member = self.members.table[node]
            if suspicion.probing or suspicion.ends_s(len(member.suspectors)) > now_s:
                continue
            if suspicion.own_probe_failed:
                by = (
                    self.me.id,
                    *(suspector for suspector in member.suspectors if suspector != self.me.id),
                )[:MAX_SUSPECTORS]
                dead = MemberUpdate(
                    node, member.epoch, member.incarnation, Status.DEAD, member.address, by
                )
                self._change(member, dead, now_s)
            else:
                suspicion.probing = True
                if node not in self.prober:
                    self.prober.probe(member, now_s)
        self._schedule_suspicions()

    def _schedule_suspicions(self) -> None:
        self._suspicion_at_s = inf
        for node, suspicion in self._suspicions.items():
            if not suspicion.probing:
                self._suspicion_at_s = min(
                    self._suspicion_at_s, suspicion.ends_s(len(self.members.table[node].suspectors))
                )

    # The table.

    def _has_room(self) -> bool:
        """Make room for one more member: if the table is full, forget the one that is dead for
        longest. False: all are reachable.
        """
        if len(self.members.table) >= self._settings.members_max:
            lost = [member for member in self.members.table.values() if not member.reachable]
            if not lost:
                return False
            self.forget(min(lost, key=lambda member: member.since_s))
        return True

    def _add(self, update: MemberUpdate, now_s: float) -> None:
        member = Member(update, now_s)
        self.members.add(member)
        self._on_changed(member, now_s)

    def _change(self, member: Member, update: MemberUpdate, now_s: float) -> None:
        if update.epoch != member.epoch:
            member.stored = None
            self.prober.end_of(member.id)
        member.set(update, now_s)
        self.members.on_status(member)
        self._on_changed(member, now_s)

    def _on_changed(self, member: Member, now_s: float) -> None:
        previous = self._suspicions.pop(member.id, None)
        if member.status is Status.SUSPECT:
            count = len(self.members.peers) + 1
            self._suspicions[member.id] = Suspicion(self._settings, count, now_s)
            if (
                member.id not in self.prober
                and self._random() * count < _EXPECTED_PROBERS
                and self.me.id not in member.suspectors
            ):
                self.prober.probe(member, now_s)
        if previous is not None or member.status is Status.SUSPECT:
            self._schedule_suspicions()
        if not member.reachable:
            self.prober.end_of(member.id)
        self.sender.broadcast(member, now_s)
        self.events.append(
            MemberChanged(
                member.id, member.epoch, member.incarnation, member.status, member.suspectors
            )
        )

    def _announce_alive(self, epoch: int, incarnation: int, now_s: float) -> None:
        self._set_self(epoch, incarnation, Status.ALIVE, now_s)

    def _set_self(self, epoch: int, incarnation: int, status: Status, now_s: float) -> None:
        if incarnation > MAX_NUMBER:
            epoch, incarnation = epoch + 1, 0
        if epoch > MAX_NUMBER:  # No valid number is left.
            self.over = True
            self.events.append(Superseded(MAX_NUMBER))
            return
        self.me.set(MemberUpdate(self.me.id, epoch, incarnation, status, self.me.address), now_s)
        self.sender.broadcast(self.me, now_s)
