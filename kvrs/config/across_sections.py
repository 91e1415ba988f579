"""Checks of a configuration's values that depend on several sections. A fault is one line with
path, value and allowed values.

Addresses that several sections name: checks for colliding ports, and the addresses of gossip
members.
"""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import assert_never

from kvrs.config.backup import AgentSettings, BackupMode
from kvrs.config.cluster import Backend, ClusterSettings, InstanceSettings, NodeSettings
from kvrs.config.policy import PolicySettings
from kvrs.config.proxy import LEAST_MIRROR_BYTES, MAX_ID, MAX_PEERS, MAX_PORT, ProxySettings
from kvrs.config.sections import Sections, faults_of_speculation
from kvrs.config.settings import is_loopback
from kvrs.errors import ConfigError
from kvrs.ids import NodeId
from kvrs.profiles.catalog import decode_table, load_s, prefill_table
from kvrs.protocol.instance import Role


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


def faults_across_sections(config: Sections) -> Iterator[str]:
    yield from _faults_of_names(config)
    budget, body = config.proxy.body_budget_bytes, config.proxy.max_body_bytes
    # A request may take half of the budget, so that another one fits beside it.
    if budget < 2 * body:
        yield (
            f"proxy.body_budget_bytes: got {budget}; allowed: at least twice "
            f"proxy.max_body_bytes ({body})"
        )
    match config.cluster.backend:
        case Backend.VLLM:
            yield from _faults_of_stock(config.cluster)
            yield from _faults_of_rows(config.cluster, config.backup.mode)
        case Backend.SGLANG:
            yield from _faults_of_stock(config.cluster)
            if config.backup.mode not in (BackupMode.OFF, BackupMode.LOCAL):
                # A second copy is kept of the rows that running streams need; HiCache does not tell
                # which these are.
                yield (
                    f"backup.mode: got {config.backup.mode.value!r}; allowed with backend "
                    f"'sglang': 'off', 'local'"
                )
        case Backend.DISTSERVE:
            yield from _faults_of_distserve(config.cluster)
        case Backend.EMBEDDED:
            pass
        case _:
            assert_never(config.cluster.backend)
    yield from _faults_of_ranks(config)
    yield from _faults_of_groups(config.cluster, re_forms=config.elastic.enabled)
    yield from _faults_of_roles(config)
    yield from _faults_of_services(config)
    yield from _faults_of_profiles(config)
    if config.state_plane.enabled:
        yield from _faults_of_state_plane(config)
    if config.backup.mode is BackupMode.PEER:
        yield from _faults_of_peers(config.cluster, state_plane=config.state_plane.enabled)
    cluster, proxy = config.cluster, config.proxy
    yield from faults_of_speculation(config.speculation, cluster)
    if config.gossip.enabled:
        yield from faults_of_gossip(cluster, proxy)
    yield from faults_of_addresses(addresses_of(cluster, proxy, with_gossip=config.gossip.enabled))
    if config.proxy.workers > 1:
        yield from _faults_of_workers(proxy, config.policy, agents_run=config.agents_run)


def _repeated(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, count) for name, count in Counter(names).items() if count > 1]


def _faults_of_names(config: Sections) -> Iterator[str]:
    nodes = config.cluster.nodes
    used = {host.node for _, one in config.cluster.instances() for host in one.stage_hosts}
    for node in nodes:
        if not node.instances and node.id not in used:
            yield (
                f"cluster.nodes: node {node.id!r} has no instances; allowed: at least one, or a "
                f"stage of another node's (stage_hosts)"
            )
    yield from _faults_of_ids(nodes)
    proxies = [*config.proxy.names, *(peer.id for peer in config.proxy.every_peer())]
    for name, count in _repeated(proxies):
        yield f"proxy.peers: id {name!r} is used {count} times; allowed: once, proxy.id included"
    here = config.proxy.peer_host
    for peer in config.proxy.peers if is_loopback(here) else ():
        if not is_loopback(peer.host):
            yield (
                f"proxy.peer_host: got {here!r}, with proxy {peer.id!r} at {peer.host!r}; allowed: "
                f"an address at which that proxy reaches this one"
            )


