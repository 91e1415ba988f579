"""The numbers of clients and streams for which a proxy's descriptors suffice."""

import logging

import msgspec

from kvrs.config.file import Config
from kvrs.config.proxy import ProxySettings
from kvrs.net.connections import ConnectionLimits
from kvrs.process.memory import descriptors_left

log = logging.getLogger(__name__)

# Descriptors reserved per instance or agent: two watches (reports, heartbeats) and a call.
_PER_PROCESS = 3
_PER_PEER = 8
_GOSSIP = 18
_MORE_CLIENTS = 64


class Capacity(msgspec.Struct, frozen=True):
    """Limits on streams and connections that leave descriptors for the proxy's own requests."""

    # The proxy's settings, with `max_streams` lowered to what the descriptors allow.
    settings: ProxySettings
    clients: ConnectionLimits
    others: ConnectionLimits  # Limits of the admin port, and of the port for other proxies.


def capacity_of(config: Config) -> Capacity:
    """Compute a proxy's limits from the number of file descriptors that it may open.

    Half of the descriptors are for clients. A quarter is for streams, each with one request to an
    instance at a time; the rest is for connections kept for later requests.
    """
    settings = config.proxy
    left = descriptors_left(_own_descriptors(config))
    streams = min(settings.max_streams, left // 4)
    if streams < settings.max_streams:
        log.warning(
            "the limit of descriptors lowers proxy.max_streams", extra={"max_streams": streams}
        )
    # More clients than streams may connect: the excess gets an error response, not a refused
    # connection.
    clients = min(2 * settings.max_streams + _MORE_CLIENTS, left // 2)
    # At the clients' port one address may have 3/4 of the connections, which leaves some to other
    # addresses; at the other ports it may have all, because a gateway may be the only address.
    return Capacity(
        settings.model_copy(update={"max_streams": streams}),
        ConnectionLimits(clients, max(1, clients * 3 // 4)),
        ConnectionLimits(left // 8, left // 8),
    )


def _own_descriptors(config: Config) -> int:
    """Number of descriptors for connections that exist without clients."""
    processes = sum(1 for _ in config.cluster.instances())
    if config.agents_run:
        processes += len(config.cluster.nodes)
    return (
        _PER_PROCESS * processes
        + _PER_PEER * sum(1 for _ in config.proxy.every_peer())
        + (_GOSSIP if config.gossip.enabled else 0)
    )
