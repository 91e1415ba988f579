"""Watches of all instances and agents, which follow the configuration while the proxy runs.

Watches of processes over one long-lived connection each, whose end is the first sign of a death.
`kvrs/core/watch.py` decides what follows.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from math import inf
from typing import Any, Protocol

import msgspec

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.config.file import Config
from kvrs.config.proxy import ProxySettings
from kvrs.core.control import Control
from kvrs.core.fleet.drains import RankDue
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Health, Member
from kvrs.core.watch import (
    LONGEST_PAUSE_S,
    AgentWatch,
    DeathCause,
    End,
    InstanceWatch,
    Watch,
    WatchLimits,
    WatchNote,
    WatchStep,
    gone,
    remove,
    remove_agent,
)
from kvrs.errors import ConfigError, RequestError, UpstreamError
from kvrs.ids import InstanceId
from kvrs.net.proving import instance_keys
from kvrs.protocol.instance import AgentInfo, InstanceInfo, LoadReport, Role, WatchQuestion
from kvrs.proxy.backends.backend import Backend, WatchedInstance
from kvrs.proxy.backends.cluster import open_backend
from kvrs.proxy.fleet.orders import RankOrder, pass_on
from kvrs.proxy.fleet.supervision import TaskKind, keep_running
from kvrs.proxy.reload import Apply, ReloadingPart
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.watch.gossip_view import GossipView
from kvrs.proxy.wire.errors import ConnectionLostError, UnusableError
from kvrs.proxy.wire.peer import AgentBackend
from kvrs.proxy.wire.upstream import EngineLinks
from kvrs.proxy.wire.watchdog import SilentError, Watchdog

log = logging.getLogger(__name__)

# Shortest stall of a process's event loop that is logged.
STALL_SHOWN_S = 1.0
# Time without a failure after which a question's next failure is logged again.
_SPELL_OVER_S = 60.0


class WatchHost(Protocol):
    """Part of a proxy that a watcher uses: a driver, or a simulated proxy."""

    @property
    def control(self) -> Control[Any]: ...
    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def backends(self) -> Mapping[InstanceId, WatchedInstance]: ...
    @property
    def agent_backends(self) -> Mapping[InstanceId, AgentBackend]: ...
    @property
    def end_watch(self) -> MutableMapping[InstanceId, Callable[[], bool]]:
        """Functions by watched process that treat its silence as its end, and return False if it is
        too short for that.
        """

    async def prepare(self, info: InstanceInfo) -> None:
        """Load what the use of an instance needs, which is not refused so far."""

    def load_reported(self, report: LoadReport) -> None: ...
    def process_lost(self, known: Member | Agent, death: DeathCause, silent_s: float) -> None: ...


class Watcher:
    """Watches one process, an instance or an agent."""

    def __init__(
        self,
        known: Member | Agent,
        host: WatchHost,
        settings: ProxySettings,
        gossip_view: GossipView,
    ) -> None:
        self.id = known.id
        self._known = known
        self._host = host
        self._gossip_view = gossip_view
        self._interval_s = settings.load_interval_s
        self._watchdog: Watchdog | None = None
        self._tokens = 0  # Number of tokens that the instance had delivered at the last look.
        # Time of the last report in which each question failed.
        self._failing_s: dict[WatchQuestion, float] = {}
        self._peer: WatchedInstance | AgentBackend
        self._watch_reports: Callable[[float], AbstractAsyncContextManager[AsyncIterator[Any]]]
        self._watch: Watch[Any, Any, Any]
        limits = WatchLimits.of(settings)
        if isinstance(known, Member):
            self._peer = instance = host.backends[known.id]
            self._delivered = host.control.progress.delivered[known.id]
            self._watch_reports = partial(instance.watch_load, is_awaited=self._is_awaited)
            self._watch = InstanceWatch(known, host.control, limits, self)
        else:
            self._peer = agent = host.agent_backends[known.id]
            self._watch_reports = agent.watch_holdings
            self._watch = AgentWatch(known, host.control, limits, self)

    async def run(self) -> None:
        """Watch the process until cancelled, again after each loss."""
        watch = self._watch
        while True:
            session = watch.connects()
            try:
                await self._follow(session)
                fault = UpstreamError("stopped reporting")
            except UpstreamError as error:
                fault = error
            pause_s = watch.ended(session, str(fault), _death_cause(fault), self._host.clock())
            assert pause_s is not None
            await asyncio.sleep(pause_s)

    def _is_awaited(self) -> bool:
        """Return whether streams run at the instance and none has had a token since the last look,
        so that only a report shows that it lives.
        """
        before, self._tokens = self._tokens, self._delivered.tokens
        assert isinstance(self._watch.known, Member)
        return before == self._tokens and bool(self._watch.known.running)

    def look(self) -> None:
        """End the watch if gossip reports the process dead and its own report is overdue too."""
        if self._watchdog is not None:
            self._watchdog.look()

    def _suspect(self) -> bool:
        """Treat the process's silence as its end, unless it is too short; return whether it is."""
        assert self._watchdog is not None
        self._watch.note_tokens()
        return self._watchdog.expire_if_silent()

    def _warn_of(self, report: LoadReport) -> None:
        """Log the questions that the instance fails, once a spell."""
        now_s = self._host.clock()
        for question, failed in report.failing.items():
            last_s = self._failing_s.get(question, -inf)
            self._failing_s[question] = now_s
            if now_s - last_s > _SPELL_OVER_S:
                extra = {"instance": self.id, "question": question, "cause": failed.cause}
                log.warning("question of its watch fails", extra=extra)

    def lose(self, cause: str) -> None:
        """Treat a process that is up as lost, by a cause outside the watch."""
        session = self._watch.session
        assert session is not None
        self._watch.ended(session, cause, DeathCause.FAILED, self._host.clock())

    async def _follow(self, session: int) -> None:
        """Watch the process until the connection ends. Raises UpstreamError: the process is lost or
        unusable.
        """
        await self._perform(session, WatchStep.IDENTIFY)
        watch, clock, end_watch = self._watch, self._host.clock, self._host.end_watch
        silence = watch.silence
        with Watchdog(
            lambda *_: watch.limit_s(clock()), silence=silence, is_patient=True
        ) as watchdog:
            self._watchdog, end_watch[self.id] = watchdog, self._suspect
            beats = asyncio.create_task(self._follow_heartbeats())
            try:
                async with self._watch_reports(self._interval_s) as reports:
                    async for report in reports:
                        if isinstance(report, LoadReport):
                            self._host.load_reported(report)
                            if report.failing:
                                self._warn_of(report)
                        await self._perform(session, watch.reported(session, report, clock()))
            finally:
                self._watchdog = None
                del end_watch[self.id]
                # Do not wait for the end of this task: a loss must be known at once.
                beats.cancel()

    async def _perform(self, session: int, step: WatchStep | End | None) -> None:
        """Carry out this step and the steps that follow from it, until only reports remain to be
        read.
        """
        while step is not None and step is not WatchStep.LISTEN:
            if isinstance(step, End):
                is_unusable = step.death is DeathCause.UNUSABLE
                raise (UnusableError if is_unusable else UpstreamError)(step.cause)
            try:
                info = await self._ask(step)
            except UpstreamError:
                if step is WatchStep.SHAPE:
                    return
                raise
            step = self._watch.answered(session, step, info, self._host.clock())
            if isinstance(info, InstanceInfo) and not isinstance(step, End):
                await self._host.prepare(info)

    async def _ask(self, step: WatchStep) -> InstanceInfo | AgentInfo:
        if step is not WatchStep.FENCE:
            return await self._peer.info()
        assert not isinstance(self._peer, AgentBackend)
        return await self._peer.fence(self._host.control.fences.numbers(self.id))

    async def _follow_heartbeats(self) -> None:
        """Note the heartbeats of the process, if it sends any, until the watch ends."""
        is_stalled = False
        while True:
            try:
                async with self._peer.watch_heartbeats(self._interval_s) as beats:
                    async for beat in beats:
                        self._watch.beat(self._host.clock())
                        was_stalled, is_stalled = is_stalled, beat.loop_age_s > STALL_SHOWN_S
                        if is_stalled and not was_stalled:
                            log.warning("its event loop stalls", extra={"instance": self.id})
            except ConnectionLostError:
                await asyncio.sleep(LONGEST_PAUSE_S)
            except UpstreamError:
                return  # The process sends no heartbeats.

    @property
    def url(self) -> str:
        return self._peer.url

    def is_gossiped_dead(self, epoch: int) -> bool:
        return self._gossip_view.is_dead(self._known.node, self.id, epoch)

    def came_up(self) -> None:
        self._gossip_view.up(self.id)

    def lost(self, epoch: int, cause: str, death: DeathCause, silent_s: float) -> None:
        self._host.process_lost(self._known, death, silent_s)
        self._gossip_view.lost(self.id, self._known.node, epoch, cause)

    def note(self, note: WatchNote, detail: str | list[str]) -> None:
        match note:
            case WatchNote.REFUSED:
                remedy = f"it is looked at again every {LONGEST_PAUSE_S:g} s"
                extra = {"instance": self.id, "cause": detail, "remedy": remedy}
                log.error("refused", extra=extra)
            case WatchNote.UNREACHED:
                log.warning("not reached", extra={"instance": self.id, "cause": detail})
            case WatchNote.NAMES:
                log.info("names", extra={"instance": self.id, "names": detail})
            case WatchNote.OTHER_FORMAT:
                extra = {"instance": self.id, "others": detail}
                log.warning("no hand-offs with these: NIXL's formats differ", extra=extra)


