"""A proxy of several workers: starts them, keeps them running, and answers for all of them.

The workers share the clients' port (SO_REUSEPORT), and are proxies that are each other's peers. The
supervisor takes no requests of clients; it has the admin port.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.registry import Collector

from kvrs import __version__
from kvrs.config.exposure import faults_of_proxy
from kvrs.config.file import Config
from kvrs.control.fleet_orders import FleetOrders
from kvrs.errors import ConfigError, RequestError
from kvrs.http import HttpPort, naming_port
from kvrs.protocol.mirror import FleetOrder
from kvrs.proxy.api.admin import Admin
from kvrs.proxy.fleet.exits import Exited
from kvrs.proxy.fleet.orders import DrainOrder, FleetChange, OrderRefused, RankOrder
from kvrs.proxy.fleet.services import ServiceNames
from kvrs.proxy.reload import Apply, ReloadingPart, ReloadResult, Reloads
from kvrs.proxy.streams.metrics import Total, process_registry
from kvrs.proxy.wire.capacity import capacity_of
from kvrs.proxy.wire.certificates import TlsOfPorts
from kvrs.proxy.workers.channel import ChannelError
from kvrs.proxy.workers.link import LOAD_INTERVAL_S
from kvrs.proxy.workers.messages import (
    BOOKED,
    EXITED,
    FLEET,
    HEARD,
    METRICS,
    ORDER,
    PING,
    RANK,
    RELOAD,
    STATE,
    Family,
    Reloaded,
    WorkerPlan,
    packed,
    unpacked,
)
from kvrs.proxy.workers.ports import KeptPorts, check_shared_ports
from kvrs.proxy.workers.process import PlaceState, WorkerPlace
from kvrs.proxy.workers.running import Stop, run_service
from kvrs.proxy.workers.series import Added, Totals, families_of
from kvrs.proxy.workers.shared import SharedByWorkers
from kvrs.proxy.workers.states import added_states

log = logging.getLogger(__name__)

_ANSWER_S = 2.0
# What a worker has counted since it was last asked is lost when it is killed.
_ASK_INTERVAL_S = 1.0
_RELOAD_S = 30.0
_REPEAT_S = 1.0
_LAST_WORDS_S = 2.0
_TIMES_TO_END = 3  # To leave, to end the delay, to skip draining.
_ENDED_WITHIN_S = 10.0  # After the second signal.


class Supervisor:
    """Start and close it on one event loop; a source of the admin port."""

    def __init__(
        self, config: Config, path: Path, read: Callable[[], Config], *, no_env: bool
    ) -> None:
        """`path`: the file that the workers read, `no_env`: without what the environment sets;
        `read` reads it for the supervisor.
        """
        self._no_env = no_env
        self._config = config
        self.reloads = Reloads(config, read)
        # What the workers reload, so that its changes are named as those of one proxy.
        of_workers = ("policy", "slo", "cluster.nodes", "cluster.services", "proxy.peers")
        self.reloads.add(ReloadingPart("policy", _nothing, of_workers))
        self._path = path
        self._ports = KeptPorts()
        self._admin: HttpPort | None = None
        self._tls: TlsOfPorts | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.places: list[WorkerPlace] = []
        self.port = 0
        self.admin_port = 0
        self._shared = SharedByWorkers(time.monotonic)
        self.registry = CollectorRegistry()
        self._added = Added()
        self._own, self._own_registry = Totals(), process_registry()
        self.registry.register(self._added)
        self._up = Gauge(
            "kvrs_proxy_worker_up",
            "1 while this worker of the proxy takes requests, else 0.",
            ["proxy_worker"],
            registry=self.registry,
        )
        self._restarts = Total(
            Counter(
                "kvrs_proxy_worker_restarts",
                "Times that this worker of the proxy was started again.",
                ["proxy_worker"],
                registry=self.registry,
            )
        )

    async def start(self) -> None:
        """Bind the ports and start all workers; return when all take requests.

        Raises:
            ConfigError: a port cannot be bound, or a worker cannot start.
        """
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        proxy = self._config.proxy
        check_shared_ports(self._config)
        if faults := [*faults_of_proxy(self._config, os.environ)]:
            raise ConfigError(faults)
        self._tls = tls = TlsOfPorts.load(self._config)
        self.reloads.add(ReloadingPart("certificates", tls.prepare))
        keep = self._ports.keep
        self.port = keep("port", proxy.host, proxy.port)
        wanted = [
            proxy.peer_port + worker if proxy.peer_port else 0 for worker in range(proxy.workers)
        ]
        peer_ports = [keep("peer_port", proxy.peer_host, port) for port in wanted]
        await (services := ServiceNames(self.reloads)).look_up()
        await self._open_admin(tls)
        for worker, name in enumerate(proxy.names):
            plan = WorkerPlan(
                worker,
                str(self._path),
                self._no_env,
                proxy.names,
                self.port,
                peer_ports,
            )
            handlers = {**self._shared.handlers(worker), HEARD: self._hear}
            ended = partial(self._shared.end, worker)
            self.places.append(WorkerPlace(plan, name, handlers, self._changed.set, ended))
            self._up.labels(str(worker))
            self._restarts.follow(0, str(worker))
        self._added.workers = [self._own, *(place.totals for place in self.places)]
        work = [place.run() for place in self.places]
        self._tasks = [asyncio.create_task(each) for each in work]
        await self._all_up()
        beside = (self._keep_counting(), self._spread_load(), services.run())
        files = (file.run() for file in tls.all)
        self._tasks += [asyncio.create_task(each) for each in (*beside, *files)]

    async def _open_admin(self, tls: TlsOfPorts) -> None:
        proxy, security = self._config.proxy, self._config.security
        self._admin = HttpPort(
            Admin(self, self.reloads, security).application(),
            capacity_of(self._config).others,
            shutdown_timeout_s=_LAST_WORDS_S,
            names={proxy.admin_host, *security.hosts},
            tls=tls.admin_port,
        )
        with naming_port("proxy", "admin_port", proxy.admin_host, proxy.admin_port):
            self.admin_port = await self._admin.open(proxy.admin_host, proxy.admin_port)

    async def _all_up(self) -> None:
        while any(place.state is not PlaceState.UP for place in self.places):
            await self._changed.wait()
            self._changed.clear()
            if faults := [
                f"{place.name}: {place.fault}" for place in self.places if place.fault is not None
            ]:
                raise ConfigError(faults)

    async def run(self) -> None:
        """Until cancelled; an exception is an internal error."""
        # Which leaves the workers running where it is cancelled.
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def leave(self) -> None:
        """Have all workers leave, and drain after that: each waits for the same delay."""
        for place in self.places:
            place.drain()
        try:
            await asyncio.sleep(self._config.proxy.drain_delay_s)
        except asyncio.CancelledError:
            for place in self.places:
                place.drain()
            raise

    async def drain(self) -> None:
        """Wait for the workers to end."""
        await asyncio.wait(self._tasks[: len(self.places)])

    async def close(self) -> None:
        """End all workers, and release all resources."""
        for place in self.places:
            for _ in range(_TIMES_TO_END):
                place.drain()
        running = self._tasks[: len(self.places)]
        if running:
            await asyncio.wait(running, timeout=_ENDED_WITHIN_S)
        for place in self.places:
            place.kill()
        if running:
            await asyncio.wait(running)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._admin is not None:
            await self._admin.stop_listening()
            await self._admin.close()
        self._ports.close()

    # The admin port.

    def serves(self) -> bool:
        return any(place.state is PlaceState.UP for place in self.places)

    async def state(self) -> dict[str, Any]:
        answers = await self._ask_all(STATE)
        rows = [
            place.describe() | ({} if place.plan.worker in answers else {"answers": False})
            for place in self.places
        ]
        states = {worker: msgspec.json.decode(answer) for worker, answer in answers.items()}
        return added_states(self._describe(), states, rows, self.reloads.config.policy.slots_max)

    def _describe(self) -> dict[str, Any]:
        proxy = self._config.proxy
        scheme = "http" if proxy.tls is None else "https"
        return {
            "id": proxy.id,
            "node": socket.gethostname(),
            "url": f"{scheme}://{proxy.host}:{self.port}",
            "pid": os.getpid(),
            "version": __version__,
            "policy": self.reloads.config.policy.name.value,
            "config_digest": self.reloads.digest,
            "source_digest": self.reloads.source_digest,
        }

    async def metrics(self) -> Collector:
        await self._count()
        self._own.note(families_of(self._own_registry))
        return self.registry

    async def reload(self) -> ReloadResult:
        """Have all workers read the file again.

        Raises:
            ConfigError: one of them does not answer, and none has reloaded, or finds a fault.
        """
        self._check_all_in(await self._ask_all(PING))
        found = await self._reloaded(RELOAD)
        own = await self.reloads.reload()
        _plan(self.places, self.reloads.orders)
        return _added_results(own, found)

    async def change_fleet(self, change: FleetChange) -> ReloadResult:
        """Raises as `reload`."""
        await self.reloads.order(change.order, is_trial=True)
        await self._reloaded(FLEET, packed(msgspec.structs.replace(change, is_trial=True)))
        own = await self.reloads.order(change.order)
        _plan(self.places, self.reloads.orders)
        return _added_results(own, await self._reloaded(FLEET, packed(change)))

    async def _hear(self, body: bytes) -> bytes:
        """A worker has heard of orders of other proxies."""
        if self.reloads.orders.take(unpacked(body, list[FleetOrder])):
            await self.reloads.follow_orders()
            _plan(self.places, self.reloads.orders)
        return b""

    async def _reloaded(self, what: str, body: bytes = b"") -> list[Reloaded]:
        answers = await self._ask_all(what, _RELOAD_S, body)
        self._check_all_in(answers)
        found = [unpacked(answer, Reloaded) for answer in answers.values()]
        if faults := dict.fromkeys(fault for each in found for fault in each.faults):
            raise ConfigError([*faults])
        return found

    async def drain_instance(self, order: DrainOrder) -> None:
        """Raises RequestError: a worker refuses it, or does not answer; then none obeys."""
        for each in (msgspec.structs.replace(order, is_trial=True), order):
            answers = await self._ask_all(ORDER, body=packed(each))
            if silent := _silent(self.places, answers):
                allowed = "allowed: when all workers are up"
                raise RequestError(f"{silent}: no answer; {allowed}", status=503)
            for body in answers.values():
                _check_obeyed(body)

    async def order_rank(self, order: RankOrder) -> None:
        """Have one worker pass it on. Raises RequestError: the instance refuses, or no answer."""
        up = (each.channel for each in self.places if each.state is PlaceState.UP)
        channel = next(up, None)
        try:
            body = None if channel is None else await channel.ask(RANK, packed(order), _RELOAD_S)
        except ChannelError:
            body = None
        if body is None:
            raise RequestError("no worker has answered; allowed: while one is up", status=503)
        _check_obeyed(body)

    async def note_exit(self, exited: Exited) -> None:
        """Raises RequestError: no worker can note it. One that cannot has not seen that start."""
        answers = await self._ask_all(EXITED, body=packed(exited))
        if not answers:
            raise RequestError("no worker has answered; allowed: while one is up", status=503)
        if b"" not in answers.values():
            _check_obeyed(next(iter(answers.values())))

    def _check_all_in(self, answers: Container[int]) -> None:
        if silent := _silent(self.places, answers):
            fault = f"{silent}: no answer to a reload; allowed: when all workers are up"
            log.error("not reloaded", extra={"cause": fault})
            raise ConfigError([fault])

    async def _ask_all(
        self, name: str, timeout_s: float = _ANSWER_S, body: bytes = b""
    ) -> dict[int, bytes]:
        """The answers of workers that are up and answer in time."""
        answers: dict[int, bytes] = {}

        async def ask(place: WorkerPlace) -> None:
            if place.state is not PlaceState.UP or place.channel is None:
                return
            try:
                answers[place.plan.worker] = await place.channel.ask(name, body, timeout_s)
            except ChannelError as error:
                log.warning("worker silent", extra={"proxy": place.name, "cause": str(error)})

        await asyncio.gather(*map(ask, self.places))
        return dict(sorted(answers.items()))

    async def _count(self) -> None:
        answers = await self._ask_all(METRICS)
        for place in self.places:
            worker = place.plan.worker
            self._up.labels(str(worker)).set(worker in answers)
            if worker in answers and place.state is PlaceState.UP:
                place.totals.note(unpacked(answers[worker], list[Family]))
            self._restarts.follow(max(0, place.starts - 1), str(worker))

    async def _spread_load(self) -> None:
        """Tell each worker what the others have sent to instances."""
        repeat_s = 0.0
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            if (now_s := time.monotonic()) >= repeat_s:
                # For workers that did not know the instance when they were told.
                self._shared.loads.repeat()
                repeat_s = now_s + _REPEAT_S
            channels = {
                place.plan.worker: place.channel
                for place in self.places
                if place.state is PlaceState.UP and place.channel is not None
            }
            for worker, news in self._shared.loads.news(channels).items():
                channels[worker].tell(BOOKED, packed(news))

    async def _keep_counting(self) -> None:
        while True:
            await asyncio.sleep(_ASK_INTERVAL_S)
            await self._count()


def _added_results(own: ReloadResult, found: Sequence[Reloaded]) -> ReloadResult:
    applied = dict.fromkeys((*own.applied, *(path for each in found for path in each.applied)))
    needed = (*own.restart_needed, *(path for each in found for path in each.restart_needed))
    return ReloadResult([*applied], [*dict.fromkeys(needed)], own.file, own.note)


def _silent(places: Sequence[WorkerPlace], answers: Container[int]) -> str:
    """The names of workers that have not answered."""
    return ", ".join(place.name for place in places if place.plan.worker not in answers)


def _check_obeyed(body: bytes) -> None:
    """Raises RequestError: the worker has refused an order."""
    if body:
        refused = unpacked(body, OrderRefused)
        raise RequestError(refused.message, param="id", status=refused.status)


def _plan(places: Sequence[WorkerPlace], orders: FleetOrders) -> None:
    """For workers that start."""
    for place in places:
        place.plan.orders = orders.shown()


def _nothing(_: Config) -> Apply | None:
    return None


async def supervise(
    config: Config, path: Path, read: Callable[[], Config], *, no_env: bool
) -> None:
    """Run a proxy of several workers until SIGINT or SIGTERM, which a second one hastens; SIGHUP
    has all of them read the configuration again.
    """
    supervisor = Supervisor(config, path, read, no_env=no_env)

    def ready() -> None:
        ports = {"port": supervisor.port, "admin_port": supervisor.admin_port}
        log.info("proxy ready", extra=ports | {"workers": config.proxy.workers})

    await run_service(
        supervisor,
        ready,
        Stop(config.proxy.drain_delay_s),
        path if config.proxy.reload_on_change else None,
    )
