"""The agent of one node: its checkpoint store, page server, slot table and reports.

Fences of transfers whose slot leases have expired, because the stream's proxy died or did not
renew for a whole lease.
"""

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, KeysView, Mapping, Sequence
from functools import partial
from secrets import token_bytes

import aiohttp
import msgspec

from kvrs.agent.regions import Regions, RowSummer
from kvrs.agent.row_port import RowCopier, RowCopies, RowPort
from kvrs.agent.slots import SlotTable
from kvrs.config.backup import BackupMode
from kvrs.config.cluster import NodeSettings
from kvrs.config.file import Config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, NodeId
from kvrs.net.http import naming_port
from kvrs.net.proving import Address, ProvingConnector, instance_keys
from kvrs.net.tls import load_certificates
from kvrs.protocol.instance import (
    AgentInfo,
    AgentReport,
    FenceRequest,
    SlotAnswer,
    SlotRequest,
    SlotUpdate,
)
from kvrs.protocol.rows import RowsReport
from kvrs.protocol.secrets import Scope, ScopedKey, scoped_key, scoped_keys
from kvrs.transfer.anchors import AnchoredFiles
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.rows.connections import dial_tcp, listen_tcp, listen_unix, remove_unix
from kvrs.transfer.rows.tags import SALT_BYTES, RowTagger
from kvrs.transfer.server import PageServer
from kvrs.transfer.store.directory import StoreDirectory, row_directory, store_directory
from kvrs.transfer.store.host import HostStore, UnreportedChanges

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=1.0)
_RETRY_S = 0.5
# Number of times that a fence request is sent to an instance that does not answer: then the
# instance is dead, or gets a complete fence when it runs again.
_TRIES = 5


class FenceSender:
    """Sends fence requests to the instances of one node."""

    def __init__(self, *, can_fence: bool) -> None:
        """`can_fence`: the instances have fences. vLLM has none and needs none: a late load fills
        only pages of its own request, by keys of their contents.
        """
        self._can_fence = can_fence
        self._urls: dict[InstanceId, str] = {}
        self._waiting: asyncio.Queue[dict[InstanceId, list[SlotRequest]]] = asyncio.Queue()

    @property
    def targets(self) -> KeysView[InstanceId]:
        return self._urls.keys()

    def learn(self, urls: Mapping[InstanceId, str]) -> None:
        """Add instances of the node, or update their URLs."""
        self._urls.update(urls)

    def end(self, transfers: Iterable[SlotRequest]) -> None:
        by_target: defaultdict[InstanceId, list[SlotRequest]] = defaultdict(list)
        for each in transfers:
            by_target[each.target].append(each)
        if by_target and self._can_fence:
            self._waiting.put_nowait(by_target)

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Send the fence requests that `end` has queued, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for target, transfers in (await self._waiting.get()).items():
                    group.create_task(self._send(http, target, transfers))

    async def _send(
        self, http: aiohttp.ClientSession, target: InstanceId, transfers: list[SlotRequest]
    ) -> None:
        request = FenceRequest(
            {each.stream: each.attempt + 1 for each in transfers},
            {each.stream: each.owner_epoch for each in transfers},
            slots_only=True,
        )
        log.warning("slot leases expired", extra={"instance": target, "streams": len(transfers)})
        for _ in range(_TRIES):
            try:
                async with http.post(
                    f"{self._urls[target]}/kvrs/v1/fence",
                    data=msgspec.json.encode(request),
                    timeout=_TIMEOUT,
                ) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(_RETRY_S)
        log.warning("transfers not fenced", extra={"instance": target, "streams": len(transfers)})


# Period of the search for expired leases of slots and reservations.
_EXPIRE_S = 0.25
# Period of the search for memory that no process uses.
_ORPHANS_S = 1.0
# Time for which memory of instances stays after its last process has ended.
_ORPHAN_S = 60.0
# Period at which the agent checks whether the engines with row memory still live.
_SETTLE_S = 0.1
_CONNECT_S = 2.0


