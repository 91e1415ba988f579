"""Fixed ports for a whole run: instances and agents keep their addresses when they are brought back."""

import contextlib
import errno
import random
import socket
from collections.abc import Set

from kvrs.config import Config, parse_config
from kvrs.errors import ConfigError

# Below the range from which the system takes ports for outgoing connections: while a process is down, nobody else may be
# given its port by chance.
FIRST_PORT, LAST_PORT = 20_000, 32_000


def resolve_ports(config: Config) -> Config:
    """The same configuration with every port 0 of proxy, instances, and agents (if any will run) replaced by a free one.

    Raises:
        ConfigError: a port that was asked for is in use; says which.
    """
    document = config.model_dump(mode="json")
    with_gossip = ("gossip_port",) if config.gossip.enabled else ()
    wanted = [(document["proxy"], key, f"proxy.{key}") for key in ("port", "admin_port", *with_gossip)]
    for node in document["cluster"]["nodes"]:
        for instance in node["instances"]:
            wanted += [(instance, key, f"instance {instance['id']}: {key}") for key in ("port", "page_port")]
        if config.agents_run:
            wanted += [(node["agent"], key, f"agent of node {node['id']}: {key}") for key in ("port", "page_port", *with_gossip)]
    faults: list[str] = []
    taken = {section[key] for section, key, _ in wanted if section[key]}
    with contextlib.ExitStack() as held:
        for section, key, name in wanted:
            host = section.get("host", "127.0.0.1")
            try:
                section[key] = held.enter_context(_bound(host, section[key], taken)).getsockname()[1]
                taken.add(section[key])
            except OSError as error:
                why = "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
                faults.append(f"{name}: {host}:{section[key]} is {why}; allowed: a free port, or 0 for any")
    if faults:
        raise ConfigError(faults)
    return parse_config(document)


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
    except OSError:
        server.close()
        raise
    return server