def _faults_of_ids(nodes: Sequence[NodeSettings]) -> Iterator[str]:
    """Yield a fault for each id of a node, or of a process, that another one has too. Agents and
    stage hosts have ids that follow from those in the file.
    """
    known: dict[str, str] = {}  # Path of each node, by id.
    holders: dict[str, str] = {}  # Path or description of each process, by id.
    for number, node in enumerate(nodes):
        path = f"cluster.nodes.{number}"
        if (first := known.setdefault(node.id, path)) != path:
            yield _repeated_id(path, node.id, first)
        holders[node.agent_id] = f"the agent of {first}"
    for number, node in enumerate(nodes):
        for index, instance in enumerate(node.instances):
            path = f"cluster.nodes.{number}.instances.{index}"
            if (first := holders.setdefault(instance.id, path)) != path:
                yield _repeated_id(path, instance.id, first)
                continue
            for stage in instance.remote_stages:
                name, host = instance.stage_host_id(stage), f"the host of stage {stage} of {path}"
                if (first := holders.setdefault(name, host)) != host:
                    yield _repeated_id(path, name, f"{host}, and that of {first}")


def _repeated_id(path: str, name: str, first: str) -> str:
    return f"{path}.id: got {name!r}, which is the id of {first}; allowed: an id of its own"


def _faults_of_ranks(config: Sections) -> Iterator[str]:
    """Yield faults of instances with several ranks: kvrs divides only the embedded engine, and only
    on CPUs.
    """
    cluster = config.cluster
    for _, instance in cluster.instances():
        several = f"cluster.nodes: instance {instance.id!r} has {instance.ranks} ranks"
        if instance.ranks > 1 and cluster.backend is not Backend.EMBEDDED:
            yield f"{several}; allowed with backend {cluster.backend.value!r}: 1"
        elif instance.ranks > 1 and cluster.engine.device != "cpu":
            yield f"{several}; allowed with cluster.engine.device: {cluster.engine.device}: 1"
        if instance.ranks > 1 and config.elastic.min_ranks > instance.ranks:
            yield f"{several}; allowed with elastic.min_ranks: {config.elastic.min_ranks}: as many"
        if instance.stage_hosts:
            yield from _faults_of_stage_hosts(config, instance)


def _faults_of_stage_hosts(config: Sections, instance: InstanceSettings) -> Iterator[str]:
    nodes = {node.id for node in config.cluster.nodes}
    for stage, host in instance.remote_stages.items():
        if host.node not in nodes:
            yield (
                f"cluster.nodes: instance {instance.id!r} has stage {stage} on node "
                f"{host.node!r}; allowed: {', '.join(sorted(nodes))}"
            )
    if config.elastic.min_ranks > 1:
        yield (
            f"elastic.min_ranks: got {config.elastic.min_ranks}; allowed with instance "
            f"{instance.id!r}, of which each stage in a host re-forms for itself: 1"
        )


def _faults_of_roles(config: Sections) -> Iterator[str]:
    roles = config.cluster.roles
    # The cluster needs no prefill instance then, since a stock decode instance computes prompts
    # itself.
    is_decode_only = config.cluster.backend.is_stock and roles == {Role.DECODE}
    for role in (Role.DECODE,) if is_decode_only else (Role.PREFILL, Role.DECODE):
        if not roles & {role, Role.BOTH}:
            yield f"cluster.nodes: no instance of role {role.value!r}; allowed: at least one"
    mode = config.backup.mode
    if mode in (BackupMode.REMOTE, BackupMode.BOTH) and len(config.cluster.nodes) < 2:
        yield (
            f"backup.mode: got {mode.value!r} with 1 node; allowed: 'off' or 'local', or a "
            f"second node"
        )


def _faults_of_services(config: Sections) -> Iterator[str]:
    """Yield faults of services: only instances of stock engines may be found by name, since all
    others know their ids and have keys of their own.
    """
    backend, services = config.cluster.backend, config.cluster.services
    if services and backend is not Backend.VLLM:
        yield (
            f"cluster.services: got {len(services)} with backend {backend.value!r}; allowed: none, "
            f"or backend 'vllm'"
        )
    if services and config.agents_run:
        what = "gossip.enabled: true" if config.gossip.enabled else "backup.mode"
        yield (
            f"cluster.services: got {len(services)} with {what}, and their nodes have no agents; "
            f"allowed: none, or gossip.enabled: false and backup.mode: off"
        )
    for name, count in _repeated(service.id for service in services):
        yield f"cluster.services: id {name!r} is used {count} times; allowed: once"
    for service in services:
        if service.role is Role.BOTH:
            yield (
                f"cluster.services: service {service.id!r} has role 'both'; allowed: prefill, "
                f"decode"
            )


