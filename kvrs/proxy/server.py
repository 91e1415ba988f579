"""One proxy: both ports, the watchers, the leases, and their common end."""

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvrs.config import Config, gossip_seeds
from kvrs.errors import ConfigError
from kvrs.gossip.membership import Membership
from kvrs.ids import InstanceId, NodeId
from kvrs.policy.event_log import header_line
from kvrs.protocol.mirror import Hello
from kvrs.protocol.secrets import http_token
from kvrs.proxy.admin import Admin
from kvrs.proxy.agents import Agents
from kvrs.proxy.app import Api
from kvrs.proxy.backends.agent import AgentBackend
from kvrs.proxy.backends.cluster import new_engine_session, open_backends
from kvrs.proxy.backends.peer import new_session
from kvrs.proxy.driver import Driver
from kvrs.proxy.event_log import EventLog
from kvrs.proxy.gpus import Gpus
from kvrs.proxy.hearsay import Hearsay
from kvrs.proxy.instances import Instances
from kvrs.proxy.metrics import Metrics
from kvrs.proxy.mirror.face import make_app
from kvrs.proxy.mirror.mirroring import Mirror
from kvrs.proxy.mirror.peers import ProxyPeer
from kvrs.proxy.watcher import AgentWatcher, InstanceWatcher, Watcher
from kvrs.transfer.http import naming_port

log = logging.getLogger(__name__)


