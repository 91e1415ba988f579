"""A proxy: its ports, watchers and leases, and its run as a process until its end by signals."""

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrs import __version__
from kvrs.config.across_sections import gossip_seeds
from kvrs.config.exposure import faults_of_proxy
from kvrs.config.file import Config
from kvrs.config.settings import HOST_OF_PORT, netloc
from kvrs.errors import ConfigError
from kvrs.ids import NodeId
from kvrs.net.http import inner_server, naming_port
from kvrs.net.routes import Routes
from kvrs.net.server import HttpServer
from kvrs.process.memory import keep_what_is_there, raise_descriptor_limit, return_large_blocks
from kvrs.protocol.secrets import Scope, ScopedKey, scoped_keys
from kvrs.proxy.api.admin import Admin
from kvrs.proxy.fleet.supervision import TaskKind, keep_running, observe_lag
from kvrs.proxy.mirror.book import Ending, EndStep, Left, awaited
from kvrs.proxy.mirror.replication import Mirror, make_routes
from kvrs.proxy.process.parts import Parts, ProxyLinks, TlsOfPorts, build, client_routes
from kvrs.proxy.reload import ReloadResult, Reloads
from kvrs.proxy.watch.gossip_view import GossipView
from kvrs.proxy.watch.self_test import SelfTester
from kvrs.proxy.wire.capacity import capacity_of
from kvrs.proxy.wire.watchdog import lateness

if TYPE_CHECKING:
    from kvrs.gossip.membership import Membership
    from kvrs.proxy.process.workers import Supervisor

log = logging.getLogger(__name__)

# Time after which a client's idle connection is closed. Load balancers keep theirs for less (60 s
# at nginx and ALB, 600 s at GCLB), and would otherwise send requests to closing connections.
IDLE_TIMEOUT_S = 620.0
_LOOK_AGAIN_S = 0.02
_LOOK_AT_FILE_S = 1.0
# Longest time that a new worker waits for an instance that is up before it takes requests.
_SEEN_WITHIN_S = 2.0
# Longest time for clients to read the end of their streams when the proxy stops.
_FLUSH_TIMEOUT_S = 2.0


