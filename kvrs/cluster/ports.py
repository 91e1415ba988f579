"""Fixed ports for a whole run: proxies, instances and agents keep their addresses when they are brought back."""

import contextlib
import errno
import random
import socket
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from kvrs.config import Config, parse_config
from kvrs.errors import ConfigError
from kvrs.proxy.config import ProxySettings

# Below the range from which the system takes ports for outgoing connections: while a process is down, nobody else may be
# given its port by chance.
FIRST_PORT, LAST_PORT = 20_000, 32_000

# So far the ports of one proxy are from those of the next, where the file gives them.
PORT_STEP = 10
_PROXY_PORTS = ("port", "admin_port", "peer_port", "gossip_port")


def doors(proxy: ProxySettings, count: int) -> list[ProxySettings]:
    """So many proxies like this one, each with a name, ports and an event log of its own; they do not know each other yet.

    Raises:
        ConfigError: the file has its own idea of who the others are.
    """
    if count == 1:
        return [proxy]
    if proxy.peers:
        named = ", ".join(peer.id for peer in proxy.peers)
        raise ConfigError([f"--proxies: got {count} beside proxy.peers ({named}); allowed: one of them"])
    made: list[ProxySettings] = []
    for number in range(count):
        changes: dict[str, Any] = {"id": f"{proxy.id.removesuffix('-0')}-{number}"}
        for key in _PROXY_PORTS:
            given = getattr(proxy, key)
            changes[key] = given + PORT_STEP * number if given else 0
        if proxy.event_log is not None:
            path = Path(proxy.event_log)
            changes["event_log"] = str(path.with_name(f"{path.stem}-{changes['id']}{path.suffix}"))
        made.append(proxy.model_copy(update=changes))
    return made


def resolve_ports(config: Config) -> Config:
    """The same configuration with every port 0 of proxy, instances, and agents (if any will run) replaced by a free one.

    Raises:
        ConfigError: a port that was asked for is in use; says which.
    """
    return resolve_all(config, [config.proxy])[0]


def resolve_all(config: Config, proxies: Sequence[ProxySettings]) -> list[Config]:
    """The same for several proxies of one cluster: a configuration for each, in which the others are its peers.

    Raises:
        ConfigError: a port that was asked for is in use, or was asked for twice; says which.
    """
    document = config.model_dump(mode="json")
    sections = [proxy.model_dump(mode="json") for proxy in proxies]
    _choose(_wanted(config, document, sections))
    for section in sections if len(sections) > 1 else ():
        section["peers"] = [
            {key: other[key] for key in ("id", "host", "peer_port")} for other in sections if other is not section
        ]
    return [parse_config(document | {"proxy": section}) for section in sections]


def _wanted(config: Config, document: Any, sections: list[Any]) -> list[tuple[Any, str, str]]:
    """Every port that will be listened on: its section, its key there, and what it is called."""
    with_gossip = ("gossip_port",) if config.gossip.enabled else ()
    wanted = []
    for section in sections:
        with_peers = ("peer_port",) if len(sections) > 1 or section["peer_port"] else ()
        who = "proxy." if len(sections) == 1 else f"{section['id']}: "
        wanted += [(section, key, f"{who}{key}") for key in ("port", "admin_port", *with_peers, *with_gossip)]
    for node in document["cluster"]["nodes"]:
        for instance in node["instances"]:
            wanted += [(instance, key, f"instance {instance['id']}: {key}") for key in ("port", "page_port")]
        if config.agents_run:
            wanted += [(node["agent"], key, f"agent of node {node['id']}: {key}") for key in ("port", "page_port", *with_gossip)]
    return wanted


def _choose(wanted: list[tuple[Any, str, str]]) -> None:
    """Put a free port wherever there is a 0; raises ConfigError for the others that cannot be had."""
    faults: list[str] = []
    taken = {section[key] for section, key, _ in wanted if section[key]}
    names: dict[tuple[str, int], str] = {}
    with contextlib.ExitStack() as held:
        for section, key, name in wanted:
            host, port = section.get("host", "127.0.0.1"), section[key]
            # The system would give it to both, until one of them listens.
            if port and (other := names.setdefault((host, port), name)) != name:
                faults.append(f"{name}: {host}:{port} is that of {other} too; allowed: a port of its own, or 0 for any")
                continue
            try:
                section[key] = held.enter_context(_bound(host, port, taken)).getsockname()[1]
                taken.add(section[key])
            except OSError as error:
                why = "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
                faults.append(f"{name}: {host}:{port} is {why}; allowed: a free port, or 0 for any")
            except OverflowError:
                faults.append(f"{name}: got {port}; allowed: 0 to 65535, for each proxy {PORT_STEP} above the one before it")
    if faults:
        raise ConfigError(faults)


def _bound(host: str, port: int, taken: Set[int]) -> socket.socket:
    if port:
        return _bind(host, port)
    while True:
        # Two of our own could both be bound to it: that is what the option for restarts allows while nobody listens.
        if (chosen := random.randrange(FIRST_PORT, LAST_PORT)) in taken:
            continue
        try:
            return _bind(host, chosen)
        except OSError as error:
            # Of a host that is not this machine, no port is free.
            if error.errno != errno.EADDRINUSE:
                raise


def _bind(host: str, port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except (OSError, OverflowError):
        server.close()
        raise
    return server
