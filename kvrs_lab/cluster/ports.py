"""Fixed ports for a whole run, so that proxies, instances and agents keep their addresses at
restarts.
"""

import contextlib
import errno
import fcntl
import functools
import os
import random
import socket
import tempfile
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from kvrs.config.file import Config, parse_config
from kvrs.config.proxy import ADMIN_PORT_STEP, ProxySettings
from kvrs.config.settings import HOST_OF_PORT
from kvrs.errors import ConfigError

# The range lies below the ports of outgoing connections: the port of a dead process must not be
# assigned to another process.
FIRST_PORT, LAST_PORT = 20_000, 32_000

_PROXY_PORTS = ("port", "admin_port", "peer_port", "gossip_port")
# Distance between the ports of a proxy's workers.
_STEPS_OF_WORKERS = {"admin_port": ADMIN_PORT_STEP, "peer_port": 1, "gossip_port": 1}


def several_proxies(proxy: ProxySettings, count: int) -> list[ProxySettings]:
    """Derive the settings of `count` proxies, each with its own id, ports and event log, and
    without peers. A given port is offset per proxy, like the admin port of a further worker.

    Raises:
        ConfigError: the file names peers itself.
    """
    if count == 1:
        return [proxy]
    if proxy.peers:
        named = ", ".join(peer.id for peer in proxy.peers)
        raise ConfigError(
            f"--proxies: got {count} beside proxy.peers ({named}); allowed: one of them"
        )
    made: list[ProxySettings] = []
    for number in range(count):
        changes: dict[str, Any] = {"id": f"{proxy.id.removesuffix('-0')}-{number}"}
        for key in _PROXY_PORTS:
            given = getattr(proxy, key)
            changes[key] = given + ADMIN_PORT_STEP * proxy.workers * number if given else 0
        if proxy.event_log is not None:
            path = Path(proxy.event_log)
            changes["event_log"] = str(path.with_name(f"{path.stem}-{changes['id']}{path.suffix}"))
        made.append(proxy.model_copy(update=changes))
    return made


def resolve_ports(config: Config) -> Config:
    """Replace every port 0 of proxy, instances, and agents (if any) by a free port.

    Raises:
        ConfigError: a given port is in use; the message names it.
    """
    return resolve_all(config, [config.proxy])[0]


def resolve_all(
    config: Config,
    proxies: Sequence[ProxySettings],
    *,
    nodes_too: bool = True,
) -> list[Config]:
    """Resolve the ports of several proxies of one cluster. Return a configuration for each proxy,
    with the others as peers. Without `nodes_too` instances and agents are on other machines.

    Raises:
        ConfigError: a given port is in use, or given twice; the message names it.
    """
    document = config.model_dump(mode="json")
    sections = [proxy.model_dump(mode="json") for proxy in proxies]
    nodes = document["cluster"]["nodes"] if nodes_too else []
    _choose(_wanted(config, nodes, sections))
    for section in sections if len(sections) > 1 else ():
        section["peers"] = [
            {
                "id": other["id"],
                "host": other["peer_host"],
                "peer_port": other["peer_port"],
                "workers": other["workers"],
            }
            for other in sections
            if other is not section
        ]
    return [parse_config(document | {"proxy": section}) for section in sections]


def _wanted(config: Config, nodes: list[Any], sections: list[Any]) -> list[tuple[Any, str, str]]:
    """Every port to listen on: section, key, and label."""
    with_gossip = ("gossip_port",) if config.gossip.enabled else ()
    wanted = []
    for section in sections:
        with_peers = ("peer_port",) if len(sections) > 1 or section["peer_port"] else ()
        owner = "proxy." if len(sections) == 1 else f"{section['id']}: "
        wanted += [
            (section, key, f"{owner}{key}")
            for key in ("port", "admin_port", *with_peers, *with_gossip)
        ]
    for node in nodes:
        for instance in node["instances"]:
            wanted += [
                (instance, key, f"instance {instance['id']}: {key}")
                for key in ("port", "page_port")
            ]
            wanted += [
                (host, "port", f"instance {instance['id']}: stage_hosts: port")
                for host in instance["stage_hosts"]
            ]
        if config.agents_run:
            wanted += [
                (node["agent"], key, f"agent of node {node['id']}: {key}")
                for key in ("port", "page_port", *with_gossip)
            ]
    return wanted


def _choose(wanted: list[tuple[Any, str, str]]) -> None:
    """Replace every port 0 by a free port. Raises ConfigError for unavailable given ports."""
    faults: list[str] = []
    taken = {port for section, key, _ in wanted if section[key] for port in _span(section, key)}
    names: dict[tuple[str, int], str] = {}
    with contextlib.ExitStack() as held:
        for section, key, name in wanted:
            host, port = _bound(section, key), section[key]
            ports = _span(section, key)
            # The system would bind both processes, until one listens.
            if port and (
                other := next(
                    (
                        known
                        for each in ports
                        if (known := names.setdefault((host, each), name)) != name
                    ),
                    None,
                )
            ):
                faults.append(
                    f"{name}: {host}:{port} is that of {other} too; allowed: a port of "
                    f"its own, or 0 for any"
                )
                continue
            try:
                section[key] = _bind_all(held, host, ports, taken)
                taken.update(_span(section, key))
            except OSError as error:
                why = "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
                faults.append(f"{name}: {host}:{port} is {why}; allowed: a free port, or 0 for any")
            except OverflowError:
                faults.append(
                    f"{name}: got {port}; allowed: 0 to 65535, for each proxy or worker "
                    f"{ADMIN_PORT_STEP} above the one before it"
                )
    if faults:
        raise ConfigError(faults)


def _bound(section: Any, key: str) -> str:
    """The address on which the port listens, which may differ from the address for others."""
    found: str = section.get("bind") or section.get(HOST_OF_PORT[key]) or section["host"]
    return found


def _span(section: Any, key: str) -> range:
    """All ports of a setting, one per worker."""
    first, step = section[key], _STEPS_OF_WORKERS.get(key, 0)
    return range(first, first + max(1, step * section.get("workers", 1)), max(1, step))


def _bind_all(held: contextlib.ExitStack, host: str, ports: range, taken: Set[int]) -> int:
    """Bind these ports, or free ones if the first is 0; return the first."""
    if ports[0]:
        for port in ports:
            held.enter_context(_bind(host, port))
        return ports[0]
    while True:
        first = random.randrange(FIRST_PORT, LAST_PORT)
        chosen = range(first, first + ports.step * len(ports), ports.step)
        # SO_REUSEADDR lets two processes bind a port until one of them listens.
        if not taken.isdisjoint(chosen) or not all(map(_reserve, chosen)):
            continue
        try:
            with contextlib.ExitStack() as bound:
                for port in chosen:
                    bound.enter_context(_bind(host, port))
                held.push(bound.pop_all())
            return first
        except OSError as error:
            # A host that is not this machine has no free port.
            if error.errno != errno.EADDRINUSE:
                raise


def _reserve(port: int) -> bool:
    """Reserve a port against other clusters of this user until this process ends.

    A chosen port is unbound before its first listen and whenever its process is down. The
    reservation is a lock on byte `port` of a file, which the system releases.
    """
    file = _reservations()
    if file is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


@functools.cache
def _reservations() -> int | None:
    """The file of reservations, kept open since closing releases them; None: no file."""
    path = Path(tempfile.gettempdir()) / f"kvrs_ports_{os.getuid()}"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _bind(host: str, port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except (OSError, OverflowError):
        server.close()
        raise
    return server
