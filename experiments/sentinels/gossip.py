"""Detection of deaths by gossip, for a cluster in virtual time."""

from kvrs.gossip.facts import Event, MemberChanged
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs_testkit.gossip_net import GossipNet, SimNode

SEEDS = {NodeId(f"n{i}"): f"n{i}:7" for i in range(3)}


class _Deaths:
    """The time at which each member declared each other one dead."""

    def __init__(self) -> None:
        self.known_s: dict[NodeId, dict[NodeId, float]] = {}

    def __call__(self, now_s: float, node: SimNode, event: Event) -> None:
        if isinstance(event, MemberChanged) and event.status is Status.DEAD:
            self.known_s.setdefault(event.id, {})[node.id] = now_s


def death_times(
    count: int, seeds: range, kills: int, loss: float
) -> tuple[list[float], list[float]]:
    """From the kill of a random node until the first, and until all others, hold it dead; it comes
    back before the next.
    """
    first, all_others = list[float](), list[float]()
    for seed in seeds:
        deaths = _Deaths()
        net = _joined(count, seed, deaths)
        net.loss = loss
        for kill in range(kills):
            net.run(net.now_s + 5 + net.random.random())
            victim = list(net.nodes.values())[int(net.random.random() * len(net.nodes))]
            killed_s = net.now_s
            deaths.known_s.clear()
            net.kill(victim)
            while len(deaths.known_s.get(victim.id, {})) < count - 1:
                net.run(net.now_s + 0.1)
                assert net.now_s < killed_s + 120, "a death that not all have declared"
            first.append(min(deaths.known_s[victim.id].values()) - killed_s)
            all_others.append(max(deaths.known_s[victim.id].values()) - killed_s)
            assert set(deaths.known_s) == {victim.id}, "another node was declared dead"
            net.restart(victim.id, SEEDS, epoch=kill + 2)
    return first, all_others


def _joined(count: int, seed: int, observer: _Deaths) -> GossipNet:
    net = GossipNet(seed, observer=observer)
    for i in range(count):
        net.add(f"n{i}", SEEDS)
    while any(len(node.gossip.members) < count for node in net.nodes.values()):
        net.run(net.now_s + 1.0)
    net.run(net.now_s + 5.0)
    return net
