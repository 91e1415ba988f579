"""Sources and destinations of pages in the configuration."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote

from kvrs.config.backup import BackupMode
from kvrs.config.cluster import NodeSettings
from kvrs.config.file import Config
from kvrs.ids import InstanceId
from kvrs.transfer.peers import PAGES_SOCKET, Peer
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.store.directory import store_directory


async def probe_links(
    puller: PagePuller, registry: Mapping[InstanceId, Peer], own: InstanceId, interval_s: float
) -> None:
    """Probe the links from all peers' nodes once per interval, until cancelled; a link that traffic
    has just measured is skipped.
    """
    while True:
        peers = [*registry.values()]
        # Number of this node's instances, which probe the same links.
        probers = [peer.node for peer in peers].count(registry[own].node)
        for peer in peers:
            # A peer's answer measures the link from its node, so the node's other peers are then
            # skipped.
            if peer.instance != own:
                await puller.probe(peer, probers)
        await asyncio.sleep(interval_s)


def peers_of(config: Config, own: NodeSettings, secret: bytes) -> dict[InstanceId, Peer]:
    """Return the peers of a process of that node: all instances, then the agents if there are any.
    The memory of the own node's agent is on this host, and so is the memory that the agent owns for
    single-process instances.
    """
    peers = _instances_of(config) | agents_of(config)
    directory = store_directory(config.backup.directory, secret, own.id)
    if (agent := peers.get(own.agent_id)) is not None:
        peers[own.agent_id] = replace(agent, directory=directory)
    for each in own.instances if config.state_plane.enabled else ():
        if each.ranks == 1 and (peer := peers.get(each.id)) is not None:
            name = f"{PAGES_SOCKET}-{quote(each.id, safe='')}"
            peers[each.id] = replace(peer, directory=directory, socket=name)
    return peers


def _instances_of(config: Config) -> dict[InstanceId, Peer]:
    return {
        instance.id: Peer(
            instance=instance.id, node=node.id, host=instance.host, port=instance.page_port
        )
        for node, instance in config.cluster.instances()
    }


def agents_of(config: Config) -> dict[InstanceId, Peer]:
    """Return the agents as peers; none if checkpoints are off."""
    if not config.backup.at_agents:
        return {}
    return {
        node.agent_id: Peer(
            instance=node.agent_id,
            node=node.id,
            host=node.agent.host,
            port=node.agent.page_port,
        )
        for node in config.cluster.nodes
    }


def holders_of(config: Config, own: InstanceId) -> dict[InstanceId, Peer]:
    """Return the peers that may receive this instance's checkpoint pages, by the ids that requests
    name. None for an instance of a group, which sends along the ring of its stages instead.
    """
    if config.backup.mode is not BackupMode.PEER:
        return agents_of(config)
    if config.cluster.find(own)[1].group is not None:
        return {}
    return {name: peer for name, peer in _instances_of(config).items() if name != own}