class Proxy:
    """A proxy, which is started and closed on one event loop. `port` and `admin_port` are the bound
    ports; 0: not bound yet.
    """

    def __init__(
        self,
        config: Config,
        secret: bytes,
        older: Sequence[bytes] = (),
        read: Callable[[], Config] | None = None,
        supervisor: "Supervisor | None" = None,
    ) -> None:
        """`older`: further secrets that are accepted. `read` reads the configuration file again;
        None: no file. `supervisor`: the process that started this worker; None: the proxy has one
        process.
        """
        self._config = config
        self._supervisor = supervisor
        self.reloads = Reloads(config, read or (lambda: config))
        self._ring = [secret, *older]
        self._tls = TlsOfPorts()
        self._links: ProxyLinks | None = None
        self._parts: Parts | None = None  # Parts of the proxy; None: not assembled yet.
        self._membership: Membership | None = None
        self._ports: list[HttpServer] = []
        self._background: list[asyncio.Task[None]] = []
        # Time when the peers were told that this proxy ends; None: not told.
        self._told_s: float | None = None
        self.port = 0
        self.admin_port = 0

    @property
    def parts(self) -> Parts:
        assert self._parts is not None
        return self._parts

    async def start(self) -> None:
        """Bind the ports, then begin to watch the instances.

        Raises:
            ConfigError: a port cannot be bound, the configuration names an instance without a port
                or an unknown profile, or the model's tokenizer cannot be read.
        """
        _check_addresses(self._config)
        if services := self._config.cluster.services:
            from kvrs.proxy.fleet.discovery import check_pods

            check_pods(services)
        self._capacity = capacity_of(self._config)
        try:
            self._tls = TlsOfPorts.load(self._config)
            self._links = links = ProxyLinks(self._config, self._ring[0], self._tls)
            self._parts = parts = build(
                self._config, self._capacity, self._ring, self._tls, links, self.reloads
            )
            await self._start(parts)
        except BaseException:
            await self.close()
            raise

    async def _start(self, parts: Parts) -> None:
        await parts.driver.tokenizer.check()
        if self._config.proxy.peer_port:
            keys = scoped_keys(self._ring, self._config.proxy.id, Scope.PROXY)
            await self._listen(make_routes(parts.mirror), "peer_port", keys)
        await parts.services.look_up()
        await parts.mirror.peers.meet_first()
        if self._supervisor is None:
            await self._listen_to_clients()
        admin = await self._listen_to_operators(parts)
        if self._config.gossip.enabled:
            await self._join(parts.gossip_view)
        # The log is opened after the ports are bound, so that a proxy started twice by mistake
        # fails before it touches the log.
        if parts.event_log is not None:
            parts.event_log.open()
        work = [*self._work_of(parts), admin.keep_history()]
        self._background = [asyncio.create_task(each) for each in work]
        if self._supervisor is not None:
            # Wait for an instance that is up: the other workers take requests until then.
            until_s = time.monotonic() + _SEEN_WITHIN_S
            while not parts.driver.control.instances.ready() and time.monotonic() < until_s:
                await asyncio.sleep(_LOOK_AGAIN_S)
            await self._listen_to_clients()

    def _work_of(self, parts: Parts) -> list[Coroutine[Any, Any, None]]:
        """Return all coroutines that run until the proxy closes."""
        driver, metrics = parts.driver, parts.metrics
        keep = partial(keep_running, failed=metrics.task_failed)
        return [
            *(certificates.run() for certificates in self._tls.all),
            parts.fleet.run(),
            keep(TaskKind.LEASES, driver.leases.run),
            keep(TaskKind.CHECKPOINT_LEASES, driver.checkpoint_leases.run),
            keep(TaskKind.SLOTS, driver.slots.run),
            keep(TaskKind.SELF_TESTS, SelfTester(driver, driver.clock).run),
            keep(TaskKind.KEYS, parts.tenants.run),
            keep(TaskKind.FLEET, parts.services.run),
            observe_lag(metrics.loop_lag.observe),
            parts.mirror.run(),
            *([parts.gossip_view.run()] if self._config.gossip.enabled else []),
            *([parts.event_log.run()] if parts.event_log is not None else []),
        ]

    async def _listen_to_clients(self) -> None:
        observer = self.parts.observer
        server = HttpServer(
            client_routes(self.parts.api, self.parts.other_apis),
            observer.answer,
            observer.note_refusal,
            self._capacity.clients,
            idle_s=IDLE_TIMEOUT_S,
            shutdown_timeout_s=_FLUSH_TIMEOUT_S,
            tls=self._tls.port,
            budget=self.parts.api.budget,
        )
        self.port = await self._open(server, "port")

    async def _listen_to_operators(self, parts: Parts) -> Admin:
        admin = Admin(
            parts.driver,
            parts.metrics,
            parts.gossip_view,
            parts.mirror.peers,
            self.reloads,
            self._describe,
            None if self._supervisor is None else self._supervisor.reload_all,
        )
        self.admin_port = await self._listen(admin.routes(), "admin_port")
        return admin

    async def _join(self, gossip_view: GossipView) -> None:
        from kvrs.gossip.membership import Membership

        config = self._config
        host, port = config.proxy.gossip_host, config.proxy.gossip_port
        me, interval_s = NodeId(config.proxy.id), config.gossip.probe_interval_s
        self._membership = membership = Membership(me, interval_s, self._ring, gossip_view.heard)
        with naming_port("proxy", "gossip_port", host, port):
            seeds = gossip_seeds(config.cluster, config.proxy, membership.id)
            await membership.start(host, port, seeds, host)
        gossip_view.membership = membership

    async def reload(self) -> ReloadResult:
        """Reload the configuration. Raises ConfigError: the file has faults; nothing changes."""
        return await self.reloads.reload()

    async def run(self) -> None:
        """Serve until cancelled; an exception is an internal error."""
        await asyncio.gather(*self._background)

    def told_to_end(self) -> None:
        if self._parts is not None:
            self._tell_peers(self._parts.mirror)

    async def leave(self) -> None:
        if (parts := self._parts) is None:
            return
        self._tell_peers(parts.mirror)
        if delay_s := self._config.proxy.drain_delay_s:
            parts.api.leaving = True
            await asyncio.sleep(delay_s)

    async def drain(self) -> None:
        """Admit no new streams, hand over keyed streams that a peer can take, and wait for all
        other streams to end. If all proxies end together, wait for all streams, and for clients
        that are about to resume a stream here.
        """
        if (parts := self._parts) is None:
            return
        if self._supervisor is not None:
            await self._stop_taking_clients()  # Workers of this proxy that stay take new clients.
        parts.api.draining = True
        log.info("draining", extra={"streams": len(parts.driver.streams)})
        mirror, peers = parts.mirror, parts.mirror.peers
        until_s = time.monotonic() + self._config.proxy.drain_s
        ending = Ending(self._tell_peers(mirror), until_s)
        while (step := ending.next_step(self._left(parts), time.monotonic())) is not EndStep.CLOSE:
            if step is EndStep.ASK:
                await peers.meet()
                continue
            if step is EndStep.HAND_OVER:
                mirror.hand_over()
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _left(self, parts: Parts) -> Left:
        mirror = parts.mirror
        staying = frozenset(mirror.peers.staying)
        return Left(
            streams=len(parts.driver.streams) + len(mirror.streams),
            away=awaited(mirror.book, staying, mirror.clock()),
            uncopied=mirror.uncopied,
            has_peers=bool(mirror.peers.live),
            staying=staying,
        )

    def _tell_peers(self, mirror: Mirror) -> float:
        """Tell the other proxies that this proxy is about to end; return the time of that."""
        if self._told_s is None:
            self._told_s = time.monotonic()
            mirror.peers.leave()
        return self._told_s

    async def _stop_taking_clients(self) -> None:
        for port in self._ports:
            if port.port == self.port:
                await port.stop_listening()

    async def close(self) -> None:
        """End every stream with an error, then release all resources."""
        parts = self._parts
        for port in self._ports:
            await port.stop_listening()
        if parts is not None:
            await parts.driver.close()
        for port in self._ports:
            await port.close()
        if parts is not None:
            await parts.other_apis.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._membership is not None:
            await self._membership.close()
        if parts is not None and parts.event_log is not None:
            await parts.event_log.close()
        if self._links is not None:
            self._links.close()
        if parts is not None:
            await parts.observer.close()
        self._membership = self._links = None
        self._ports, self._background = [], []

    def _describe(self) -> dict[str, Any]:
        parts = self.parts
        scheme = "http" if self._tls.port is None else "https"
        url = f"{scheme}://{netloc(self._config.proxy.host, self.port)}"
        identity = {
            "id": self._config.proxy.id,
            "node": socket.gethostname(),
            "url": url,
            "pid": os.getpid(),
            "version": __version__,
        }
        tenants = {"tenants": parts.tenants.describe()}
        starved = {"starved": lateness().describe(asyncio.get_running_loop().time())}
        return identity | self.reloads.describe() | parts.mirror.describe() | tenants | starved

    async def _listen(self, routes: Routes, key: str, keys: Sequence[ScopedKey] = ()) -> int:
        port = inner_server(
            routes,
            self._capacity.others,
            shutdown_timeout_s=_FLUSH_TIMEOUT_S,
            names={getattr(self._config.proxy, HOST_OF_PORT[key]), *self._config.security.hosts},
            keys=keys,
            tls=getattr(self._tls, key),
        )
        return await self._open(port, key)

    async def _open(self, listening: HttpServer, key: str) -> int:
        host = getattr(self._config.proxy, HOST_OF_PORT[key])
        port = getattr(self._config.proxy, key)
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
                f"proxy.{key}: port {host}:{port} {reason}; allowed: a free port, or 0 for any"
            ) from None


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


