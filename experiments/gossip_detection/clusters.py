"""Simulated gossip clusters whose members have joined."""

from kvrs.config.gossip import GossipSettings
from kvrs.ids import NodeId
from kvrs_testkit.gossip_net import GossipNet, Observer, SimNode

SEEDS = {NodeId(f"n{i}"): f"n{i}:7" for i in range(3)}


def joined(
    count: int,
    seed: int,
    settings: GossipSettings,
    *,
    observer: Observer | None = None,
    on_wire: bool = False,
) -> GossipNet:
    net = GossipNet(settings, seed, observer=observer, on_wire=on_wire)
    for i in range(count):
        net.add(f"n{i}", SEEDS)
    while any(len(node.gossip.members) < count for node in net.nodes.values()):
        net.run(net.now_s + 1.0)
    net.run(net.now_s + 5.0)
    return net


def any_node(net: GossipNet) -> SimNode:
    return list(net.nodes.values())[int(net.random.random() * len(net.nodes))]
