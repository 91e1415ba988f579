"""SWIM with Lifeguard: who is alive.

What is held of a node only ever grows, in the order (epoch, incarnation, status), and only the node itself raises the first
two; so all nodes come to hold the same, whatever order words arrive in, and how often. A new process has a higher epoch than
all before it, so no word of an older life says anything about it. All times are of the node's own clock, which stands still
while the node does (see `node`).
"""

from math import inf

from kvrs.gossip.config import GossipSettings
from kvrs.gossip.events import Event, MemberChanged, Send, Superseded
from kvrs.gossip.members import Member, Members, Random
from kvrs.gossip.probes import WAVES, Probe, Probes, Relayed
from kvrs.gossip.rumours import Rumours
from kvrs.gossip.suspicion import Health, Suspicion
from kvrs.gossip.wire import (
    HEADER_BYTES,
    MAX_ACCUSERS,
    MAX_NUMBER,
    Ack,
    Ask,
    Nack,
    Packet,
    Ping,
    Push,
    Statement,
    Status,
    Vouch,
    text_bytes,
)
from kvrs.ids import NodeId

_NACK_SHARE = 0.8  # Of the time that the asker waits: the answer is to be there before he gives up (Lifeguard).
# How many, on average, probe a suspect at once when they hear of it. They are the witnesses: without them a suspicion would
# wait for its confirmations until the suspect's turn comes in other nodes' rounds.
_WITNESSES = 8
_FEW = 8  # With fewer to probe, each waits for fewer who may notice that it is dead: they probe up to twice as often.
_SETTLING_INTERVALS = 20.0  # So long after its first packet a node may still hear of the process that had its name before.


