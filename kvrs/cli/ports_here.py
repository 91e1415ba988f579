"""Ports of a configuration on this machine, each free, served, or taken by another process."""

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from kvrs.cli.cluster_checks import ProxyAnswer
from kvrs.cli.findings import Finding, bad, doubtful, good
from kvrs.config.cluster import Backend
from kvrs.config.file import Config
from kvrs.config.settings import HOST_OF_PORT, netloc


@dataclass(frozen=True, slots=True)
class _Port:
    key: str
    owner: str
    host: str
    port: int
    bind: str | None = None  # Where it listens, if not at the host.

    @property
    def bound(self) -> str:
        return self.bind or self.host


def port_findings(config: Config, answer: ProxyAnswer) -> Iterator[Finding]:
    """A line for each port that is not as it should be, and one for the others."""
    served = _served(answer)
    free: list[str] = []
    used: list[str] = []
    for each in _ports(config):
        where = netloc(each.host, each.port)
        try:
            _bind(each.bound, each.port)
            if "gossip" in each.key:
                _bind(each.bound, each.port, socket.SOCK_DGRAM)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                allowed = "a port that this user can bind"
                remedy = "another port, or CAP_NET_BIND_SERVICE for those below 1,024"
                yield bad(each.key, f"{where}: {error.strerror}", allowed, remedy)
            elif each.owner in served:
                used.append(where)
            else:
                yield _taken(each, where, answer)
        else:
            free.append(where)
    if used:
        yield good("ports in use by kvrs", ", ".join(used))
    if free:
        yield good("free ports", ", ".join(free))


def is_here(host: str) -> bool:
    """An address of this machine has the name."""
    try:
        _bind(host, 0)
    except OSError:
        return False
    return True


def is_to_start(host: str, port: int) -> bool:
    """A process of this address would run here, and nothing listens at its port."""
    if not is_here(host):
        return False
    try:
        _bind(host, port)
    except OSError:
        return False
    return True


def _bind(host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
    found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in dict.fromkeys(found):
        with socket.socket(family, kind) as probe:
            if kind is socket.SOCK_STREAM:
                # Connections of a former process may linger there.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)


def _ports(config: Config) -> Iterator[_Port]:
    """Those that have a number, at addresses of this machine."""
    return (each for each in _all_ports(config) if each.port and is_here(each.host))


def _all_ports(config: Config) -> Iterator[_Port]:
    proxy = config.proxy
    yield _Port("proxy.port", "", proxy.host, proxy.port)
    for key in ("admin_port", "peer_port", "gossip_port"):
        bind = proxy.gossip_bind if key == "gossip_port" else None
        for port in proxy.ports_of(key):
            yield _Port(f"proxy.{key}", "", getattr(proxy, HOST_OF_PORT[key]), port, bind)
    # vLLM's and DistServe's are bound by other processes than kvrs.
    is_ours = config.cluster.backend is Backend.EMBEDDED
    for _, instance in config.cluster.instances() if is_ours else ():
        name, at, bind = instance.id, instance.pages_at, instance.bind
        yield _Port(f"port of {name}", name, instance.host, instance.port, bind)
        yield _Port(f"page_port of {name}", name, at, instance.page_port, bind)
    for node in config.cluster.nodes if config.agents_run else ():
        agent, owner, bind = node.agent, node.agent_id, node.agent.bind
        yield _Port(f"port of {owner}", owner, agent.host, agent.port, bind)
        yield _Port(f"page_port of {owner}", owner, agent.pages_at, agent.page_port, bind)
        yield _Port(f"gossip_port of {owner}", owner, agent.gossip_at, agent.gossip_port, bind)


def _served(answer: ProxyAnswer) -> set[str]:
    """Processes that run, as a proxy reports them; "" stands for the proxy itself."""
    if answer.state is None:
        return set()
    rows = [*answer.state["instances"], *answer.state["agents"]]
    return {"", *(row["id"] for row in rows if row["health"] == "up")}


def _taken(each: _Port, where: str, answer: ProxyAnswer) -> Finding:
    allowed = "a free port, or one that its own process of kvrs serves"
    if answer.is_locked or (answer.state is None and each.owner):
        value = f"{where} is in use, and no proxy says by what"
        remedy = "run this again when the state of a proxy can be read"
        return doubtful(each.key, value, allowed, remedy)
    remedy = f"end what listens there (ss -ltnp 'sport = :{each.port}'), or another port"
    return bad(each.key, f"{where} is in use by something else", allowed, remedy)
