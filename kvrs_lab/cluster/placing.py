"""The placement of a configuration's nodes on the machines of a Ray cluster. Pure."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvrs.config.cluster import Backend, NodeSettings
from kvrs.config.file import Config
from kvrs.ids import NodeId


class Machine(msgspec.Struct, frozen=True):
    """A Ray node that is alive. A machine that comes back has another id."""

    id: str
    address: str
    resources: Mapping[str, float]


def place(
    nodes: Sequence[NodeSettings], machines: Sequence[Machine], placed: Mapping[NodeId, Machine]
) -> dict[NodeId, Machine]:
    """Place nodes without a machine, as far as machines have room.

    A node lies on the machine at its address. A node with `ray` takes one of this resource, on the
    able machine with the fewest nodes, then the lowest address.
    """
    found: dict[NodeId, Machine] = {}
    for node in nodes:
        if node.id in placed:
            continue
        taken = [*placed.items(), *found.items()]
        able = [each for each in machines if _has_room(node, nodes, each, taken)]
        if able:
            found[node.id] = min(
                able,
                key=lambda each: (sum(at.id == each.id for _, at in taken), each.address),
            )
    return found


def _has_room(
    node: NodeSettings,
    nodes: Sequence[NodeSettings],
    machine: Machine,
    taken: Sequence[tuple[NodeId, Machine]],
) -> bool:
    if node.ray is None:
        return machine.address == host_of(node)
    alike = {each.id for each in nodes if each.ray == node.ray}
    used = sum(name in alike and at.id == machine.id for name, at in taken)
    return used + 1 <= machine.resources.get(node.ray, 0)


def host_of(node: NodeSettings) -> str:
    """The address of a node without `ray`."""
    return node.instances[0].host


def moved(config: Config, placed: Mapping[NodeId, Machine]) -> Config:
    """Put the addresses of the machines into the configuration."""

    def at(node: NodeSettings) -> NodeSettings:
        if (machine := placed.get(node.id)) is None:
            return node
        host = {"host": machine.address}
        instances = [each.model_copy(update=host) for each in node.instances]
        agent = node.agent.model_copy(update=host)
        return node.model_copy(update={"instances": instances, "agent": agent})

    cluster = config.cluster
    nodes = [at(node) for node in cluster.nodes]
    return config.model_copy(update={"cluster": cluster.model_copy(update={"nodes": nodes})})


def faults_without_ray(config: Config) -> Iterator[str]:
    for node in config.cluster.nodes:
        if node.ray is not None:
            yield f"cluster.nodes: node {node.id!r} has ray: {node.ray!r}; allowed: with --ray"


def faults_of_ray(config: Config) -> Iterator[str]:
    """Reasons against running a configuration on machines of a Ray cluster."""
    cluster = config.cluster
    if cluster.backend is not Backend.EMBEDDED or cluster.engine.device != "cpu":
        yield (
            f"cluster.backend: got {cluster.backend.value!r} on {cluster.engine.device!r}; allowed "
            f"with --ray: 'embedded' on 'cpu'"
        )
    for node in cluster.nodes:
        hosts = {each.host for each in node.instances}
        if config.agents_run:
            hosts.add(node.agent.host)
        if node.ray is None and len(hosts) > 1:
            yield (
                f"cluster.nodes: node {node.id!r} has hosts {', '.join(sorted(hosts))}; allowed "
                f"with --ray: the address of one machine, or a resource of Ray (ray)"
            )
        wanted = [(f"instance {each.id}", each, ("port", "page_port")) for each in node.instances]
        of_agent = ("port", "page_port", *(("gossip_port",) if config.gossip.enabled else ()))
        if config.agents_run:
            wanted += [(f"agent of node {node.id}", node.agent, of_agent)]  # type: ignore[list-item]
        for name, section, keys in wanted:
            for key in keys:
                if not getattr(section, key):
                    yield f"{name}: {key} is 0; allowed with --ray: a port of its machine"