def _faults_of_profiles(config: Sections) -> Iterator[str]:
    needed: tuple[tuple[str, str | None, tuple[Callable[[str], object], ...]], ...] = (
        ("profiles.prefill", config.profiles.prefill, (prefill_table,)),
        ("cluster.engine.pace", config.cluster.engine.pace, (decode_table, load_s)),
        ("speculation.pace", config.speculation.pace, (decode_table, load_s)),
    )
    for key, wanted, tables in needed:
        if wanted is None:
            continue
        try:
            for table in tables:
                table(wanted)
        except ConfigError as error:
            yield from (f"{key}: {fault}" for fault in error.faults)


def _faults_of_state_plane(config: Sections) -> Iterator[str]:
    backend, device = config.cluster.backend, config.cluster.engine.device
    if backend is not Backend.EMBEDDED or device != "cpu":
        yield (
            f"state_plane.enabled: got true with backend {backend.value!r} on {device!r}; allowed: "
            f"'embedded' on 'cpu'"
        )


def _faults_of_distserve(cluster: ClusterSettings) -> Iterator[str]:
    for node in cluster.nodes:
        roles = sorted(instance.role.value for instance in node.instances)
        # A server whose prefill the proxy must not use is listed as a decode instance alone.
        if roles not in ([Role.DECODE, Role.PREFILL], [Role.DECODE]):
            allowed = (
                "allowed with backend 'distserve': one prefill and one decode, which are one server"
            )
            yield (
                f"cluster.nodes: node {node.id!r} has instances of roles {', '.join(roles)}; "
                f"{allowed}"
            )
    engine = cluster.engine
    if engine.pace is not None and engine.device != "cpu":
        yield (
            f"cluster.engine.pace: got {engine.pace!r}; allowed with backend 'distserve' on "
            f"{engine.device!r}: null"
        )


def _faults_of_rows(cluster: ClusterSettings, mode: BackupMode) -> Iterator[str]:
    with_rows = mode is BackupMode.LOCAL or any(node.agent.row_port for node in cluster.nodes)
    if mode is not BackupMode.OFF and not with_rows:
        yield (
            f"backup.mode: got {mode.value!r} with backend 'vllm', where no agent has a row_port; "
            f"allowed: 'off', 'local', or a row_port of agents"
        )


def _faults_of_stock(cluster: ClusterSettings) -> Iterator[str]:
    """Yield a fault for each setting that does not apply to servers which kvrs does not start."""
    backend = cluster.backend.value
    for _, instance in cluster.instances():
        if instance.role is Role.BOTH:
            yield (
                f"cluster.nodes: instance {instance.id!r} has role 'both'; allowed with "
                f"backend {backend!r}: prefill, decode"
            )
        if instance.port == 0:
            yield (
                f"cluster.nodes: instance {instance.id!r} has no port; allowed with backend "
                f"{backend!r}: the port it listens on"
            )
        if instance.bind is not None:
            yield (
                f"cluster.nodes: instance {instance.id!r} has bind: {instance.bind}; allowed with "
                f"backend {backend!r}, which binds its ports itself: null"
            )


_EQUAL = ("role", "tp", "pp")  # Keys with the same value in all instances of a group.


def _faults_of_groups(cluster: ClusterSettings, *, re_forms: bool) -> Iterator[str]:
    """Yield the reasons why instances of a group cannot lend each other stages. `re_forms`:
    instances go on without a lost rank.
    """
    groups: dict[str, list[InstanceSettings]] = {}
    for _, instance in cluster.instances():
        if instance.group is not None:
            groups.setdefault(instance.group, []).append(instance)
    if groups and cluster.backend is not Backend.EMBEDDED:
        yield (
            f"cluster.backend: got {cluster.backend.value!r}, with group {next(iter(groups))!r} "
            f"among the instances; allowed: 'embedded', or no group"
        )
        return
    if groups and not re_forms:
        yield (
            f"elastic.enabled: got false, with group {next(iter(groups))!r} among the instances; "
            f"allowed: true, or no group"
        )
    for group, members in groups.items():
        yield from _faults_of_group(group, members)


