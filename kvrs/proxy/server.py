"""One proxy: its ports, watchers and leases, from start to shutdown."""

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kvrs import __version__
from kvrs.config.addresses import gossip_seeds
from kvrs.config.cluster import NodeSettings
from kvrs.config.exposure import faults_of_proxy
from kvrs.config.file import Config
from kvrs.config.proxy import PeerSettings, are_workers_of_one
from kvrs.config.settings import HOST_OF_PORT
from kvrs.core.books.agent_slots import slot_share
from kvrs.core.event_log import header_line
from kvrs.direct import DirectServer
from kvrs.errors import ConfigError
from kvrs.garbage import keep_what_is_there
from kvrs.gossip.membership import Membership
from kvrs.http import HttpPort, naming_port
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.secrets import Scope, ScopedKey, scoped_key, scoped_keys
from kvrs.proving import Address, address_of, agent_keys
from kvrs.proxy.api.admin import Admin, AdminSource
from kvrs.proxy.api.app import ClientApi
from kvrs.proxy.api.observing import RequestObserver, open_tracer
from kvrs.proxy.api.tenants import Tenants
from kvrs.proxy.backends.agent import AgentBackend
from kvrs.proxy.backends.cluster import new_engine_links, open_backends
from kvrs.proxy.fleet.following import FleetFollower
from kvrs.proxy.fleet.orders import StandingOrders
from kvrs.proxy.fleet.services import ServiceNames
from kvrs.proxy.fleet.supervision import TaskKind, keep_running, observe_lag
from kvrs.proxy.mirror.peers import ProxyPeer
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.mirror.routes import make_app
from kvrs.proxy.process.running import Stop, run_service
from kvrs.proxy.process.workers import Supervisor
from kvrs.proxy.reload import Apply, ReloadingPart, ReloadResult, Reloads
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.event_log import EventLog
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.watch.fleet import Fleet, FleetLinks
from kvrs.proxy.watch.gossip_view import GossipView
from kvrs.proxy.watch.self_test import SelfTester
from kvrs.proxy.wire.capacity import capacity_of
from kvrs.proxy.wire.certificates import TlsOfPorts
from kvrs.proxy.wire.peer import new_session
from kvrs.proxy.wire.pool import Access, EngineLinks

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.02
_SEEN_WITHIN_S = 2.0  # A worker takes requests after that, also if no instance is up.
_FLUSH_TIMEOUT_S = 2.0  # For clients to read how their streams ended when the proxy stops.


