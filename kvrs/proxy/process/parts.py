"""Assembly of a proxy from its parts; it binds no port, sends nothing and begins no task."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvrs.config.cluster import NodeSettings
from kvrs.config.file import Config
from kvrs.config.proxy import PeerSettings
from kvrs.core.configured import Configured
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.net.proving import address_of, agent_keys
from kvrs.net.routes import Routes
from kvrs.net.tls import Certificates, load_certificates
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.proxy.api.client_port import MESSAGES, ClientPort, RequestObserver, open_tracer
from kvrs.proxy.api.health import add_health, add_models
from kvrs.proxy.api.passed import Passed
from kvrs.proxy.api.picked import EndpointPicker
from kvrs.proxy.api.tenants import Tenants
from kvrs.proxy.backends.cluster import new_engine_links, open_backends
from kvrs.proxy.backends.model_files import ModelFiles
from kvrs.proxy.fleet.discovery import ServiceNames
from kvrs.proxy.mirror.peers import ProxyPeer
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.reload import Apply, ReloadingPart, Reloads
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.watch.fleet import Fleet, FleetLinks
from kvrs.proxy.watch.gossip_view import GossipView
from kvrs.proxy.wire.capacity import Capacity
from kvrs.proxy.wire.peer import AgentBackend
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS, read
from kvrs.proxy.wire.upstream import Access, EngineLinks

if TYPE_CHECKING:
    from kvrs.proxy.api.messages import MessagesApi
    from kvrs.proxy.api.responses import ResponsesApi
    from kvrs.proxy.streams.event_log import EventLog


class TlsOfPorts(msgspec.Struct, frozen=True):
    """Certificates by the configuration key of the port; None: plain HTTP."""

    port: Certificates | None = None
    admin_port: Certificates | None = None
    peer_port: Certificates | None = None

    @classmethod
    def load(cls, config: Config) -> "TlsOfPorts":
        """Load the certificates of all ports. Raises ConfigError: a file cannot be used."""
        return cls(
            load_certificates("proxy.tls", config.proxy.tls),
            load_certificates("proxy.admin_tls", config.proxy.admin_tls),
            load_certificates("security.tls", config.security.tls),
        )

    @property
    def inner(self) -> Certificates | None:
        """Certificates of connections to instances, agents and other proxies."""
        return self.peer_port

    @property
    def all(self) -> Iterator[Certificates]:
        return (each for each in (self.port, self.admin_port, self.peer_port) if each is not None)

    def prepare(self, _: Config) -> Callable[[], None] | None:
        """Load changed files, and return a function that puts them in use. None: no file has
        changed.

        Raises:
            ConfigError: with the faults of all files; nothing changes.
        """
        faults: list[str] = []
        changes: list[Callable[[], None]] = []
        for certificates in self.all:
            try:
                if (apply := certificates.prepare()) is not None:
                    changes.append(apply)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults)

        def apply_all() -> None:
            for apply in changes:
                apply()

        return apply_all if changes else None


class ProxyLinks:
    """Connections of a proxy to instances, agents and other proxies."""

    def __init__(self, config: Config, secret: bytes, tls: TlsOfPorts) -> None:
        self._config = config
        self._secret = secret
        self.engines = new_engine_links(config, secret, tls.inner)
        # Connections to agents and other proxies, without access to engines.
        self._beside = EngineLinks(Access({}, tls.inner))

    @property
    def all(self) -> list[EngineLinks]:
        return [self.engines, self._beside]

    def close(self) -> None:
        for each in self.all:
            each.close()

    def new_agent(self, node: NodeSettings) -> AgentBackend:
        self._beside.admit(agent_keys(self._secret, [node]))
        return AgentBackend(self._beside.pool(self._config.url_of(node.agent)))

    def new_agents(self) -> dict[InstanceId, AgentBackend]:
        nodes = self._config.cluster.nodes if self._config.agents_run else []
        return {node.agent_id: self.new_agent(node) for node in nodes}

    def new_peers(self, peers: Iterable[PeerSettings]) -> dict[str, ProxyPeer]:
        me = self._config.proxy.id
        urls = {peer.id: self._config.inner_url(peer.host, peer.peer_port) for peer in peers}
        self._beside.admit(
            {
                address_of(url): scoped_key(self._secret, Scope.PROXY, name)
                for name, url in urls.items()
            }
        )
        return {name: ProxyPeer(self._beside, me, name, url) for name, url in urls.items()}


class Parts(msgspec.Struct, frozen=True):
    """All parts of a proxy except its ports."""

    metrics: Metrics
    observer: RequestObserver
    event_log: "EventLog | None"
    driver: Driver
    mirror: Mirror
    tenants: Tenants
    api: ClientPort
    other_apis: "OtherApis"
    gossip_view: GossipView
    fleet: Fleet
    services: ServiceNames


def build(
    config: Config,
    capacity: Capacity,
    ring: Sequence[bytes],
    tls: TlsOfPorts,
    links: ProxyLinks,
    reloads: Reloads,
) -> Parts:
    """Assemble a proxy, and register each part that follows the configuration in `reloads`. `ring`:
    the cluster's secrets, the current one first.

    Raises:
        ConfigError: the configuration names an unknown profile or an unreadable file.
    """
    clock = time.monotonic
    metrics = metrics_of(config)
    files = ModelFiles(config.cluster.model)
    backends = open_backends(config, links.engines, ring[0], files)
    agents = links.new_agents()
    event_log = new_event_log(config, reloads)
    driver = Driver(config, backends, agents, metrics, clock, time.time, event_log, files)
    peers = links.new_peers(config.proxy.every_peer())
    mirror = Mirror(config.proxy, driver, metrics, peers)
    tenants, settings, large = Tenants(config, ring, clock), capacity.settings, links.engines.large
    api = ClientPort(settings, driver, mirror, metrics, tenants, large)
    gossip_view = GossipView(driver.control, clock)
    reached = FleetLinks(ring[0], links.engines, backends, links.new_agent, agents)
    fleet = Fleet(config, driver, reached, metrics, gossip_view)
    for part in (
        policy_part(reloads, driver),
        peers_part(reloads, driver, mirror, links),
        ReloadingPart("certificates", tls.prepare),
        ReloadingPart("keys", tenants.prepare),
        fleet.part,
    ):
        reloads.add(part)
    # The tracer is opened last, because it has a thread.
    tracer = open_tracer(config.proxy.id, driver.engine, os.environ)
    observer = RequestObserver(
        metrics.registry,
        clock,
        tenants,
        logs_access=config.logs.access,
        tracer=tracer,
        picker=EndpointPicker(driver) if config.proxy.endpoint_picker else None,
    )
    return Parts(
        metrics,
        observer,
        event_log,
        driver,
        mirror,
        tenants,
        api,
        OtherApis(api),
        gossip_view,
        fleet,
        ServiceNames(reloads, driver.control.drains, clock),
    )


class OtherApis:
    """The Responses and Messages APIs; the first request of each imports its modules."""

    def __init__(self, port: ClientPort) -> None:
        self._port = port
        self.passed = Passed(port)

    @cached_property
    def responses(self) -> "ResponsesApi":
        from kvrs.proxy.api.responses import ResponsesApi

        return ResponsesApi(self._port)

    @cached_property
    def messages(self) -> "MessagesApi":
        from kvrs.proxy.api.messages import MessagesApi

        return MessagesApi(self._port, self.passed)

    def add_to(self, routes: Routes) -> None:
        routes.add("POST", "/v1/responses", lambda request: self.responses.create(request))
        one = "/v1/responses/{id}"
        routes.add("GET", one, lambda request: self.responses.retrieve(request))
        routes.add("DELETE", one, lambda request: self.responses.delete(request))
        routes.add("POST", f"{one}/cancel", lambda request: self.responses.cancel(request))
        routes.add("POST", MESSAGES, lambda request: self.messages.create(request))
        routes.add("POST", f"{MESSAGES}/count_tokens", lambda request: self.messages.count(request))

    async def close(self) -> None:
        if "responses" in vars(self):
            await self.responses.close()


def client_routes(port: ClientPort, others: OtherApis) -> Routes:
    """Make the routes of the clients' port: the APIs of OpenAI and Anthropic, models, health."""
    routes = Routes()
    for endpoint in (COMPLETIONS, CHAT):
        read_body = partial(read, endpoint, backend=port.driver.engine)
        routes.add("POST", endpoint.path, partial(port.serve, read_body))
    others.add_to(routes)
    others.passed.add_to(routes)
    add_models(routes, port.control.instances)
    add_health(routes, port)
    return routes