class _BrokenHttp(logging.Filter):
    """One line for a request that is no HTTP, without its bytes, which aiohttp quotes: they may be of a prompt or a key."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "broken HTTP: %s", (type(error).__name__,)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_BrokenHttp())

_BACKLOG = 1024
_LOOK_AGAIN_S = 0.02
_LAST_WORDS_S = 2.0  # For clients to read how their streams ended when the proxy stops.


class Proxy:
    """Start and close it on one event loop. `port` and `admin_port` are the bound ones."""

    def __init__(self, config: Config, secret: bytes, older: Sequence[bytes] = ()) -> None:
        """`older`: secrets that are accepted beside the one in use."""
        self._config = config
        self._ring = [secret, *older]
        self._membership: Membership | None = None
        self._token = http_token(secret)
        self._mirror: Mirror | None = None
        self._api: Api | None = None
        self._sessions: list[aiohttp.ClientSession] = []
        self._driver: Driver | None = None
        self._event_log: EventLog | None = None
        self._runners: list[web.AppRunner] = []
        self._sites: list[web.TCPSite] = []
        self._background: list[asyncio.Task[None]] = []
        self.port = 0
        self.admin_port = 0

    async def start(self) -> None:
        """Bind both ports, then look for the instances.

        Raises:
            ConfigError: a port cannot be bound, or the configuration names an instance without a port or an unknown profile.
        """
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        config, clock = self._config, time.monotonic
        _check_addresses(config)
        metrics = Metrics()
        self._sessions.append(to_engines := new_engine_session(config, self._token))
        backends = open_backends(config, to_engines)
        instances, agents = Instances(config, backends), Agents(self._agent_backends())
        self._event_log = self._open_event_log()
        self._driver = driver = Driver(config, instances, agents, metrics, clock, time.time, self._event_log)
        self._mirror = mirror = Mirror(
            config.proxy,
            driver.run_id,
            self._peers(Hello(config.proxy.id, driver.run_id)),
            clock,
            texts=driver.texts,
            kept=driver.policy.kept,
            stop=driver.end_early,
            count=lambda outcome: metrics.resumes.labels(outcome).inc(),
        )
        self._api = api = Api(config.proxy, driver, mirror, metrics, clock)
        hearsay = Hearsay(driver.links, Gpus(instances.known, driver.gpu_judged), driver.tell, clock)
        admin = Admin(driver, metrics, hearsay, self._describe, clock)
        if config.proxy.peer_port:
            face = make_app(mirror, self._ring)
            await self._listen(face, "proxy.peer_port", config.proxy.peer_port)
        await mirror.peers.meet()
        self.port = await self._listen(api.application(), "proxy.port", config.proxy.port)
        self.admin_port = await self._listen(admin.application(), "proxy.admin_port", config.proxy.admin_port)
        loop = asyncio.get_running_loop()
        watchers: list[Watcher] = [InstanceWatcher(known, driver, config.proxy, hearsay) for known in instances.known.values()]
        watchers += [AgentWatcher(known, driver.checkpoints, config.proxy, hearsay) for known in agents.known.values()]
        work = [
            *(watcher.run() for watcher in watchers),
            driver.leases.run(),
            driver.checkpoints.leases.run(),
            driver.slots.run(),
            mirror.run(),
        ]
        if config.gossip.enabled:
            hearsay.join(await self._join(hearsay), watchers)
            work.append(hearsay.run())
        if self._event_log is not None:
            work.append(self._event_log.run())
        self._background = [loop.create_task(each) for each in work]

    async def _join(self, hearsay: Hearsay) -> Membership:
        config, host, port = self._config, self._config.proxy.host, self._config.proxy.gossip_port
        self._membership = membership = Membership(NodeId(config.proxy.id), config.gossip, self._ring, hearsay.heard)
        with naming_port("proxy", "gossip_port", host, port):
            await membership.start(host, port, gossip_seeds(config, membership.id))
        return membership

    def _peers(self, me: Hello) -> dict[str, ProxyPeer]:
        self._sessions.append(to_peers := new_session(self._token))
        peers = self._config.proxy.peers
        return {peer.id: ProxyPeer(to_peers, me, peer.id, f"http://{peer.host}:{peer.peer_port}") for peer in peers}

    def _agent_backends(self) -> dict[InstanceId, tuple[NodeId, AgentBackend]]:
        if not self._config.agents_run:
            return {}
        self._sessions.append(to_agents := new_session(self._token))
        nodes = self._config.cluster.nodes
        return {node.agent_id: (node.id, AgentBackend(to_agents, node.agent.url)) for node in nodes}

    def _open_event_log(self) -> EventLog | None:
        config = self._config
        if config.proxy.event_log is None:
            return None

        def header(part: int) -> str:
            return header_line(config.policy, config.slo, config.backup, part)

        opened = EventLog(Path(config.proxy.event_log), config.proxy.event_log_bytes, header)
        opened.open()
        return opened

    async def run(self) -> None:
        """Serve until cancelled; ends with an exception only for a bug of ours."""
        await asyncio.gather(*self._background)

    async def drain(self) -> None:
        """Take no new streams, hand over those that have a key, if anybody is there for them, and give the rest time to end."""
        if self._api is None or self._mirror is None or self._driver is None:
            return
        self._api.draining = True
        if self._mirror.peers.live:
            self._mirror.hand_over()
        until_s = time.monotonic() + self._config.proxy.drain_s
        while self._driver.streams and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_AGAIN_S)
        # What only we have goes with us.
        until_s = time.monotonic() + _LAST_WORDS_S
        while self._mirror.peers.live and self._mirror.uncopied and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def close(self) -> None:
        """Tell every stream that it is over, then leave nothing behind."""
        for site in self._sites:
            await site.stop()
        if self._driver is not None:
            await self._driver.close()
        for runner in self._runners:
            await runner.cleanup()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._membership is not None:
            await self._membership.close()
        if self._event_log is not None:
            await self._event_log.close()
        for session in self._sessions:
            await session.close()
        self._membership = None
        self._sites, self._runners, self._background, self._sessions = [], [], [], []

    def _describe(self) -> dict[str, Any]:
        assert self._mirror is not None
        url = f"http://{self._config.proxy.host}:{self.port}"
        who = {"id": self._config.proxy.id, "node": socket.gethostname(), "url": url, "pid": os.getpid()}
        return who | self._mirror.describe()

    async def _listen(self, app: web.Application, key: str, port: int) -> int:
        host = self._config.proxy.host
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_log,
            auto_decompress=False,
            handler_cancellation=True,
            keepalive_timeout=20.0,
            lingering_time=2.0,
            max_headers=64,
            shutdown_timeout=_LAST_WORDS_S,
        )
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, host, port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            reason = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
            raise ConfigError([f"{key}: port {host}:{port} {reason}; allowed: a free port, or 0 for any"]) from None
        self._sites.append(site)
        bound: int = runner.addresses[-1][1]
        return bound


def _check_addresses(config: Config) -> None:
    missing = [f"instance {instance.id!r}" for _, instance in config.cluster.instances() if instance.port == 0]
    if config.agents_run:
        missing += [f"the agent of node {node.id!r}" for node in config.cluster.nodes if node.agent.port == 0]
    if config.gossip.enabled:
        missing += [f"the gossip of node {node.id!r}" for node in config.cluster.nodes if node.agent.gossip_port == 0]
    if missing:
        raise ConfigError([f"cluster.nodes: {name} has no port; allowed: the port it listens on" for name in missing])


async def serve(config: Config, secret: bytes, older: Sequence[bytes] = ()) -> None:
    """Run a proxy until the process is told to end."""
    stop, at_once = asyncio.Event(), asyncio.Event()

    def told() -> None:
        # The second time it is meant more seriously.
        (at_once if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told)
    proxy = Proxy(config, secret, older)
    await proxy.start()
    log.info("proxy ready", extra={"port": proxy.port, "admin_port": proxy.admin_port})
    running, stopping = asyncio.ensure_future(proxy.run()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        draining, hurried = asyncio.ensure_future(proxy.drain()), asyncio.ensure_future(at_once.wait())
        done, _ = await asyncio.wait({draining, hurried, running}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurried):
            task.cancel()
        for ended in done - {hurried}:
            await ended  # A bug of ours is not to end like an order.
    finally:
        running.cancel()
        stopping.cancel()
        await proxy.close()