class Stop:
    """Requests that a service end. SIGTERM calls `asked`: the first begins the delay before the
    drain, if any, the second ends the delay, and the next skips draining. SIGINT skips the delay.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.first = asyncio.Event()
        self.no_delay = asyncio.Event()
        self.at_once = asyncio.Event()
        if not delay_s:
            self.no_delay.set()

    def asked(self) -> None:
        for step in (self.first, self.no_delay, self.at_once):
            if not step.is_set():
                step.set()
                return

    def interrupted(self) -> None:
        self.no_delay.set()
        self.asked()


async def serve(
    config: Config,
    secret: bytes,
    older: Sequence[bytes] = (),
    read: Callable[[], Config] | None = None,
    watched: Path | None = None,
    supervisor: "Supervisor | None" = None,
) -> None:
    """Run a proxy until SIGINT or SIGTERM; a repeated signal hastens the end. SIGHUP, or a change
    of the `watched` file, makes it `read` its configuration again. A worker also ends with its
    `supervisor`.
    """
    proxy = Proxy(config, secret, older, read, supervisor)
    stop = Stop(config.proxy.drain_delay_s)
    if supervisor is not None:
        supervisor.end_with_it()
    asked_to_reload = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(by: Callable[[], None]) -> None:
        by()
        proxy.told_to_end()

    loop.add_signal_handler(signal.SIGTERM, end, stop.asked)
    loop.add_signal_handler(signal.SIGINT, end, stop.interrupted)
    loop.add_signal_handler(signal.SIGHUP, asked_to_reload.set)
    # The default action of SIGUSR1 would end this process.
    loop.add_signal_handler(signal.SIGUSR1, log.warning, "SIGUSR1 is ignored")
    # These signals are blocked from the process's start until now (`kvrs/__main__.py`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGUSR1})
    raise_descriptor_limit()
    return_large_blocks()
    await proxy.start()
    keep_what_is_there()
    log.info("proxy ready", extra={"port": proxy.port, "admin_port": proxy.admin_port})
    running = asyncio.ensure_future(proxy.run())
    stopping = asyncio.ensure_future(stop.first.wait())
    reloading = asyncio.ensure_future(_reload_when(asked_to_reload, proxy))
    watching = asyncio.ensure_future(_watch(watched, asked_to_reload))
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        await _leave(proxy, stop, running)
        draining, hurried = (
            asyncio.ensure_future(proxy.drain()),
            asyncio.ensure_future(stop.at_once.wait()),
        )
        done, _ = await asyncio.wait(
            {draining, hurried, running}, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (draining, hurried):
            task.cancel()
        for ended in done - {hurried}:
            await ended  # Re-raise internal errors: the exit status must not be 0.
    finally:
        for task in (running, stopping, reloading, watching):
            task.cancel()
        await proxy.close()


async def _leave(proxy: Proxy, stop: Stop, running: asyncio.Future[None]) -> None:
    """Serve on until the delay before the drain is over, or a signal ends it."""
    if not stop.no_delay.is_set():
        log.info("leaving")
    leaving = asyncio.ensure_future(proxy.leave())
    ended = asyncio.ensure_future(stop.no_delay.wait())
    waited: set[asyncio.Future[Any]] = {leaving, ended, running}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    stop.no_delay.set()
    for task in (leaving, ended):
        task.cancel()
    await asyncio.gather(leaving, ended, return_exceptions=True)
    if not leaving.cancelled():
        await leaving


async def _watch(path: Path | None, changed: asyncio.Event) -> None:
    """Set `changed` whenever the file's status changes, which also shows a link's new target. A
    file that is missing for a moment is being replaced. None: watch nothing.
    """
    if path is None:
        return
    before = _status(path)
    while True:
        await asyncio.sleep(_LOOK_AT_FILE_S)
        now = _status(path)
        if now is not None and now != before:
            before = now
            changed.set()


def _status(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


async def _reload_when(asked: asyncio.Event, proxy: Proxy) -> None:
    while True:
        await asked.wait()
        asked.clear()
        try:
            await proxy.reload()
        except ConfigError:
            pass  # The fault is logged; the present configuration stays.
        except Exception:
            log.exception("not reloaded because of a bug")  # The next request reloads again.
