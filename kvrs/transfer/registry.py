"""Sources and destinations of pages in the configuration."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from kvrs.config.backup import BackupMode
from kvrs.config.cluster import NodeSettings
from kvrs.config.file import Config
from kvrs.ids import InstanceId
from kvrs.transfer.peers import Peer
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.store.directory import store_directory


async def probe_links(
    puller: PagePuller, registry: Mapping[InstanceId, Peer], own: InstanceId, interval_s: float
) -> None:
    """Probe the links from all peers once per interval, except links with traffic."""
    while True:
        peers = [*registry.values()]
        # Number of this node's instances, which probe the same links.
        probers = [peer.node for peer in peers].count(registry[own].node)
        for peer in peers:
            # Once a peer has answered, the others of its node are not probed.
            if peer.instance != own:
                await puller.probe(peer, probers)
        await asyncio.sleep(interval_s)


def peers_of(config: Config) -> dict[InstanceId, Peer]:
    """Peers for pages: all instances, then the agents, if any."""
    peers = [
        Peer(instance=instance.id, node=node.id, host=instance.host, port=instance.page_port)
        for node, instance in config.cluster.instances()
    ]
    return {peer.instance: peer for peer in peers} | agents_of(config)


def agents_of(config: Config) -> dict[InstanceId, Peer]:
    """The agents, if they keep checkpoints."""
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
    """Receivers of this instance's checkpoint pages, as requests name them; an instance of a group
    sends along the ring of its stages instead.
    """
    if config.backup.mode is not BackupMode.PEER:
        return agents_of(config)
    if config.cluster.find(own)[1].group is not None:
        return {}
    return {name: peer for name, peer in peers_of(config).items() if name != own}


def with_own_memory(
    peers: Mapping[InstanceId, Peer], config: Config, own: NodeSettings, secret: bytes
) -> dict[InstanceId, Peer]:
    """Peers for a process of this node, whose agent is on its host and lends its memory."""
    near = dict(peers)
    if (agent := near.get(own.agent_id)) is not None:
        directory = store_directory(config.backup.directory, secret, own.id)
        near[own.agent_id] = replace(agent, directory=directory)
    return near
