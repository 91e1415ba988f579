"""The agent of one node put together: its store, the page server in front of it, its slots, and what it says of itself."""

import asyncio
import logging
import os
import time
from collections.abc import Sequence

from kvrs.agent.config import BackupMode
from kvrs.agent.fences import Fences
from kvrs.agent.slots import SlotTable
from kvrs.config import Config, NodeSettings
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import AgentInfo, AgentReport, SlotAnswer, SlotUpdate
from kvrs.transfer.faults import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity
from kvrs.transfer.server import PageServer
from kvrs.transfer.store.directory import StoreDirectory, store_directory
from kvrs.transfer.store.host import Changes, HostStore

log = logging.getLogger(__name__)

# How late the end of a lease may be noticed.
_EXPIRE_S = 0.25


class NodeAgent:
    """Reads and verifies what an earlier life left, before anything else; `start` needs a running event loop."""

    def __init__(
        self, config: Config, node: NodeId, secret: bytes, directory: StoreDirectory, older: Sequence[bytes] = ()
    ) -> None:
        """Raises ConfigError when the directory has no room for what is to be kept there, or cannot be used."""
        self.node = node_of(config, node)
        self._backup = config.backup
        self._keeps = config.backup.mode is not BackupMode.OFF
        if self._keeps and (room := directory.free_bytes() + directory.used_bytes()) < config.backup.capacity_bytes:
            capacity = config.backup.capacity_bytes
            raise ConfigError(
                [f"backup.capacity_bytes: got {capacity}; allowed: at most {room}, which {directory.path} has left"]
            )
        try:
            self.store = HostStore(directory, config.backup.capacity_bytes, config.transfer.lease_s, time.monotonic)
        except OSError as error:
            raise ConfigError([f"backup.directory: {directory.path}: {error.strerror or error}"]) from None
        links = SendingLinks(config.transfer, SendingFaults(), self.node.id)
        self.page_server = PageServer(self.identity, self.store, secret, config.transfer, links, self.store, older)
        # Later lives of an agent grant higher tokens, whatever becomes of the wall clock. The targets are processes of this
        # machine, so none of them has seen a token of before it was started.
        self.slots = SlotTable(config.policy.slots_max, first_token=time.monotonic_ns())
        self.fences = Fences(self.node, secret)
        self._page_port = 0

    @property
    def targets(self) -> list[InstanceId]:
        """Whose slots these are."""
        return self.fences.targets

    @property
    def capacity_bytes(self) -> int:
        """For checkpoints; none are sent while `backup.mode` is off."""
        return self._backup.capacity_bytes if self._keeps else 0

    def identity(self) -> Identity:
        return Identity(
            instance=self.node.agent_id,
            node=self.node.id,
            epoch=self.store.epoch,
            fingerprint=self.store.fingerprint,
            page_bytes=self.store.page_bytes,
        )

    def info(self) -> AgentInfo:
        return AgentInfo(
            id=self.node.agent_id,
            node=self.node.id,
            epoch=self.store.epoch,
            pid=os.getpid(),
            page_port=self._page_port,
            capacity_bytes=self.capacity_bytes,
            host_to_device_bytes_per_s=self._backup.host_to_device_bytes_per_s,
        )

    def report(self, changes: Changes) -> AgentReport:
        """What the watcher of `changes` has not been told yet."""
        streams, denied = changes.take()
        return AgentReport(
            epoch=self.store.epoch,
            reserved_bytes=self.store.reserved_bytes,
            held_bytes=self.store.held_bytes,
            checkpoints=self.store.checkpoints,
            pages={stream: self.store.held(stream) for stream in streams},
            denied=denied,
            slots=self.slots.counts(),
        )

    def update_slots(self, update: SlotUpdate) -> SlotAnswer:
        """What ends first makes room for what comes."""
        slots, now_s = self.slots, time.monotonic()
        for asked in update.release:
            slots.release(update.owner, asked, now_s)
        lost = [each.stream for each in update.renew if not slots.renew(update.owner, each, update.lease_s, now_s)]
        return SlotAnswer([slots.acquire(update.owner, each, update.lease_s, now_s) for each in update.acquire], lost)

    async def start(self) -> None:
        """Serve pages; the HTTP side is the caller's."""
        self._page_port = await self.page_server.start(self.node.agent.host, self.node.agent.page_port)

    async def expire_leases(self) -> None:
        """End reservations and slots that nobody renewed, until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self.store.expire()
            self.fences.end(self.slots.expire(time.monotonic()))


def node_of(config: Config, node: NodeId) -> NodeSettings:
    """Raises ConfigError when there is no such node."""
    for settings in config.cluster.nodes:
        if settings.id == node:
            return settings
    allowed = ", ".join(settings.id for settings in config.cluster.nodes)
    raise ConfigError([f"node {node!r} is not in cluster.nodes; allowed: {allowed}"])


def open_directory(config: Config, node: NodeId, secret: bytes) -> StoreDirectory:
    """Raises ConfigError when there is no such node, or the directory is not to be had."""
    return StoreDirectory(store_directory(config.backup.directory, secret, node_of(config, node).id))
