"""The clients and streams for which a proxy's descriptors are enough."""

import logging

import msgspec

from kvrs.config.file import Config
from kvrs.config.proxy import ProxySettings
from kvrs.net.connections import ConnectionLimits
from kvrs.process.descriptors import descriptors_left

log = logging.getLogger(__name__)

_PER_PROCESS = 3  # The watches of an instance or an agent, reports and heartbeats, and one call.
_PER_PEER = 8
_GOSSIP = 18
_MORE_CLIENTS = 64


class Capacity(msgspec.Struct, frozen=True):
    """Bounds that leave descriptors to requests that the proxy itself makes."""

    settings: ProxySettings  # With no more streams than fit.
    clients: ConnectionLimits
    others: ConnectionLimits  # Of the admin port, and of the port for other proxies.


def capacity_of(config: Config) -> Capacity:
    """The bounds of a proxy.

    Half of the descriptors is for clients. A quarter is for streams, each of which has one
    request to an instance at a time; the rest is for connections that are kept for the next one.
    """
    settings = config.proxy
    left = descriptors_left(_own_descriptors(config))
    streams = min(settings.max_streams, left // 4)
    if streams < settings.max_streams:
        log.warning(
            "the limit of descriptors lowers proxy.max_streams", extra={"max_streams": streams}
        )
    # More than there can be streams: the others are refused by name.
    clients = min(2 * settings.max_streams + _MORE_CLIENTS, left // 2)
    # One address leaves some to the others; a gateway in front may be the only one.
    return Capacity(
        settings.model_copy(update={"max_streams": streams}),
        ConnectionLimits(clients, max(1, clients * 3 // 4)),
        ConnectionLimits(left // 8, left // 8),
    )


def _own_descriptors(config: Config) -> int:
    """Those of connections that are there without clients."""
    processes = sum(1 for _ in config.cluster.instances())
    if config.agents_run:
        processes += len(config.cluster.nodes)
    return (
        _PER_PROCESS * processes
        + _PER_PEER * sum(1 for _ in config.proxy.every_peer())
        + (_GOSSIP if config.gossip.enabled else 0)
    )