def _faults_of_group(group: str, members: Sequence[InstanceSettings]) -> Iterator[str]:
    first, *others = members
    if not others:
        yield (
            f"cluster.nodes: instance {first.id!r} is alone in group {group!r}, a ring of one; "
            f"allowed: at least two instances"
        )
    for each in members:
        if each.ranks == 1:
            yield (
                f"cluster.nodes: instance {each.id!r} of group {group!r} has 1 rank; allowed: "
                f"several, in stage_hosts"
            )
        elif (hosts := len(each.stage_hosts)) < each.pp:
            yield (
                f"cluster.nodes: instance {each.id!r} of group {group!r} has {hosts} stage_hosts; "
                f"allowed: {each.pp}, one for each stage"
            )
    for each in others:
        for key in _EQUAL:
            if (got := getattr(each, key)) != (allowed := getattr(first, key)):
                yield (
                    f"cluster.nodes: instance {each.id!r} of group {group!r} has {key}: "
                    f"{_shown(got)}; allowed: {_shown(allowed)}, as instance {first.id!r}"
                )


def _shown(value: object) -> str:
    """Return a value as the file has it."""
    return "null" if value is None else f"{value}"


def _faults_of_peers(cluster: ClusterSettings, *, state_plane: bool) -> Iterator[str]:
    """Yield the reasons why instances cannot keep replicas of each other's pages."""
    if cluster.backend is not Backend.EMBEDDED:
        yield (
            f"backup.mode: got 'peer' with backend {cluster.backend.value!r}; allowed: another "
            f"mode, or backend 'embedded'"
        )
        return
    instances = [instance for _, instance in cluster.instances()]
    if sum(each.role is not Role.PREFILL for each in instances) < 2:
        yield (
            "backup.mode: got 'peer' with one decode instance; allowed: another mode, or a second "
            "decode instance"
        )
    if state_plane:
        # The file of a pool names the predecessor of each page, which an instance with a replica
        # does not know.
        yield (
            "backup.mode: got 'peer' with state_plane.enabled: true; allowed: another mode, or "
            "false"
        )
    for each in instances:
        if each.stage_hosts and each.group is None:
            yield (
                f"backup.mode: got 'peer', and instance {each.id!r} has stage_hosts and no group; "
                f"allowed: another mode, none of them, or both"
            )


def _faults_of_workers(
    proxy: ProxySettings, policy: PolicySettings, *, agents_run: bool
) -> Iterator[str]:
    workers = proxy.workers
    body = 2 * proxy.max_body_bytes
    for key, got, each in (
        ("proxy.max_streams", proxy.max_streams, 1),
        ("proxy.body_budget_bytes", proxy.body_budget_bytes, body),
        ("proxy.mirror_bytes", proxy.mirror_bytes, LEAST_MIRROR_BYTES),
    ):
        if got < each * workers:
            yield (
                f"{key}: got {got} with proxy.workers: {workers}; allowed: at least "
                f"{each * workers}, {each} for each worker"
            )
    if not agents_run and policy.slots_max < workers:
        yield (
            f"policy.slots_max: got {policy.slots_max} with proxy.workers: {workers}, and "
            f"no agent arbitrates between them; allowed: at least {workers}, or gossip.enabled: "
            f"true"
        )
    for key in ("admin_port", "peer_port", "gossip_port"):
        first, *_, last = proxy.ports_of(key)
        if last > MAX_PORT:
            yield (
                f"proxy.{key}: got {first} with proxy.workers: {workers}, the last of which has "
                f"{last}; allowed: at most {MAX_PORT - last + first}"
            )
    if len(longest := proxy.names[-1]) > MAX_ID:
        yield (
            f"proxy.id: got {proxy.id!r} with proxy.workers: {workers}, the last of which is "
            f"{longest!r}; allowed: at most {MAX_ID} characters"
        )
    if (peers := workers - 1 + sum(1 for _ in proxy.every_peer())) > MAX_PEERS:
        yield (
            f"proxy.peers: {peers} other processes with proxy.workers: {workers}; allowed: at "
            f"most {MAX_PEERS}, workers included"
        )
