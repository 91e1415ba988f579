"""A network that exists only in virtual time, and gossip nodes on it: the objects of the product,
packet by packet.

Everything random comes from one seed. What the network does to packets, and what becomes of nodes,
is set by its driver: `loss`, `duplication`, `delay_s` and `cut` may be changed at
any moment, nodes are killed, stopped, restarted, and have their clocks changed. Every node has a
clock of its own, which starts anywhere and may run fast or slow.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from kvrs.gossip.facts import Event
from kvrs.gossip.swim import TOMBSTONE_S, Gossip, Send
from kvrs.gossip.wire import MAX_PACKET_BYTES, Packet, decode, encode
from kvrs.ids import NodeId


@dataclass(slots=True, eq=False)
class SimNode:
    id: NodeId
    gossip: Gossip
    up: bool = True
    stopped_until_s: float = 0.0
    # What came while it was stopped.
    waiting: list[tuple[Packet | bytes, NodeId]] = field(default_factory=list)
    offset_s: float = 0.0  # Its clock shows offset + rate * true time.
    rate: float = 1.0
    tick_at_s: float = inf  # The next that is scheduled.
    sent_bytes: int = 0

    def clock_s(self, true_s: float) -> float:
        return self.offset_s + self.rate * true_s


Observer = Callable[[float, SimNode, Event], None]


class GossipNet:
    def __init__(
        self,
        seed: int,
        *,
        probe_interval_s: float = 0.5,
        tombstone_s: float = TOMBSTONE_S,
        on_wire: bool = False,
        observer: Observer | None = None,
    ) -> None:
        """`on_wire`: every packet is encoded and decoded, and its bytes are counted; that takes
        half of the time again.
        """
        self._intervals_s = probe_interval_s, tombstone_s
        self.random = random.Random(seed)
        self.nodes: dict[NodeId, SimNode] = {}
        self.now_s = 0.0
        self.loss = 0.0
        self.duplication = 0.0
        self.delay_s = (0.0002, 0.002)  # Uniform between these; packets overtake each other.
        # True: nothing comes from one to the other.
        self.cut: Callable[[NodeId, NodeId], bool] | None = None
        self.buffered_packets = 512  # Kept for a stopped node by its socket; the rest is dropped.
        self.delivered = 0
        self._on_wire = on_wire
        self._observer = observer
        self._heap: list[tuple[float, int, SimNode, Any, NodeId | None]] = []
        self._order = 0  # Ties in time are resolved by it.

    def add(
        self,
        name: str,
        seeds: dict[NodeId, str] | None = None,
        *,
        epoch: int = 1,
        rate: float = 1.0,
    ) -> SimNode:
        node_id = NodeId(name)
        offset_s = self.random.uniform(0, 1e6)
        clock_s = offset_s + rate * self.now_s
        probe_interval_s, tombstone_s = self._intervals_s
        gossip = Gossip(
            node_id,
            f"{name}:7",
            epoch,
            probe_interval_s,
            self.random.random,
            clock_s,
            seeds,
            tombstone_s,
        )
        node = SimNode(node_id, gossip, offset_s=offset_s, rate=rate)
        self.nodes[node_id] = node
        self._tick_at(node, self.now_s)
        return node

    def restart(self, name: str, seeds: dict[NodeId, str], epoch: int) -> SimNode:
        """A new process under that name; what was sent to the old one reaches the new one."""
        self.nodes[NodeId(name)].up = False
        return self.add(name, seeds, epoch=epoch)

    def kill(self, node: SimNode) -> None:
        node.up = False

    def stop(self, node: SimNode, for_s: float, *, noticed: bool = True) -> None:
        """It does nothing for that long. Unless `noticed`, its clock stands still too, as that of a
        paused machine may.
        """
        node.stopped_until_s = max(node.stopped_until_s, self.now_s + for_s)
        if not noticed:
            node.offset_s -= for_s * node.rate
        self._push(node.stopped_until_s, node, None, None)

    def jump(self, node: SimNode, by_s: float) -> None:
        """Its clock; a timer that runs already ends when it was going to."""
        node.offset_s += by_s

    def run(self, until_s: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            now_s, _, node, packet, sender = heappop(heap)
            self.now_s = now_s
            if not node.up:
                continue
            if now_s < node.stopped_until_s:
                if sender is None:
                    node.tick_at_s = inf  # The end of the stop is a tick.
                elif len(node.waiting) < self.buffered_packets:
                    node.waiting.append((packet, sender))
                continue
            if node.waiting:
                self._catch_up(node)
            if sender is not None:
                self._deliver(node, packet, sender)
            elif now_s == node.tick_at_s or node.stopped_until_s == now_s:
                node.tick_at_s = inf
                self.act(node, node.gossip.tick(node.clock_s(now_s)))
        self.now_s = until_s

    def _catch_up(self, node: SimNode) -> None:
        """Serve timers and sockets after a stop; as in an event loop, chance decides which come
        first.
        """
        waiting, node.waiting = node.waiting, []
        if self.random.random() < 0.5:
            self.act(node, node.gossip.tick(node.clock_s(self.now_s)))
        for packet, sender in waiting:
            self._deliver(node, packet, sender)

    def _deliver(self, node: SimNode, packet: Any, sender: NodeId) -> None:
        self.delivered += 1
        if self._on_wire:
            packet = decode(packet)
        self.act(node, node.gossip.handle(packet, sender, node.offset_s + node.rate * self.now_s))

    def act(self, node: SimNode, sends: list[Send]) -> None:
        """Send what a call returned, of `leave` for example."""
        for send in sends:
            self._send(node, send.to, send.packet)
        gossip = node.gossip
        if (events := gossip.take_events()) and self._observer is not None:
            for event in events:
                self._observer(self.now_s, node, event)
        self._tick_at(node, (gossip.next_tick_s - node.offset_s) / node.rate)

    def _tick_at(self, node: SimNode, due_s: float) -> None:
        # A node's clock is a rounded sum: a tick at the very instant might come before its time,
        # for ever.
        at_s = max(due_s, self.now_s) + 1e-6
        # A tick that comes early does no harm, so only one that would come too late is scheduled
        # anew.
        if at_s < node.tick_at_s:
            node.tick_at_s = at_s
            self._push(at_s, node, None, None)

    def _send(self, node: SimNode, to: NodeId, packet: Packet) -> None:
        data: Packet | bytes = packet
        if self._on_wire:
            data = encode(packet)
            node.sent_bytes += len(data)
            # What does not fit into a datagram is a mistake of its sender.
            assert len(data) <= MAX_PACKET_BYTES, (len(data), packet)
        target = self.nodes.get(to)
        if target is None or (self.cut is not None and self.cut(node.id, to)):
            return
        draw = self.random.random
        shortest_s, longest_s = self.delay_s
        for _ in range(2 if self.duplication and draw() < self.duplication else 1):
            if self.loss and draw() < self.loss:
                continue
            self._push(
                self.now_s + shortest_s + (longest_s - shortest_s) * draw(), target, data, node.id
            )

    def _push(
        self, at_s: float, node: SimNode, packet: Packet | bytes | None, sender: NodeId | None
    ) -> None:
        self._order += 1
        heappush(self._heap, (at_s, self._order, node, packet, sender))