class Proxy:
    """Start and close it on one event loop. `port` and `admin_port` are the bound ones."""

    def __init__(
        self,
        config: Config,
        secret: bytes,
        older: Sequence[bytes] = (),
        read: Callable[[], Config] | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`older`: secrets that are accepted besides the one in use; `read` reads the file of the
        configuration again; `supervisor`: of this worker, one of several at the clients' port.
        """
        self._config = config
        self._supervisor = supervisor
        self.reloads = Reloads(config, read or (lambda: config))
        self.reloads.add(ReloadingPart("policy", self._prepare_policy, ("policy", "slo")))
        self.reloads.add(ReloadingPart("peers", self._prepare_peers, ("proxy.peers",)))
        self._ring = [secret, *older]
        self._membership: Membership | None = None
        self._mirror: Mirror | None = None
        self.tenants: Tenants | None = None
        self._api: ClientApi | None = None
        self._observer: RequestObserver | None = None
        self._sessions: list[aiohttp.ClientSession | EngineLinks] = []
        self._driver: Driver | None = None
        self._to_agents: aiohttp.ClientSession | None = None
        self._agent_keys: dict[Address, ScopedKey] = {}
        self._to_peers: EngineLinks | None = None
        self._event_log: EventLog | None = None
        self._ports: list[HttpPort] = []
        self._background: list[asyncio.Task[None]] = []
        self._tls = TlsOfPorts()
        self.port = 0
        self.admin_port = 0

    async def start(self) -> None:
        """Bind the ports, then watch the instances.

        Raises:
            ConfigError: a port cannot be bound, the configuration names an instance without a port
                or an unknown profile, or the model's tokenizer cannot be read.
        """
        _check_addresses(self._config)
        self._capacity = capacity_of(self._config)
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        config, clock = self._config, time.monotonic
        tls = self._load_tls()
        metrics = _metrics_of(config)
        self._observer = self._open_observer(metrics)
        self._sessions.append(links := new_engine_links(config, self._ring[0], tls.inner))
        backends, agent_backends = open_backends(config, links), self._agent_backends()
        self._event_log = event_log = self._make_event_log()
        self._driver = driver = Driver(
            config, backends, agent_backends, metrics, clock, time.time, event_log
        )
        await driver.tokenizer.check()
        control = driver.control
        follower = FleetFollower(self.reloads)
        self._mirror = mirror = Mirror(
            config.proxy,
            driver.run_id,
            self._new_peers(config.proxy.every_peer()),
            clock,
            texts=driver.tokenizer,
            kept=control.policy.kept,
            stop=driver.end_early,
            count=lambda outcome: metrics.resumes.labels(outcome).inc(),
            orders=StandingOrders(control.orders, self.reloads.orders, clock, follower.heard),
        )
        tenants, settings = self._open_tenants(), self._capacity.settings
        self._api = api = ClientApi(
            settings, config.cluster.backend, driver, mirror, metrics, clock, tenants, links.large
        )
        gossip_view = GossipView(control.link_measured, control.gpus_seen, clock)
        reached = FleetLinks(self._ring[0], links, backends, self._new_agent, agent_backends)
        fleet = Fleet(config, driver, reached, metrics, gossip_view)
        self.reloads.add(fleet.part)
        shown = AdminSource(
            driver, metrics, gossip_view, self._describe, self.reloads, mirror.peers.news.tell
        )
        if config.proxy.peer_port:
            keys = scoped_keys(self._ring, config.proxy.id, Scope.PROXY)
            await self._listen(make_app(mirror), "peer_port", keys)
        await (services := ServiceNames(self.reloads)).look_up()
        await mirror.peers.meet()
        await follower.follow()
        await self._open_ports(api, shown)
        if config.gossip.enabled:
            gossip_view.membership = await self._join(gossip_view)
        # When all ports are bound: a second proxy started by mistake fails before it.
        if event_log is not None:
            event_log.open()
        keep = partial(keep_running, failed=metrics.task_failed)
        work = [
            *(certificates.run() for certificates in tls.all),
            fleet.run(),
            keep(TaskKind.LEASES, driver.leases.run),
            keep(TaskKind.CHECKPOINT_LEASES, driver.checkpoint_leases.run),
            keep(TaskKind.SLOTS, driver.slots.run),
            keep(TaskKind.SELF_TESTS, SelfTester(driver, clock).run),
            keep(TaskKind.KEYS, tenants.run),
            keep(TaskKind.FLEET, follower.run),
            keep(TaskKind.FLEET, services.run),
            observe_lag(metrics.loop_lag.observe),
            mirror.run(),
            *([gossip_view.run()] if config.gossip.enabled else []),
            *([event_log.run()] if event_log is not None else []),
        ]
        self._background = [asyncio.create_task(each) for each in work]
        if self._supervisor is not None:
            await self._join_workers(api, driver)

    async def _open_ports(self, api: ClientApi, source: AdminSource) -> None:
        if self._supervisor is None:
            await self._listen_to_clients(api)
        reloaded = None if self._supervisor is None else self._supervisor.reload_all
        admin = Admin(source, self.reloads, self._config.security, reloaded)
        self.admin_port = await self._listen(admin.application(), "admin_port")

    async def _join_workers(self, api: ClientApi, driver: Driver) -> None:
        """Take requests once an instance is seen up: until then the other workers take them."""
        until_s = time.monotonic() + _SEEN_WITHIN_S
        while not driver.control.instances.ready() and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_AGAIN_S)
        await self._listen_to_clients(api)

    async def _listen_to_clients(self, api: ClientApi) -> None:
        assert self._observer is not None
        app, direct = self._observer.watch(api.application(), api.direct())
        self.port = await self._listen(app, "port", direct=direct)

    def _open_tenants(self) -> Tenants:
        self.tenants = Tenants(self._config, self._ring, time.monotonic)
        self.reloads.add(ReloadingPart("keys", self.tenants.prepare))
        return self.tenants

    def _open_observer(self, metrics: Metrics) -> RequestObserver:
        """Raises ConfigError: what the environment asks for traces cannot be done."""
        config = self._config
        metrics.orders_aside.set_function(lambda: len(self.reloads.orders.aside))
        return RequestObserver(
            metrics.registry,
            time.monotonic,
            logs_access=config.logs.access,
            tracer=open_tracer(config.proxy.id, config.cluster.backend, os.environ),
        )

    def _load_tls(self) -> TlsOfPorts:
        self._tls = tls = TlsOfPorts.load(self._config)
        self.reloads.add(ReloadingPart("certificates", tls.prepare))
        return tls

    async def _join(self, gossip_view: GossipView) -> Membership:
        config = self._config
        host, port = config.proxy.gossip_host, config.proxy.gossip_port
        self._membership = membership = Membership(
            NodeId(config.proxy.id), config.gossip, self._ring, gossip_view.heard
        )
        bind = config.proxy.gossip_bind or host
        with naming_port("proxy", "gossip_port", bind, port):
            seeds = gossip_seeds(config.cluster, config.proxy, membership.id)
            await membership.start(host, port, seeds, bind)
        return membership

    def _new_peers(self, peers: Iterable[PeerSettings]) -> dict[str, ProxyPeer]:
        me, secret = self._config.proxy.id, self._ring[0]
        if self._to_peers is None:
            self._to_peers = EngineLinks(Access({}, self._tls.inner))
            self._sessions.append(self._to_peers)
        urls = {peer.id: self._config.inner_url(peer.host, peer.peer_port) for peer in peers}
        self._to_peers.admit(
            {address_of(url): scoped_key(secret, Scope.PROXY, name) for name, url in urls.items()}
        )
        return {name: ProxyPeer(self._to_peers, me, name, url) for name, url in urls.items()}

    def _prepare_peers(self, config: Config) -> Apply | None:
        """Raises ConfigError: a peer is at another address under the same id."""
        before = {peer.id: peer for peer in self.reloads.config.proxy.every_peer()}
        after = {peer.id: peer for peer in config.proxy.every_peer()}
        if before == after:
            return None
        if moved := [name for name in before.keys() & after if before[name] != after[name]]:
            raise ConfigError(
                [
                    f"proxy.peers: {name!r} has another address; allowed: as it was, or another id"
                    for name in sorted(moved)
                ]
            )

        def apply() -> None:
            assert self._mirror is not None
            assert self._driver is not None
            for name in before.keys() - after.keys():
                self._mirror.peers.remove(name)
            added = [after[name] for name in after.keys() - before.keys()]
            for peer in self._new_peers(added).values():
                self._mirror.peers.add(peer)
            self._driver.control.slots.reload(slot_share(config))

        return apply

    def _agent_backends(self) -> dict[InstanceId, AgentBackend]:
        if not self._config.agents_run:
            return {}
        self._to_agents = new_session(self._agent_keys, self._tls.inner)
        self._sessions.append(self._to_agents)
        return {node.agent_id: self._new_agent(node) for node in self._config.cluster.nodes}

    def _new_agent(self, node: NodeSettings) -> AgentBackend:
        assert self._to_agents is not None
        self._agent_keys.update(agent_keys(self._ring[0], [node]))
        return AgentBackend(self._to_agents, self._config.url_of(node.agent))

    def _make_event_log(self) -> EventLog | None:
        settings = self._config.proxy
        if settings.event_log is None:
            return None

        def header(part: int) -> str:
            config = self.reloads.config
            return header_line(config.policy, config.slo, config.backup, part)

        return EventLog(Path(settings.event_log), settings.event_log_bytes, header, time.time)

    def _prepare_policy(self, config: Config) -> Apply | None:
        used = self.reloads.config
        if (config.policy, config.slo) == (used.policy, used.slo):
            return None

        def apply() -> None:
            assert self._driver is not None
            self._driver.control.reload(used, config, self._driver.clock())

        return apply

    async def reload(self) -> ReloadResult:
        """Raises ConfigError: the file has faults; nothing has changed."""
        return await self.reloads.reload()

    async def run(self) -> None:
        """Serve until cancelled; an exception is an internal error."""
        await asyncio.gather(*self._background)

    async def leave(self) -> None:
        if (delay_s := self._config.proxy.drain_delay_s) and self._api is not None:
            self._api.leaving = True
            await asyncio.sleep(delay_s)

    async def drain(self) -> None:
        """Admit no new streams, hand over those with a key if a peer is up, and wait for the rest
        to end.
        """
        if self._api is None or self._mirror is None or self._driver is None:
            return
        if self._supervisor is not None:
            await self._stop_taking_clients()  # Other workers, if they go on, take them.
        self._api.admissions.draining = True
        log.info("draining", extra={"streams": len(self._driver.streams)})
        if self._remaining_peers():
            self._mirror.hand_over()
        until_s = time.monotonic() + self._config.proxy.drain_s
        while self._driver.streams and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_AGAIN_S)
        # Records that no peer has would be lost with this process.
        until_s = time.monotonic() + _FLUSH_TIMEOUT_S
        while self._remaining_peers() and self._mirror.uncopied and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _remaining_peers(self) -> Set[str]:
        """Proxies that go on when this one has drained: workers of one proxy drain together."""
        assert self._mirror is not None
        live, me = self._mirror.peers.live_ids, self._config.proxy.id
        return {peer for peer in live if not are_workers_of_one(peer, me)}

    async def _stop_taking_clients(self) -> None:
        for port in self._ports:
            if port.port == self.port:
                await port.stop_listening()

    async def close(self) -> None:
        """End every stream with an error, then release all resources."""
        for port in self._ports:
            await port.stop_listening()
        if self._driver is not None:
            await self._driver.close()
        for port in self._ports:
            await port.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._membership is not None:
            await self._membership.close()
        if self._event_log is not None:
            await self._event_log.close()
        for session in self._sessions:
            await session.close()
        if self._observer is not None:
            await self._observer.close()
        self._membership = None
        self._ports, self._background, self._sessions = [], [], []

    def _describe(self) -> dict[str, Any]:
        assert self._mirror is not None
        assert self.tenants is not None
        scheme = "http" if self._tls.port is None else "https"
        url = f"{scheme}://{self._config.proxy.host}:{self.port}"
        identity = {
            "id": self._config.proxy.id,
            "node": socket.gethostname(),
            "url": url,
            "pid": os.getpid(),
            "version": __version__,
        }
        tenants = {"tenants": self.tenants.describe()}
        return identity | self.reloads.describe() | self._mirror.describe() | tenants

    async def _listen(
        self,
        app: web.Application,
        key: str,
        keys: Sequence[ScopedKey] = (),
        direct: DirectServer | None = None,
    ) -> int:
        host = getattr(self._config.proxy, HOST_OF_PORT[key])
        port = getattr(self._config.proxy, key)
        is_for_clients = key == "port"
        limits = self._capacity.clients if is_for_clients else self._capacity.others
        names = None if is_for_clients else {host, *self._config.security.hosts}
        listening = HttpPort(
            app,
            limits,
            shutdown_timeout_s=_FLUSH_TIMEOUT_S,
            names=names,
            keys=keys,
            tls=getattr(self._tls, key),
            direct=direct,
        )
        self._ports.append(listening)
        try:
            return await listening.open(host, port, shared=self._supervisor is not None)
        except OSError as error:
            reason = (
                "is already in use"
                if error.errno == errno.EADDRINUSE
                else f"cannot be bound: {error.strerror}"
            )
            raise ConfigError(
                [f"proxy.{key}: port {host}:{port} {reason}; allowed: a free port, or 0 for any"]
            ) from None


def _metrics_of(config: Config) -> Metrics:
    instances = (instance for _, instance in config.cluster.instances())
    agents = (node.agent_id for node in config.cluster.nodes) if config.agents_run else ()
    return Metrics({instance.id: instance.role for instance in instances}, agents)


def _check_addresses(config: Config) -> None:
    if faults := [*faults_of_proxy(config, os.environ)]:
        raise ConfigError(faults)
    missing = [
        f"instance {instance.id!r}"
        for _, instance in config.cluster.instances()
        if instance.port == 0
    ]
    if config.agents_run:
        missing += [
            f"the agent of node {node.id!r}"
            for node in config.cluster.nodes
            if node.agent.port == 0
        ]
    if config.gossip.enabled:
        missing += [
            f"the gossip of node {node.id!r}"
            for node in config.cluster.nodes
            if node.agent.gossip_port == 0
        ]
    if missing:
        raise ConfigError(
            [
                f"cluster.nodes: {name} has no port; allowed: the port it listens on"
                for name in missing
            ]
        )


async def serve(
    config: Config,
    secret: bytes,
    older: Sequence[bytes] = (),
    read: Callable[[], Config] | None = None,
    watched: Path | None = None,
    supervisor: Supervisor | None = None,
) -> None:
    """Run a proxy until SIGINT or SIGTERM, which a second one hastens; SIGHUP, or a change of the
    `watched` file, has it `read` its configuration again. A worker ends with its `supervisor` too.
    """
    proxy = Proxy(config, secret, older, read, supervisor)
    stop = Stop(config.proxy.drain_delay_s)

    def ready() -> None:
        keep_what_is_there()
        log.info("proxy ready", extra={"port": proxy.port, "admin_port": proxy.admin_port})

    if supervisor is not None:
        supervisor.end_with_it()
    await run_service(proxy, ready, stop, watched)
