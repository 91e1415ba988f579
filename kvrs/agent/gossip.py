"""Gossip of an agent. It watches its node's instances over loopback, and publishes their deaths,
links, and the health of GPUs.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

import aiohttp
import msgspec

from kvrs.agent.gpu import GpuMonitor, open_sensor
from kvrs.agent.node import NodeAgent
from kvrs.agent.record_publisher import POLL_INTERVAL_S, RecordPublisher
from kvrs.config.across_sections import gossip_seeds
from kvrs.config.cluster import InstanceSettings
from kvrs.config.file import Config
from kvrs.errors import GossipError
from kvrs.gossip.facts import HolderFact
from kvrs.gossip.membership import Membership
from kvrs.ids import InstanceId
from kvrs.net.http import naming_port
from kvrs.protocol.instance import LoadReport

log = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 0.25
_RECONNECT_S = 0.5
_MAX_LINE_BYTES = 1 << 20


class NodeGossip:
    """An agent's member of the gossip, from `start` to `close`."""

    def __init__(self, config: Config, agent: NodeAgent, ring: Sequence[bytes]) -> None:
        self._agent = agent
        self._config = config
        self._publisher = RecordPublisher()
        self._instances: dict[InstanceId, InstanceSettings] = {}
        self._group: asyncio.TaskGroup | None = None
        self._http: aiohttp.ClientSession | None = None
        self.membership = Membership(agent.node.id, config.gossip.probe_interval_s, ring)
        # Changes need no callback: the health of GPUs is read at every publication.
        self._monitor = GpuMonitor(open_sensor, lambda _: None, time.monotonic)
        self._failed = False

    async def start(self) -> None:
        """Join the gossip. Raises ConfigError: the port is in use."""
        settings, me = self._agent.node.agent, self.membership.id
        host, port = settings.host, settings.gossip_port
        bind, config = settings.bound(host), self._config
        with naming_port(f"agent of node {me}", "gossip_port", bind, port):
            seeds = gossip_seeds(config.cluster, config.proxy, me)
            await self.membership.start(host, port, seeds, bind)

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Watch instances and GPUs, and publish their facts, until cancelled; an exception is a
        bug.
        """
        self._http = http
        async with asyncio.TaskGroup() as self._group:
            self.learn()
            self._group.create_task(self._monitor.run())
            self._group.create_task(self._publish())

    def learn(self) -> None:
        """Watch the node's new instances, and follow instances with a new address to it."""
        self._instances.update({each.id: each for each in self._agent.node.instances})
        if self._group is None or self._http is None:
            return
        if self._config.cluster.backend.is_stock:
            # These instances do not speak the instance protocol; proxies watch their load and end.
            return
        for instance in self._agent.node.instances:
            if self._publisher.add(instance.id, instance.role):
                self._group.create_task(self._watch(self._http, instance.id))

    async def close(self) -> None:
        await self.membership.close()

    async def _publish(self) -> None:
        while True:
            self.publish()
            await asyncio.sleep(POLL_INTERVAL_S)

    def publish(self) -> None:
        """Write the facts that have changed into the node's record."""
        agent, now_s = self._agent, time.monotonic()
        slots = {name: agent.slots.availability(name, now_s) for name in agent.targets}
        holder = agent.node.agent_id, HolderFact(agent.capacity_bytes, agent.store.reserved_bytes)
        changes = self._publisher.changes(slots, holder, self._monitor.health, now_s)
        for kind, name in changes.withdrawn:
            self.membership.withdraw(kind, name)
        for name, fact in changes.written:
            try:
                self.membership.publish(name, fact)
            except GossipError as error:
                if not self._failed:
                    log.warning("fact not published", extra={"fact": name, "cause": str(error)})
                self._failed = True

    async def _watch(self, http: aiohttp.ClientSession, instance: InstanceId) -> None:
        """Follow the reports of one instance, and reconnect whenever the connection ends."""
        while True:
            try:
                await self._read_reports(http, self._instances[instance])
                cause = "its connection closed"
            except (
                aiohttp.ClientError,
                OSError,
                TimeoutError,
                msgspec.DecodeError,
                ValueError,
            ) as error:
                cause = f"connection lost: {error or type(error).__name__}"
            self._publisher.on_lost(instance, cause, time.monotonic())
            await asyncio.sleep(_RECONNECT_S)

    async def _read_reports(self, http: aiohttp.ClientSession, instance: InstanceSettings) -> None:
        async with http.get(
            f"{self._config.url_of(instance)}/kvrs/v1/load?watch={_REPORT_INTERVAL_S}",
            read_bufsize=_MAX_LINE_BYTES,
        ) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                report = msgspec.json.decode(line, type=LoadReport)
                self._publisher.on_report(instance.id, report, time.monotonic())
