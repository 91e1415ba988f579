"""The agent as its node's member: it watches the instances beside it, over loopback, and says what it sees."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp
import msgspec

from kvrs.agent.gpu import GpuMonitor, open_sensor
from kvrs.agent.news import LOOK_S, NodeNews
from kvrs.agent.node import NodeAgent
from kvrs.config import Config, InstanceSettings, gossip_seeds
from kvrs.errors import GossipError
from kvrs.gossip.facts import HolderFact
from kvrs.gossip.membership import Membership
from kvrs.protocol.instance import InstanceInfo, LoadReport
from kvrs.protocol.secrets import http_token
from kvrs.transfer.http import naming_port

log = logging.getLogger(__name__)

_WATCH_S = 0.25
_PAUSE_S = 0.5
_TIMEOUT_S = 2.0  # Of small calls.
_MAX_LINE_BYTES = 1 << 20


class NodeGossip:
    """Runs from `start` to `close`."""

    def __init__(self, config: Config, agent: NodeAgent, ring: Sequence[bytes]) -> None:
        self._agent = agent
        self._config = config
        self._token = http_token(ring[0])
        self._news = NodeNews(instance.id for instance in agent.node.instances)
        self.membership = Membership(agent.node.id, config.gossip, ring)
        # The judgements are read at every look.
        self._monitor = GpuMonitor(open_sensor, lambda _: None, time.monotonic)
        self._full = False

    async def start(self) -> None:
        """Raises ConfigError: its port is in use."""
        settings, me = self._agent.node.agent, self.membership.id
        with naming_port(f"agent of node {me}", "gossip_port", settings.host, settings.gossip_port):
            await self.membership.start(settings.host, settings.gossip_port, gossip_seeds(self._config, me))

    async def run(self) -> None:
        """Watch and tell until cancelled; ends with an exception only for a bug of ours."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self._token}"}
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
            group = await stack.enter_async_context(asyncio.TaskGroup())
            for instance in self._agent.node.instances:
                group.create_task(self._watch(http, instance))
            group.create_task(self._monitor.run())
            group.create_task(self._tell())

    async def close(self) -> None:
        await self.membership.close()

    async def _tell(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Bring the node's record up to date."""
        agent, now_s = self._agent, time.monotonic()
        slots = {name: agent.slots.outlook(name, now_s) for name in agent.targets}
        holder = agent.node.agent_id, HolderFact(agent.capacity_bytes, agent.store.reserved_bytes)
        news = self._news.look(slots, holder, self._monitor.health, now_s)
        for kind, name in news.withdrawn:
            self.membership.withdraw(kind, name)
        for name, fact in news.written:
            try:
                self.membership.publish(name, fact)
            except GossipError as error:
                if not self._full:
                    log.warning("not published", extra={"about": name, "cause": str(error)})
                self._full = True

    async def _watch(self, http: aiohttp.ClientSession, instance: InstanceSettings) -> None:
        """One instance, whenever it can be reached."""
        while True:
            try:
                await self._hear(http, instance)
                cause = "its connection closed"
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, ValueError) as error:
                cause = f"connection lost: {error or type(error).__name__}"
            self._news.lost(instance.id, cause, time.monotonic())
            await asyncio.sleep(_PAUSE_S)

    async def _hear(self, http: aiohttp.ClientSession, instance: InstanceSettings) -> None:
        info: InstanceInfo | None = None
        async with http.get(f"{instance.url}/kvrs/v1/load?watch={_WATCH_S}", read_bufsize=_MAX_LINE_BYTES) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                report = msgspec.json.decode(line, type=LoadReport)
                if info is None or report.epoch != info.epoch:
                    info = await self._ask(http, instance)
                    self._news.met(instance.id, info, time.monotonic())
                self._news.reported(instance.id, report, time.monotonic())

    async def _ask(self, http: aiohttp.ClientSession, instance: InstanceSettings) -> InstanceInfo:
        async with asyncio.timeout(_TIMEOUT_S), http.get(f"{instance.url}/kvrs/v1/instance") as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=InstanceInfo)