class Detector:
    def __init__(self, me: Statement, settings: GossipSettings, random: Random, now_s: float) -> None:
        self.me = Member(me, now_s)
        self.members = Members(self.me, random)
        self.sends: list[Send] = []
        self.events: list[Event] = []
        self.health = Health(settings.health_max)
        self.over = False  # Another process has this node's name, or this node has left.
        self._settings = settings
        self._random = random
        self._interval_s = settings.probe_interval_s
        self._room = settings.packet_bytes - HEADER_BYTES
        self._rumours = Rumours(settings.retransmit_mult)
        self._suspicions: dict[NodeId, Suspicion] = {}
        self._probes = Probes()
        self._relayed = Relayed()
        self._seq = 0
        self._probe_at_s = now_s + random() * self._interval_s
        self._push_at_s = inf
        self._verdict_at_s = inf
        self._settled_s = inf
        self._spread(self.me, now_s)

    @property
    def due_s(self) -> float:
        # In pairs, because it is asked for after every packet: two numbers take no call where this is compiled.
        timers_s = min(self._probe_at_s, min(self._push_at_s, self._verdict_at_s))
        return min(timers_s, min(self._probes.due_s, self._relayed.due_s))

    def tick(self, now_s: float) -> None:
        if now_s >= self._probes.due_s:
            for probe in self._probes.due(now_s):
                self._next_wave(probe, now_s)
        if now_s >= self._verdict_at_s:
            self._judge(now_s)
        if now_s >= self._probe_at_s:
            share = min(1.0, max(0.5, len(self.members.peers) / _FEW))
            self._probe_at_s = now_s + self._interval_s * share * (1 + self.health.score)
            target = self.members.next_to_probe()
            if target is not None and target.id not in self._probes:
                self._probe(target, now_s)
        if now_s >= self._relayed.due_s:
            for asker, seq in self._relayed.unanswered(now_s):
                self.send(asker, Nack(self.me.epoch, self.me.incarnation, seq, self.news(asker)))
        if now_s >= self._push_at_s:
            self._push(now_s)

    # What others send.

    def hear(self, sender: NodeId, epoch: int, incarnation: int, now_s: float) -> bool:
        """The sender says that it lives; False when that is a process which others know to be replaced."""
        if self._settled_s == inf:
            self._settled_s = now_s + _SETTLING_INTERVALS * self._interval_s
        member = self.members.table.get(sender)
        if member is None or epoch > member.epoch:
            return True  # What it says of itself tells where it is; a newcomer's first packets carry that.
        if epoch < member.epoch:
            # The older of two processes with one name, if it still runs, has to hear of the newer.
            self.send(sender, Push(self.me.epoch, self.me.incarnation, (member.statement()[0],)))
            return False
        if incarnation > member.incarnation:
            self.believe(Statement(sender, epoch, incarnation, Status.ALIVE, member.address), now_s)
        return True

    def on_ping(self, sender: NodeId, ping: Ping) -> None:
        news = self.news(sender)
        self.sends.append(Send(sender, Ack(self.me.epoch, self.me.incarnation, ping.seq, news), ping.stream))

    def on_ack(self, sender: NodeId, ack: Ack, now_s: float) -> None:
        probe = self._probes.get(ack.seq)
        if probe is not None:
            if probe.target == sender:
                self._reached(probe, now_s)
            return
        asked = self._relayed.answered(ack.seq, sender)
        if asked is not None:
            asker, seq = asked
            me, news = self.me, self.news(asker, self._room - text_bytes(sender))
            self.send(asker, Vouch(me.epoch, me.incarnation, seq, sender, ack.epoch, ack.incarnation, news))

    def on_ask(self, sender: NodeId, ask: Ask, now_s: float) -> None:
        target = self.members.table.get(ask.target)
        if target is None or target is self.me:
            self.send(sender, Nack(self.me.epoch, self.me.incarnation, ask.seq, self.news(sender)))
            return
        seq = self._next_seq()
        self._relayed.add(seq, target.id, sender, ask.seq, now_s + self._interval_s / WAVES * _NACK_SHARE)
        self.send(target.id, Ping(self.me.epoch, self.me.incarnation, seq, False, self.news(target.id)))

    def on_vouch(self, vouch: Vouch, now_s: float) -> None:
        probe = self._probes.get(vouch.seq)
        if probe is None or probe.target != vouch.target:
            return  # It came too late, perhaps for an earlier process of this name.
        member = self.members.table[probe.target]
        self._reached(probe, now_s)
        if vouch.target_epoch == member.epoch:
            alive = Statement(member.id, member.epoch, vouch.target_incarnation, Status.ALIVE, member.address)
            self.believe(alive, now_s)

    def on_nack(self, sender: NodeId, nack: Nack) -> None:
        probe = self._probes.get(nack.seq)
        # Once each: an Ask that arrives twice is answered twice, and trust beyond "whole" would make time run backwards.
        if probe is not None and sender in probe.asked:
            probe.nacks.add(sender)

    def believe(self, said: Statement, now_s: float) -> None:
        """Take a word over, if it is newer than what is held."""
        if said.id == self.me.id:
            self.hear_of_me(said.epoch, said.incarnation, said.status, now_s)
            return
        member = self.members.table.get(said.id)
        if member is None:
            if said.status <= Status.SUSPECT and self._has_room():
                self._add(said, now_s)
        elif member.newer(said.epoch, said.incarnation, said.status):
            self._change(member, said, now_s)
        elif (
            said.status is Status.SUSPECT is member.status
            and said.incarnation == member.incarnation
            and said.epoch == member.epoch
            and said.by != member.by
        ):
            self._confirm(member, said.by, now_s)

    def hear_of_me(self, epoch: int, incarnation: int, status: Status, now_s: float) -> None:
        """Whoever holds this node suspect or dead is told better; whoever knows a newer process of this name is right."""
        if self.over or not self.me.newer(epoch, incarnation, status):
            return
        if epoch == self.me.epoch and status in (Status.SUSPECT, Status.DEAD):
            self.health.worsen(1)
            self._renew(epoch, incarnation + 1, now_s)
        elif now_s < self._settled_s:
            # The process before this one had that epoch, and whoever started this one did not know.
            self._renew(epoch + 1, 0, now_s)
        else:
            self.over = True
            self.events.append(Superseded(epoch))

    # What this node does of itself.

    def woke(self, now_s: float) -> None:
        """It stood still for longer than an interval. Others may hold it dead, and what it was about to conclude is void."""
        self.health.worsen(1)
        self._probes.clear()
        self._relayed.clear()
        for suspicion in self._suspicions.values():
            suspicion.evidence = suspicion.asking = False
        self._next_verdict()
        self._probe_at_s = now_s
        self._renew(self.me.epoch, self.me.incarnation + 1, now_s)
        self._push_at_s = now_s

    def leave(self, now_s: float) -> None:
        self._set_me(self.me.epoch, self.me.incarnation + 1, Status.LEFT, now_s)
        self._push(now_s)
        self.over = True

    def doubt(self, target: NodeId, now_s: float) -> None:
        """Something outside of gossip says that this node may be gone: it is probed out of turn."""
        member = self.members.table.get(target)
        if member is not None and member is not self.me and member.reachable and target not in self._probes:
            self._probe(member, now_s)

    def news(self, to: NodeId, room: int | None = None) -> tuple[Statement, ...]:
        member = self.members.table.get(to)
        if not self._rumours and (member is None or member.status is Status.ALIVE):
            return ()
        return self._rumours.riding(member, self._room if room is None else room)

    def send(self, to: NodeId, packet: Packet, stream: bool = False) -> None:
        self.sends.append(Send(to, packet, stream))

    def forget(self, member: Member) -> None:
        self.members.remove(member)
        self._rumours.forget(member)

    # Probes.

    def _probe(self, target: Member, now_s: float) -> None:
        gap_s = self._interval_s * (1 + self.health.score) / WAVES
        probe = Probe(target.id, target.epoch, self._next_seq(), gap_s)
        self._probes.add(probe)
        self._next_wave(probe, now_s)

    def _next_wave(self, probe: Probe, now_s: float) -> None:
        target = self.members.table.get(probe.target)
        if target is None or not target.reachable or target.epoch != probe.epoch:
            self._probes.end(probe)
            return
        if probe.waves == WAVES:
            self._failed(probe, target, now_s)
            return
        me, last = self.me, probe.waves == WAVES - 1
        self.send(target.id, Ping(me.epoch, me.incarnation, probe.seq, last, self.news(target.id)), last)
        if probe.waves > 0:
            relays = self.members.random_peers(self._settings.relays, but=(target.id, *probe.asked))
            probe.asked += tuple(relay.id for relay in relays)
            room = self._room - text_bytes(target.id)
            for relay in relays:
                self.send(relay.id, Ask(me.epoch, me.incarnation, probe.seq, target.id, self.news(relay.id, room)))
        probe.waves += 1
        self._probes.wait(probe, now_s + probe.gap_s)

    def _reached(self, probe: Probe, now_s: float) -> None:
        self._probes.end(probe)
        self.health.improve()
        suspicion = self._suspicions.get(probe.target)
        if suspicion is not None:
            # It lives, and has heard that it is suspected; its refutation is on its way, or is to be waited for anew.
            if suspicion.asking:
                suspicion.since_s = now_s
            suspicion.evidence = suspicion.asking = False
            self._next_verdict()

    def _failed(self, probe: Probe, target: Member, now_s: float) -> None:
        self._probes.end(probe)
        self.health.worsen(len(probe.asked) - len(probe.nacks) if probe.asked else 1)
        if target.status is Status.ALIVE:
            accused = Statement(target.id, target.epoch, target.incarnation, Status.SUSPECT, target.address, (self.me.id,))
            self._change(target, accused, now_s)
        else:
            self._confirm(target, (self.me.id,), now_s)
        suspicion = self._suspicions[target.id]
        suspicion.evidence, suspicion.asking = True, False
        self._next_verdict()

    # Suspicions.

    def _confirm(self, member: Member, by: tuple[NodeId, ...], now_s: float) -> None:
        new = tuple(accuser for accuser in by if accuser not in member.by)
        # More accusers than shorten the suspicion say nothing, and would be passed on for nothing.
        most = min(MAX_ACCUSERS, self._settings.confirmations + 1)
        accusers = (member.by + new)[:most]
        if accusers == member.by:
            return
        said = Statement(member.id, member.epoch, member.incarnation, member.status, member.address, accusers)
        member.set(said, member.since_s)
        self._spread(member, now_s)
        self._next_verdict()

    def _judge(self, now_s: float) -> None:
        for node, suspicion in list(self._suspicions.items()):
            member = self.members.table[node]
            if suspicion.asking or suspicion.ends_s(len(member.by)) > now_s:
                continue
            if suspicion.evidence:
                by = (self.me.id, *(accuser for accuser in member.by if accuser != self.me.id))[:MAX_ACCUSERS]
                dead = Statement(node, member.epoch, member.incarnation, Status.DEAD, member.address, by)
                self._change(member, dead, now_s)
            else:
                suspicion.asking = True
                if node not in self._probes:
                    self._probe(member, now_s)
        self._next_verdict()

    def _next_verdict(self) -> None:
        self._verdict_at_s = inf
        for node, suspicion in self._suspicions.items():
            if not suspicion.asking:
                self._verdict_at_s = min(self._verdict_at_s, suspicion.ends_s(len(self.members.table[node].by)))

    # The table.

    def _has_room(self) -> bool:
        """The longest dead give way to the living, nobody else does."""
        if len(self.members.table) >= self._settings.members_max:
            lost = [member for member in self.members.table.values() if not member.reachable]
            if not lost:
                return False
            self.forget(min(lost, key=lambda member: member.since_s))
        return True

    def _add(self, said: Statement, now_s: float) -> None:
        member = Member(said, now_s)
        self.members.add(member)
        self._changed(member, now_s)

    def _change(self, member: Member, said: Statement, now_s: float) -> None:
        if said.epoch != member.epoch:
            member.stored = None
            self._probes.end_of(member.id)
        member.set(said, now_s)
        self.members.sort_in(member)
        self._changed(member, now_s)

    def _changed(self, member: Member, now_s: float) -> None:
        had = self._suspicions.pop(member.id, None)
        if member.status is Status.SUSPECT:
            count = len(self.members.peers) + 1
            self._suspicions[member.id] = Suspicion(self._settings, count, now_s)
            if member.id not in self._probes and self._random() * count < _WITNESSES and self.me.id not in member.by:
                self._probe(member, now_s)
        if had is not None or member.status is Status.SUSPECT:
            self._next_verdict()
        if not member.reachable:
            self._probes.end_of(member.id)
        self._spread(member, now_s)
        self.events.append(MemberChanged(member.id, member.epoch, member.incarnation, member.status, member.by))

    def _renew(self, epoch: int, incarnation: int, now_s: float) -> None:
        self._set_me(epoch, incarnation, Status.ALIVE, now_s)

    def _set_me(self, epoch: int, incarnation: int, status: Status, now_s: float) -> None:
        if incarnation > MAX_NUMBER:
            epoch, incarnation = epoch + 1, 0
        if epoch > MAX_NUMBER:  # Whoever said so leaves no number that others would take.
            self.over = True
            self.events.append(Superseded(MAX_NUMBER))
            return
        self.me.set(Statement(self.me.id, epoch, incarnation, status, self.me.address), now_s)
        self._spread(self.me, now_s)

    # News.

    def _spread(self, member: Member, now_s: float) -> None:
        self._rumours.add(member, len(self.members.peers) + 1)
        self._push_at_s = min(self._push_at_s, now_s + self._settings.gossip_interval_s)

    def _push(self, now_s: float) -> None:
        peers = self.members.random_peers(self._settings.fanout)
        # With nobody to tell it to, the news waits.
        if peers and (news := self._rumours.pushing(self._room)):
            push = Push(self.me.epoch, self.me.incarnation, news)
            for member in peers:
                self.send(member.id, push)
        self._push_at_s = now_s + self._settings.gossip_interval_s if self._rumours.to_push else inf

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq
