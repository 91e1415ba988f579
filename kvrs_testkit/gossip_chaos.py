"""Random faults for a gossip cluster: loss, duplicates, reordering, partitions of both kinds,
stops, deaths, restarts, clocks that drift and jump, edits. Invariants are checked at every step,
convergence by `assert_agreed`.
"""

import random
from collections import Counter

from kvrs.gossip.facts import (
    Event,
    Fact,
    FactKind,
    FailureFact,
    MemberChanged,
    SlotsFact,
    kind_of,
)
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs_testkit.gossip_net import GossipNet, Observer, SimNode

State = tuple[int, int, Status]


class ChaosNetwork:
    def __init__(self, seed: int, observer: Observer | None = None) -> None:
        self.draw = random.Random(seed)
        tombstone_s = self.draw.choice((1.0, 20.0))
        self.net = GossipNet(seed, on_wire=True, observer=self._observe, tombstone_s=tombstone_s)
        self.names = [f"n{i}" for i in range(self.draw.randint(2, 10))]
        self.seeds = {NodeId(name): f"{name}:7" for name in self.names}
        self.epochs = dict.fromkeys(self.names, 1)
        self.states: dict[tuple[SimNode, NodeId], State] = {}
        self._also = observer
        self.did: Counter[str] = Counter()
        for name in self.names:
            self.net.add(name, self.seeds, rate=self.draw.uniform(0.98, 1.02))

    def up(self) -> list[SimNode]:
        return [node for node in self.net.nodes.values() if node.up]

    def run_with_faults(self, steps: int) -> None:
        net, draw = self.net, self.draw
        net.loss, net.duplication = draw.uniform(0, 0.4), draw.uniform(0, 0.3)
        net.delay_s = (0.0001, draw.choice((0.001, 0.05, 0.3)))
        for _ in range(steps):
            net.run(net.now_s + draw.expovariate(0.5))
            acts = (self._die, self._restart, self._stop, self._split, self._heal, self._jump)
            draw.choice((*acts, self._edit, self._edit))()
            self._check_incarnations()

    def run_without_faults(self, for_s: float) -> None:
        net = self.net
        net.loss = net.duplication = 0.0
        net.delay_s, net.cut = (0.0002, 0.002), None
        net.run(net.now_s + for_s)

    def assert_agreed(self) -> None:
        up = self.up()
        for reader in up:
            for owner in up:
                held, own = reader.gossip.members[owner.id], owner.gossip.members[owner.id]
                assert (held.epoch, held.incarnation, held.status) == (
                    own.epoch,
                    own.incarnation,
                    Status.ALIVE,
                )
                assert facts_of(reader, owner.id) == facts_of(owner, owner.id)
            for node in self.net.nodes.values():
                held_dead = reader.gossip.members.get(node.id)
                assert node.up or held_dead is None or held_dead.status is Status.DEAD
                assert node.up or not facts_of(reader, node.id)

    def _check_incarnations(self) -> None:
        """Only a node itself raises its incarnation."""
        for node in self.up():
            own = node.gossip.members[node.id]
            for reader in self.up():
                held = reader.gossip.members.get(node.id)
                assert held is None or (held.epoch, held.incarnation) <= (
                    own.epoch,
                    own.incarnation,
                )

    def _observe(self, now_s: float, node: SimNode, event: Event) -> None:
        if self._also is not None:
            self._also(now_s, node, event)
        if isinstance(event, MemberChanged):
            state = event.epoch, event.incarnation, event.status
            last = self.states.get((node, event.id))
            assert last is None or state > last, "the state of a member only grows"
            self.states[node, event.id] = state
            assert event.id != node.id
            assert event.status is not Status.DEAD or event.suspectors, "a death has suspectors"

    def _die(self) -> None:
        if len(self.up()) > 1:
            self.did["deaths"] += 1
            self.net.kill(self.draw.choice(self.up()))

    def _restart(self) -> None:
        name = self.draw.choice(self.names)
        self.epochs[name] += 1
        self.did["restarts"] += 1
        self.net.restart(name, self.seeds, self.epochs[name])

    def _stop(self) -> None:
        node, for_s = self.draw.choice(self.up()), self.draw.uniform(0.1, 12)
        noticed = self.draw.random() < 0.5
        self.did["stops"] += 1
        self.net.stop(node, for_s, noticed=noticed)

    def _split(self) -> None:
        side = {NodeId(name) for name in self.names if self.draw.random() < 0.4}
        one_way = self.draw.random() < 0.5
        if 0 < len(side) < len(self.names):
            self.did["one-way partitions" if one_way else "partitions"] += 1
        self.net.cut = lambda a, b: (a in side) != (b in side) and (not one_way or a in side)

    def _heal(self) -> None:
        self.net.cut = None

    def _jump(self) -> None:
        self.did["clock jumps"] += 1
        self.net.jump(self.draw.choice(self.up()), self.draw.choice((-3600.0, -1.0, 1.0, 3600.0)))

    def _edit(self) -> None:
        node, name = self.draw.choice(self.up()), f"d{self.draw.randrange(4)}"
        clock_s = node.clock_s(self.net.now_s)
        fact: Fact = SlotsFact(self.draw.randrange(100), 0.5)
        if self.draw.random() < 0.5:
            fact = FailureFact(1, "x" * self.draw.randrange(100), 0.0)
        if self.draw.random() < 0.33:
            node.gossip.withdraw(kind_of(fact), name, clock_s)
        else:
            node.gossip.publish(name, fact, clock_s)


def facts_of(reader: SimNode, owner: NodeId) -> dict[tuple[FactKind, str], object]:
    """The facts of one node as another one has them, without their times."""
    shown = reader.gossip.facts.all()
    return {(kind, name): report.fact for kind, node, name, report in shown if node == owner}
