"""Addresses that several sections name: checks for colliding ports, and the addresses of gossip
members.
"""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from kvrs.config.backup import AgentSettings
from kvrs.config.cluster import ClusterSettings, InstanceSettings
from kvrs.config.proxy import ProxySettings
from kvrs.config.settings import is_loopback
from kvrs.ids import NodeId


def addresses_of(
    cluster: ClusterSettings, proxy: ProxySettings, *, with_gossip: bool
) -> list[tuple[str, int]]:
    """Return host and port of each socket that processes of the cluster listen on; port 0: any free
    port.
    """
    listeners: list[InstanceSettings | AgentSettings] = [
        *(instance for _, instance in cluster.instances()),
        *(node.agent for node in cluster.nodes),
    ]
    addresses = [
        address
        for each in listeners
        for address in ((each.host, each.port), (each.host, each.page_port))
    ]
    addresses += [
        (node.agent.host, node.agent.row_port)
        for node in cluster.nodes
        if node.agent.row_port is not None
    ]
    addresses += [
        (stage.host, stage.port)
        for _, instance in cluster.instances()
        for stage in instance.stage_hosts
    ]
    addresses.append((proxy.host, proxy.port))
    addresses += [(proxy.admin_host, port) for port in proxy.ports_of("admin_port")]
    addresses += [(proxy.peer_host, port) for port in proxy.ports_of("peer_port")]
    if with_gossip:
        addresses += [(host, port) for _, host, port in gossip_members(cluster, proxy)]
    return addresses


def faults_of_addresses(addresses: Iterable[tuple[str, int]]) -> Iterator[str]:
    hosts_of = defaultdict(list)
    for host, port in addresses:
        if port:
            hosts_of[port].append("127.0.0.1" if host == "localhost" else host)
    for port, hosts in hosts_of.items():
        for host, count in Counter(hosts).items():
            if count > 1:
                yield f"port {host}:{port} is used {count} times; allowed: once"
        everywhere = [host for host in hosts if _is_everywhere(host)]
        here = [host for host in dict.fromkeys(hosts) if is_loopback(host)]
        if everywhere and here:
            yield (
                f"port {port} is used at {here[0]} and at {everywhere[0]}, which is every address "
                f"of the machine; allowed: once"
            )


def gossip_members(
    cluster: ClusterSettings, proxy: ProxySettings
) -> Iterator[tuple[NodeId, str, int]]:
    """Yield name, host and port of each gossip member in the file: each agent under its node's
    name, and the proxy or each of its workers.
    """
    agents = ((node.id, node.agent) for node in cluster.nodes)
    yield from ((node, agent.host, agent.gossip_port) for node, agent in agents)
    for name, port in zip(proxy.names, proxy.ports_of("gossip_port"), strict=True):
        yield NodeId(name), proxy.gossip_host, port


def gossip_seeds(cluster: ClusterSettings, proxy: ProxySettings, me: NodeId) -> dict[NodeId, str]:
    """Return the addresses of the other members, by name. Members on port 0 are left out: they
    contact `me` first.
    """
    return {
        member: f"{host}:{port}"
        for member, host, port in gossip_members(cluster, proxy)
        if port and member != me
    }


def faults_of_gossip(cluster: ClusterSettings, proxy: ProxySettings) -> Iterator[str]:
    nodes = {node.id for node in cluster.nodes}
    for each in nodes.intersection(proxy.names):
        yield f"proxy.id: {each!r} is the id of a node too; allowed with gossip: a name of its own"
    # A member by whether its host is on loopback, for the error if both kinds are found.
    heard: dict[bool, str] = {}
    # A member by the IP version of its host, for the error if both versions are found.
    versions: dict[int, str] = {}
    for member, host, _ in gossip_members(cluster, proxy):
        described = f"the host of {member!r} is {host!r}"
        if _is_everywhere(host):
            # A member publishes its address, and 0.0.0.0 or :: means its own machine to each
            # reader.
            yield (
                f"gossip: {described}; allowed: an address or a name at which the other members "
                f"reach it (proxy.gossip_host; of an agent host, beside bind)"
            )
            continue
        heard[is_loopback(host)] = described
        if (version := _version(host)) is not None:
            versions[version] = described
    if len(heard) == 2:
        yield (
            f"gossip: {heard[True]}, and {heard[False]}; allowed: addresses at which "
            f"the members reach each other (gossip_host)"
        )
    elif len(versions) == 2:
        yield f"gossip: {versions[4]}, and {versions[6]}; allowed: IPv4 or IPv6, the same for all"
    for node in cluster.nodes:
        name, host, bind = str(node.id), node.agent.host, node.agent.bind
        known = None if bind is None else _version(bind)
        if known is not None and _version(host) not in (None, known):
            yield (
                f"gossip: {name!r} is at {host!r} and bound at {bind!r}; allowed: both IPv4, or "
                f"both IPv6"
            )


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _version(host: str) -> int | None:
    """Return the IP version of a host's address, 4 or 6; None: the host is a name."""
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None