def metrics_of(config: Config) -> Metrics:
    instances = (instance.id for _, instance in config.cluster.instances())
    agents = (node.agent_id for node in config.cluster.nodes) if config.agents_run else ()
    return Metrics(instances, agents)


def new_event_log(config: Config, reloads: Reloads) -> "EventLog | None":
    settings = config.proxy
    if settings.event_log is None:
        return None
    from kvrs.core.event_log import header_line
    from kvrs.proxy.streams.event_log import EVENT_LOG_BYTES, EventLog

    def header(part: int) -> str:
        used = reloads.config
        return header_line(used.policy, used.slo, used.ordered_backup, part)

    return EventLog(Path(settings.event_log), EVENT_LOG_BYTES, header)


def policy_part(reloads: Reloads, driver: Driver) -> ReloadingPart:
    def prepare(config: Config) -> Apply | None:
        used = reloads.config
        if (config.policy, config.slo) == (used.policy, used.slo):
            return None
        return lambda: driver.control.reload(Configured.of(config), driver.clock())

    return ReloadingPart("policy", prepare, ("policy", "slo"))


def peers_part(
    reloads: Reloads, driver: Driver, mirror: Mirror, links: ProxyLinks
) -> ReloadingPart:
    def prepare(config: Config) -> Apply | None:
        """Check changes of proxy.peers. Raises ConfigError: a peer has another address under the
        same id.
        """
        before = {peer.id: peer for peer in reloads.config.proxy.every_peer()}
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
            for name in before.keys() - after.keys():
                mirror.peers.remove(name)
            added = [after[name] for name in after.keys() - before.keys()]
            for peer in links.new_peers(added).values():
                mirror.peers.add(peer)
            driver.control.slots.reload(Configured.of(config).slot_share)

        return apply

    return ReloadingPart("peers", prepare, ("proxy.peers",))
