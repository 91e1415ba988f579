"""The instances and agents of a simulated proxy. The watchers and senders are the product's; their
messages take time.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from random import Random
from typing import Any, TypeVar

from kvrs.core.control import Control
from kvrs.core.fleet.silence import SHORTEST_SUSPICION_S
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Member
from kvrs.core.watch import DeathCause, WatchLimits
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import (
    AgentInfo,
    InstanceInfo,
    LeaseAnswer,
    LeaseUpdate,
    LoadReport,
    SlotAnswer,
    SlotRequest,
    SlotUpdate,
)
from kvrs.proxy.watch.fleet import Watcher
from kvrs.proxy.watch.gossip_view import GossipView
from kvrs.proxy.wire.errors import ConnectionLostError
from kvrs.proxy.wire.peer import CONTROL_TIMEOUT_S, AgentBackend
from kvrs_lab.sim.agent import SimAgent
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.invariants import Grants
from kvrs_lab.sim.process import IN_ORDER_S, OwnTime, ask, require
from kvrs_lab.sim.site import Site

T = TypeVar("T")


class SimFleet:
    """The watches of one proxy."""

    def __init__(
        self,
        proxy: str,
        site: Site,
        control: Control[Any],
        time: OwnTime,
        delay_s: Callable[[InstanceId], float],
        grants: Grants,
        rng: Random,
    ) -> None:
        """Create the backends; `delay_s` draws the delay of a message to or from a process."""
        self.proxy, self.control, self.grants, self.rng = proxy, control, grants, rng
        self.settings = site.config.proxy
        self.time, self.delay_s, self.clock = time, delay_s, time.loop.time
        self.gossip = SimGossip(control, self.clock)
        self.end_watch: dict[InstanceId, Callable[[], bool]] = {}
        self.backends: dict[InstanceId, SimEngineBackend] = {}
        self.agent_backends: dict[InstanceId, SimAgentBackend] = {}
        self._watches: dict[InstanceId, Any] = {}  # Tasks, or timers that begin tasks.
        for holder in site.holders.values():
            if isinstance(holder, SimAgent):
                self.agent_backends[holder.id] = SimAgentBackend(self, holder)
            else:
                assert isinstance(holder, SimEngine)
                self.backends[holder.id] = SimEngineBackend(self, holder)

    def backend(self, name: InstanceId) -> "SimBackend":
        return self.backends.get(name) or self.agent_backends[name]

    def begin(self) -> None:
        """Watch all processes, each from a random moment on."""
        for name in self.backends:
            self.watch(self.control.instances.known[name], self.rng.uniform(0.0, 0.2))
        for name in self.agent_backends:
            self.watch(self.control.agents.known[name], self.rng.uniform(0.0, 0.2))

    def watch(self, known: Member | Agent, after_s: float = 0.0) -> None:
        watcher = Watcher(known, self, self.settings, self.gossip)
        self.gossip.follow(known.id, known.node, watcher.look)
        self._watches[known.id] = self.time.loop.call_later(after_s, self._start, watcher)

    def _start(self, watcher: Watcher) -> None:
        self._watches[watcher.id] = self.time.loop.create_task(watcher.run())

    def leave(self, name: InstanceId) -> None:
        """Stop to watch an instance that has left the cluster."""
        self._watches.pop(name).cancel()
        self.gossip.leave(name)

    def suspect(self, name: InstanceId) -> None:
        """Take a process for lost after a silent attempt, unless it reports."""
        end_watch = self.end_watch.get(name)
        if end_watch is not None and not self.control.progress.is_heard(name, self.clock()):
            end_watch()

    def die(self) -> None:
        """Close all connections, as the kernel of a dead proxy does."""
        for backend in (*self.backends.values(), *self.agent_backends.values()):
            backend.line = None

    # Host of the watchers.

    async def prepare(self, info: InstanceInfo) -> None: ...

    def load_reported(self, report: LoadReport) -> None: ...

    def process_lost(self, known: Member | Agent, death: DeathCause, silent_s: float) -> None:
        least_s = min(WatchLimits.of(self.settings).overdue_s, SHORTEST_SUSPICION_S)
        require(
            death is not DeathCause.SILENT or silent_s >= least_s - 1e-9,
            f"{known.id} reports, and was lost by its silence",
        )


class SimGossip(GossipView):
    """Deaths that other simulated proxies have found."""

    found: Callable[[InstanceId, int], None]
    _dead: dict[InstanceId, int] | None = None  # Latest dead epoch of each process.

    def died(self, name: InstanceId, epoch: int) -> None:
        """Note a death, and check at once whether the process is overdue with its report."""
        dead = self._dead = self._dead or {}
        dead[name] = max(dead.get(name, -1), epoch)
        if name in self._watches:
            _, check = self._watches[name]
            check()

    def withdrawn(self, name: InstanceId) -> None:
        (self._dead or {}).pop(name, None)

    def is_dead(self, node: NodeId, name: InstanceId, epoch: int | None) -> bool:
        return epoch is not None and (self._dead or {}).get(name, -1) >= epoch

    def lost(self, name: InstanceId, node: NodeId, epoch: int, cause: str) -> None:
        self.found(name, epoch)


class SimBackend:
    """Requests to one process. Failures are `UpstreamError`."""

    url = "simulated"

    def __init__(self, fleet: SimFleet, process: SimEngine | SimAgent) -> None:
        self.fleet, self.process = fleet, process
        self.drop = 0  # Number of the next reports to lose.
        self.line: ReportLine | None = None
        self._late_s = fleet.rng.uniform(0.0, fleet.settings.load_interval_s)

    def reset(self) -> None:
        """Close the connections, as the kernel of a dead process does."""
        if self.line is not None:
            self.line.send(ConnectionLostError("reset"))

    def watch_heartbeats(self, interval_s: float) -> AbstractAsyncContextManager[Any]:
        raise UpstreamError("a simulated process has none")

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        def renewed() -> LeaseAnswer:
            lost = self.process.renew(update.renew)
            self.process.release(update.release)
            return LeaseAnswer(lost)

        return await self.ask(renewed)

    def delay_s(self) -> float:
        return self.fleet.delay_s(self.process.id)

    def report_delay_s(self) -> float:
        return self.delay_s() + (self._late_s if self.fleet.rng.random() < 0.2 else 0.0)

    async def ask(self, answer: Callable[[], T], message_s: Callable[[], float] | None = None) -> T:
        loop = self.fleet.time.loop
        try:
            return await ask(
                loop, self.process, answer, message_s or self.delay_s, CONTROL_TIMEOUT_S
            )
        except ConnectionError:
            raise ConnectionLostError("refused") from None
        except TimeoutError:
            raise UpstreamError("no answer in time") from None


class SimEngineBackend(SimBackend):
    process: SimEngine

    async def info(self) -> InstanceInfo:
        return await self.ask(self.process.info)

    def watch_load(self, interval_s: float, is_awaited: Callable[[], bool]) -> "ReportLine":
        return ReportLine(self, interval_s, lambda: self.process.load)

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        def fenced() -> InstanceInfo:
            self.process.fence_all(attempts)
            return self.process.info()

        return await self.ask(fenced)


class SimAgentBackend(SimBackend, AgentBackend):
    process: SimAgent

    def __init__(self, fleet: SimFleet, agent: SimAgent) -> None:
        super().__init__(fleet, agent)
        self._wanted: set[SlotRequest] = set()  # Slots that were requested and not released.

    async def info(self) -> AgentInfo:
        return await self.ask(self.process.info)

    def watch_holdings(self, interval_s: float) -> "ReportLine":
        agent = self.process
        return ReportLine(self, interval_s, lambda: partial(agent.report, agent.watch()))

    async def slots(self, update: SlotUpdate) -> SlotAnswer:
        fleet = self.fleet
        self._wanted.update(update.acquire)
        for asked in update.release:
            self._wanted.discard(asked)
            fleet.grants.released(asked)

        def answer() -> SlotAnswer:
            found = self.process.update_slots(update)
            for asked, slot in zip(update.acquire, found.acquired, strict=True):
                if slot.token and asked in self._wanted:
                    fleet.grants.granted(fleet.proxy, asked, self.process.life)
            return found

        # Messages about slots may overtake each other.
        return await self.ask(answer, lambda: fleet.rng.uniform(0.0001, 0.005))


class ReportLine(AbstractAsyncContextManager[AsyncIterator[Any]], AsyncIterator[Any]):
    """The connection for the reports of one process. Reports arrive late, and in order."""

    def __init__(
        self, backend: SimBackend, interval_s: float, begin: Callable[[], Callable[[], Any]]
    ) -> None:
        """Create a connection; `begin` runs at the process and returns the maker of reports."""
        self._backend, self._interval_s, self._begin = backend, interval_s, begin
        self._arrival_s = 0.0
        self._came: deque[LoadReport | UpstreamError] = deque()
        self._more = asyncio.Event()

    async def __aenter__(self) -> AsyncIterator[Any]:
        backend = self._backend
        backend.line = self
        refused = partial(self._arrive, ConnectionLostError("refused"))
        backend.process.call(backend.report_delay_s(), self._listen, refused)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._backend.line = None

    async def __anext__(self) -> Any:
        while not self._came:
            self._more.clear()
            await self._more.wait()
        came = self._came.popleft()
        if isinstance(came, UpstreamError):
            raise came
        return came

    def _arrive(self, message: Any) -> None:
        self._came.append(message)
        self._more.set()

    # Steps at the process.

    def _listen(self) -> None:
        process, make = self._backend.process, self._begin()
        if isinstance(process, SimEngine):
            process.reporting.append(lambda: self.send(make()))
        self._report(make)

    def _report(self, make: Callable[[], Any]) -> None:
        """Send a report, and schedule the next report."""
        backend = self._backend
        if backend.line is not self:
            return
        report = make()
        if backend.drop:
            backend.drop -= 1
        else:
            self.send(report)
        backend.process.later(self._interval_s, self._report, make)

    def send(self, message: Any) -> None:
        time, delay_s = self._backend.fleet.time, self._backend.report_delay_s()
        self._arrival_s = max(self._arrival_s + IN_ORDER_S, time.now_s + delay_s)
        time.after(self._arrival_s - time.now_s, time.loop.do, self._arrive, message)
