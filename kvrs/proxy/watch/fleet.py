"""Watches of all instances and agents, which follow the configuration while the proxy runs."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping

import msgspec

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.config.file import Config
from kvrs.config.proxy import ProxySettings
from kvrs.core.fleet.drains import RankDue
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Health, Member
from kvrs.core.watch import gone, remove, remove_agent
from kvrs.errors import ConfigError, RequestError
from kvrs.ids import InstanceId
from kvrs.net.proving import instance_keys
from kvrs.protocol.instance import Role
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.backends.cluster import open_backend
from kvrs.proxy.fleet.orders import RankOrder, pass_on
from kvrs.proxy.fleet.supervision import TaskKind, keep_running
from kvrs.proxy.reload import Apply, ReloadingPart
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.watch.gossip_view import GossipView
from kvrs.proxy.watch.watcher import Watcher
from kvrs.proxy.wire.peer import AgentBackend
from kvrs.proxy.wire.upstream import EngineLinks

log = logging.getLogger(__name__)

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