class NodeAgent:
    """An agent. Its construction reads and verifies the pages that an earlier process left; `start`
    needs a running event loop.
    """

    def __init__(
        self,
        config: Config,
        node: NodeId,
        secret: bytes,
        directory: StoreDirectory,
        older: Sequence[bytes] = (),
    ) -> None:
        """`older`: further accepted secrets. Raises ConfigError: the directory has no room for
        `backup.capacity_bytes`, or cannot be used.
        """
        self.node = node_of(config, node)
        self._directory = directory
        self._row_directory = row_directory(config.backup.directory, secret, node)
        self._backup = config.backup
        self._keeps = config.backup.at_agents
        if (
            self._keeps
            and (room := directory.free_bytes() + directory.used_bytes())
            < config.backup.capacity_bytes
        ):
            capacity = config.backup.capacity_bytes
            raise ConfigError(
                f"backup.capacity_bytes: got {capacity}; allowed: at most {room}, which "
                f"{directory.path} and the memory limit of this process leave"
            )
        try:
            self.store = HostStore(
                self.node.agent_id,
                self.node.id,
                directory,
                config.backup.capacity_bytes,
                config.transfer.lease_s,
                time.monotonic,
            )
        except OSError as error:
            raise ConfigError(
                f"backup.directory: {directory.path}: {error.strerror or error}"
            ) from None
        links = SendingLinks(config.transfer, SendingFaults(), self.node.id)
        self.page_server = PageServer(self.store, secret, config.transfer, links, older)
        self.page_server.keep(self.store)
        # The monotonic clock makes later agents grant higher tokens, whatever the wall clock does.
        # It restarts with the machine, but so do the targets, which are processes of it.
        self.slots = SlotTable(config.policy.slots_max, first_token=time.monotonic_ns())
        self.tls = load_certificates("security.tls", config.security.tls)
        self._secret = secret
        can_fence = not config.cluster.backend.is_stock
        self.fences = FenceSender(can_fence=can_fence)
        # Keys of the node's instances, by their HTTP addresses.
        self._keys: dict[Address, ScopedKey] = {}
        self._know_instances(config)
        self._orphan_s = _ORPHAN_S
        # Files with the instances' memory; None: instances own their memory.
        self.anchors = AnchoredFiles(directory) if config.state_plane.enabled else None
        self._page_port = 0
        keys = scoped_keys([secret, *older], self.node.agent_id, Scope.ROWS)
        self._regions = Regions()
        self._copies = RowCopies(lambda: max(0, self.capacity_bytes - self.store.reserved_bytes))
        tagger = RowTagger(secret, token_bytes(SALT_BYTES))
        self._rows = RowPort(self._regions, self._copies, keys, tagger)
        self._summer = RowSummer(self._regions, config.backup.checksum_share)
        self._copied = self._copied_node(config)
        self._copier = None if self._copied is None else self._copier_of(self._copied, config)

    @property
    def targets(self) -> KeysView[InstanceId]:
        """Ids of the node's instances, for which the agent grants slots."""
        return self.fences.targets

    def learn(self, config: Config) -> None:
        """Serve also the instances of this node that are new in this configuration.

        Raises:
            ConfigError: the configuration lacks this node.
        """
        self.node = node_of(config, self.node.id)
        self._know_instances(config)

    def _know_instances(self, config: Config) -> None:
        instances = self.node.instances
        self._keys.update(instance_keys(self._secret, instances))
        self.fences.learn({instance.id: config.url_of(instance) for instance in instances})

    def new_session(self) -> aiohttp.ClientSession:
        """Make an HTTP client of the node's instances, also of those that are added later."""
        return aiohttp.ClientSession(
            connector=ProvingConnector(self._keys, self.tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )

    @property
    def capacity_bytes(self) -> int:
        """Bytes that checkpoints may use; 0 if `backup.mode` is off."""
        return self._backup.reserved_bytes

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

    def report(self, changes: UnreportedChanges) -> AgentReport:
        """Return the report to a watcher: the agent's whole state, and of the streams those in
        `changes`.
        """
        streams, denied = changes.take()
        return AgentReport(
            epoch=self.store.epoch,
            reserved_bytes=self.store.reserved_bytes,
            held_bytes=self.store.held_bytes,
            checkpoints=self.store.checkpoints,
            pages={stream: self.store.held(stream) for stream in streams},
            denied=denied,
            slots=self.slots.counts(),
            rows=RowsReport(
                tuple(self._regions.reports()),
                self.node.agent.row_port is not None,
                () if self._copied is None else self._copies.reports(self._copied.id),
                self._regions.refused_rows + self._copies.refused_rows,
            ),
        )

    def update_slots(self, update: SlotUpdate) -> SlotAnswer:
        return self.slots.apply(update, time.monotonic())

    def _copied_node(self, config: Config) -> NodeSettings | None:
        """Return the node whose rows this agent copies: the one before its own along the ring.
        None: it copies none.
        """
        if config.backup.mode not in (BackupMode.REMOTE, BackupMode.BOTH):
            return None
        cluster = config.cluster
        found = (each for each in cluster.nodes if cluster.row_holder(each.id) is self.node)
        return next(found, None)

    def _copier_of(self, source: NodeSettings, config: Config) -> RowCopier:
        assert source.agent.row_port is not None
        return RowCopier(
            self._copies,
            partial(dial_tcp, source.agent.host, source.agent.row_port),
            scoped_key(self._secret, Scope.ROWS, source.agent_id),
            config.transfer.link_bytes_per_s,
            self._rows.wait_idle,
        )

    async def start(self) -> None:
        """Start to serve pages and rows; the caller serves HTTP.

        Raises:
            OSError: the page port cannot be had.
            ConfigError: the row port, or the directory of its socket, cannot be had.
        """
        self._page_port = await self.page_server.start(
            self.node.agent.bound(self.node.agent.host), self.node.agent.page_port
        )
        if self._keeps:
            self.page_server.lend(self._directory.path)
        self._rows.listen(listen_unix(self._row_directory))
        settings = self.node.agent
        if settings.row_port is not None:
            bind = settings.bound(settings.host)
            with naming_port(f"agent of node {self.node.id}", "row_port", bind, settings.row_port):
                self._rows.listen(listen_tcp(bind, settings.row_port))
        self._summer.start()
        if self._copier is not None:
            self._copier.start()

    async def close(self) -> None:
        """Stop serving pages and rows, and end their connections."""
        self._summer.close()
        if self._copier is not None:
            self._copier.close()
        self._rows.close()
        await self.page_server.close()
        remove_unix(self._row_directory)

    async def settle_regions(self) -> None:
        """Adopt the row memory of engines that have died, and release what is no longer read, until
        cancelled.
        """
        while True:
            await asyncio.sleep(_SETTLE_S)
            self._copies.settle(time.monotonic())
            if self._regions.are_held:
                await asyncio.to_thread(self._regions.settle, time.monotonic())

    async def expire_leases(self) -> None:
        """End reservations and slots that were not renewed, until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self.store.expire()
            self.fences.end(self.slots.expire(time.monotonic()))

    async def end_orphans(self) -> None:
        """Release memory that no instance uses, until cancelled."""
        while True:
            await asyncio.sleep(_ORPHANS_S)
            if self.anchors is not None:
                await asyncio.to_thread(self.anchors.end_orphans, self._orphan_s, time.monotonic())


def node_of(config: Config, node: NodeId) -> NodeSettings:
    """Return the node's section of the configuration. Raises ConfigError: there is no such node."""
    for settings in config.cluster.nodes:
        if settings.id == node:
            return settings
    allowed = ", ".join(settings.id for settings in config.cluster.nodes)
    raise ConfigError(f"node {node!r} is not in cluster.nodes; allowed: {allowed}")


def open_directory(config: Config, node: NodeId, secret: bytes) -> StoreDirectory:
    """Open the store's directory of this node. Raises ConfigError: there is no such node, or the
    directory cannot be used.
    """
    return StoreDirectory(
        store_directory(config.backup.directory, secret, node_of(config, node).id)
    )
