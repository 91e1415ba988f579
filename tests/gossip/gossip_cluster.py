"""One gossip node under test, whose packets a test delivers and answers."""

import random
from typing import TypeVar

from kvrs.gossip.swim import Gossip, Send
from kvrs.gossip.wire import MemberUpdate, Packet, Ping, PingReq, Push, Status
from kvrs.ids import NodeId

P = TypeVar("P", bound=Packet)
A, B, C, D, E = (NodeId(name) for name in "abcde")
INTERVAL_S = 0.5


def alive(node: NodeId, epoch: int = 1, incarnation: int = 0) -> MemberUpdate:
    return MemberUpdate(node, epoch, incarnation, Status.ALIVE, f"{node}:7")


def suspect(node: NodeId, *by: NodeId, epoch: int = 1, incarnation: int = 0) -> MemberUpdate:
    return MemberUpdate(node, epoch, incarnation, Status.SUSPECT, f"{node}:7", by)


def dead(node: NodeId, *by: NodeId, epoch: int = 1, incarnation: int = 0) -> MemberUpdate:
    return MemberUpdate(node, epoch, incarnation, Status.DEAD, f"{node}:7", by)


class GossipCluster:
    """Node `a` at 100 s, with all of `others` as members; the packets that it sends are kept, and
    answered only by the test.
    """

    def __init__(self, *others: NodeId, epoch: int = 1) -> None:
        self.now_s = 100.0
        self.node = Gossip(A, "a:7", epoch, INTERVAL_S, random.Random(0).random, self.now_s)
        self.sent: list[Send] = []
        if others:
            self.receive(others[0], *(alive(node) for node in others))
        self.pass_time(0.0)
        self.node.take_events()
        self.sent.clear()

    def receive(self, sender: NodeId, *updates: MemberUpdate) -> list[Send]:
        known = self.node.members.get(sender)
        epoch, incarnation = (known.epoch, known.incarnation) if known else (1, 0)
        own = [update for update in updates if update.id == sender]
        if own:
            epoch, incarnation = own[0].epoch, own[0].incarnation
        return self.handle(sender, Push(epoch, incarnation, updates))

    def handle(self, sender: NodeId, packet: Packet) -> list[Send]:
        sends = self.node.handle(packet, sender, self.now_s)
        self.sent += sends
        return sends

    def pass_time(self, for_s: float) -> list[Send]:
        """Tick whenever a tick is due; return the packets sent."""
        until_s, first = self.now_s + for_s, len(self.sent)
        while self.node.next_tick_s <= until_s:
            self.now_s = max(self.now_s, self.node.next_tick_s)
            self.sent += self.node.tick(self.now_s)
        self.now_s = until_s
        return self.sent[first:]

    def status(self, node: NodeId) -> Status:
        return self.node.members[node].status

    def packets(self, kind: type[P], to: NodeId | None = None) -> list[P]:
        """The packets of a kind that were sent so far."""
        return [
            send.packet
            for send in self.sent
            if isinstance(send.packet, kind) and to in (None, send.to)
        ]

    def probe(self, node: NodeId) -> Ping:
        """The first ping to that node from now on."""
        first = len(self.sent)
        for _ in range(100):
            self.pass_time(INTERVAL_S / 20)
            for send in self.sent[first:]:
                if send.to == node and isinstance(send.packet, Ping):
                    return send.packet
        raise AssertionError(f"{node} was not probed")

    def relayed_ping(self, asker: NodeId, seq: int, target: NodeId) -> Ping:
        """The ping on behalf of a requester."""
        [send] = self.handle(asker, PingReq(1, 0, seq, target))
        assert send.to == target
        assert isinstance(send.packet, Ping)
        return send.packet