def _death_cause(fault: UpstreamError) -> DeathCause:
    """Return the label by which a loss with this fault is counted."""
    match fault:
        case ConnectionLostError():
            return DeathCause.CONNECTION_LOST
        case SilentError():
            return DeathCause.SILENT
        case UnusableError():
            return DeathCause.UNUSABLE
        case _:
            return DeathCause.FAILED


_LOOK_S = 0.05
_GPUS_INTERVAL_S = 0.5


class FleetLinks(msgspec.Struct, frozen=True):
    """Connections to instances and agents. The driver holds the same two mappings."""

    secret: bytes
    engines: EngineLinks
    backends: MutableMapping[InstanceId, Backend]
    new_agent: Callable[[NodeSettings], AgentBackend]
    agent_backends: MutableMapping[InstanceId, AgentBackend]


class Fleet:
    """Runs the watches of all configured instances and agents."""

    def __init__(
        self,
        config: Config,
        driver: Driver,
        links: FleetLinks,
        metrics: Metrics,
        gossip_view: GossipView,
    ) -> None:
        self._config = config
        self._settings: ProxySettings = config.proxy
        self._driver = driver
        self._links = links
        self._metrics = metrics
        self._gossip_view = gossip_view
        self._any_leaves = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._watches: dict[InstanceId, asyncio.Task[None]] = {}
        self._watchers: dict[InstanceId, Watcher] = {}
        for instance in driver.control.instances.present():
            self._watch(instance)
        for agent in driver.control.agents.present():
            self._watch(agent)

    async def run(self) -> None:
        """Watch all instances and agents until cancelled; an exception is an internal error."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for watcher in [*self._watchers.values()]:
                    self._start(watcher)
                self._group.create_task(self._order_ranks())
                while True:
                    await self._any_leaves.wait()
                    self._any_leaves.clear()
                    await self._take_leave()
        finally:
            # Release the tasks: CPython 3.11 never collects a cancelled task that refers to itself.
            self._group = None
            self._watches.clear()

    async def _take_leave(self) -> None:
        control = self._driver.control
        while control.drains.leaving:
            await asyncio.sleep(_LOOK_S)
            self._drop(gone(control, self._driver.clock()))

    def _drop(self, gone: Iterable[InstanceId]) -> None:
        for name in gone:
            self._unwatch(name)
            self._links.backends.pop(name).leave()
            log.info("instance removed", extra={"instance": name})

    @property
    def part(self) -> ReloadingPart:
        """Return the part of the configuration that is applied while streams run."""
        return ReloadingPart("fleet", self._prepare, ("cluster.nodes", "cluster.services"))

    def _prepare(self, config: Config) -> Apply | None:
        """Check a new configuration's instances and agents, and return a function that applies
        them; None: no change. Raises ConfigError: the change cannot be applied while streams run.
        """
        before, after = self._config, config
        if before.cluster.nodes == after.cluster.nodes:
            return None
        if faults := [*self._faults(before, after)]:
            raise ConfigError(faults)
        return lambda: self._apply(after)

    def _faults(self, before: Config, after: Config) -> Iterator[str]:
        known, wanted = _instances(before), _instances(after)
        for name, (node, instance) in wanted.items():
            what = f"cluster.nodes: instance {name!r}"
            if instance.port == 0:
                yield f"{what} has no port; allowed: the port it listens on"
            if name in self._driver.control.drains.leaving:
                yield f"{what} is still being removed; allowed: when it is gone"
            elif name in known and _place(*known[name]) != _place(node, instance):
                yield f"{what} has another node or role; allowed: as it was, or another id"
            elif name in known and self._is_up_elsewhere(known[name][1], instance):
                yield (
                    f"{what} is up and has another address; allowed: as it was, another id, or "
                    f"when it is down"
                )
        agents = {node.agent_id: node.agent for node in before.cluster.nodes}
        of_agents = self._driver.control.agents
        for node in after.cluster.nodes if after.agents_run else ():
            what = f"cluster.nodes: the agent of node {node.id!r}"
            if node.agent.port == 0:
                yield f"{what} has no port; allowed: the port it listens on"
            former = agents.get(node.agent_id)
            if (
                former is not None
                and former.url != node.agent.url
                and of_agents.known[node.agent_id].health is Health.UP
            ):
                yield (
                    f"{what} is up and has another address; allowed: as it was, another node, or "
                    f"when it is down"
                )
        yield from self._unserved([*(known.keys() - wanted.keys())])

    def _is_up_elsewhere(self, before: InstanceSettings, after: InstanceSettings) -> bool:
        known = self._driver.control.instances.known[after.id]
        return before.url != after.url and known.health is Health.UP

    def _unserved(self, removed: list[InstanceId]) -> Iterator[str]:
        """Yield the faults of a removal that would leave running streams without an instance that
        is up.
        """
        instances, drains = self._driver.control.instances, self._driver.control.drains
        up = {known.id: known.role for known in instances.known.values() if drains.remains(known)}
        for role in (Role.PREFILL, Role.DECODE):
            able = {name for name, of in up.items() if of in (role, Role.BOTH)}
            if able and able <= {*removed}:
                yield (
                    f"cluster.nodes: without {', '.join(sorted(able))} no instance that is up can "
                    f"do {role.value}; allowed: when another one is up"
                )

    def _apply(self, after: Config) -> None:
        control, now_s = self._driver.control, self._driver.clock()
        known, wanted = _instances(self._config), _instances(after)
        agents = {each.id: each for each in control.agents.present()}
        agent_urls = {node.agent_id: node.agent.url for node in self._config.cluster.nodes}
        self._config = after
        for name, (node, instance) in wanted.items():
            if name not in known:
                self._add(after, node, instance)
            elif known[name][1].url != instance.url:
                self._move(after, node, instance)
        for name in known.keys() - wanted.keys():
            log.info("instance leaves", extra={"instance": name})
            if remove(control, name, after.cluster.drain_s, now_s):
                self._drop([name])
            else:
                self._any_leaves.set()
        for node in after.cluster.nodes if after.agents_run else ():
            agent = agents.pop(node.agent_id, None)
            if agent is None:
                self._links.agent_backends[node.agent_id] = self._links.new_agent(node)
                self._metrics.add_agent(node.agent_id)
                self._watch(control.agents.add(node.agent_id, node.id))
            elif agent_urls[node.agent_id] != node.agent.url:
                self._move_agent(agent, node)
        for agent in agents.values():
            self._unwatch(agent.id)
            remove_agent(control, agent, now_s)

    def _add(self, config: Config, node: NodeSettings, instance: InstanceSettings) -> None:
        log.info("instance added", extra={"instance": instance.id, "url": instance.url})
        links = self._links
        links.engines.admit(instance_keys(links.secret, [instance]))
        links.backends[instance.id] = open_backend(
            config, links.engines, links.secret, node, instance, self._driver.tokenizer.files
        )
        self._metrics.add_worker(instance.id)
        instances = self._driver.control.instances
        self._watch(instances.add(instance.id, node.id, instance.role, instance.group))

    def _move(self, config: Config, node: NodeSettings, instance: InstanceSettings) -> None:
        """Move an instance that is down to another address."""
        log.info("instance moved", extra={"instance": instance.id, "url": instance.url})
        known, links = self._driver.control.instances.known[instance.id], self._links
        self._leave(known)
        links.engines.admit(instance_keys(links.secret, [instance]))
        links.backends[instance.id].leave()
        links.backends[instance.id] = open_backend(
            config, links.engines, links.secret, node, instance, self._driver.tokenizer.files
        )
        self._watch(known)

    def _move_agent(self, known: Agent, node: NodeSettings) -> None:
        log.info("agent moved", extra={"instance": known.id, "url": node.agent.url})
        self._leave(known)
        self._links.agent_backends[known.id] = self._links.new_agent(node)
        self._watch(known)

    def _leave(self, known: Member | Agent) -> None:
        if known.health is Health.UP:  # The instance has come up since the change was checked.
            self._watchers[known.id].lose("it is at another address")
        self._unwatch(known.id)

    def _watch(self, known: Member | Agent) -> None:
        watcher = Watcher(known, self._driver, self._settings, self._gossip_view)
        self._watchers[known.id] = watcher
        self._gossip_view.follow(known.id, known.node, watcher.look)
        if self._group is not None:
            self._start(watcher)

    def _start(self, watcher: Watcher) -> None:
        assert self._group is not None
        work = keep_running(TaskKind.WATCHER, watcher.run, self._metrics.task_failed)
        self._watches[watcher.id] = self._group.create_task(work)

    def _unwatch(self, name: InstanceId) -> None:
        del self._watchers[name]
        self._gossip_view.leave(name)
        # The watch runs already; cancel it.
        if (watch := self._watches.pop(name, None)) is not None:
            watch.cancel()

    async def _order_ranks(self) -> None:
        """Order ranks on failing GPUs to leave, and ranks whose GPUs have recovered to return."""
        while True:
            await asyncio.sleep(_GPUS_INTERVAL_S)
            await asyncio.gather(*map(self._order, self._driver.control.gpus.take_due()))

    async def _order(self, due: RankDue) -> None:
        control = self._driver.control
        refused, facts = False, {"instance": due.instance, "rank": due.rank, "gpu": due.gpu}
        try:
            order = RankOrder(due.instance, due.rank, due.leaves)
            await pass_on(order, control, self._links.backends)
        except RequestError as error:
            refused = True
            facts["cause"] = str(error)
        doing = "leaves its failing GPU" if due.leaves else "comes back to its GPU"
        log.warning("a rank %s", f"cannot: {doing}" if refused else doing, extra=facts)
        control.gpus.answered(due, refused=refused)


def _instances(config: Config) -> dict[InstanceId, tuple[NodeSettings, InstanceSettings]]:
    return {instance.id: (node, instance) for node, instance in config.cluster.instances()}


def _place(node: NodeSettings, instance: InstanceSettings) -> tuple[object, ...]:
    return node.id, instance.role
