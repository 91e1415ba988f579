"""Faults that no order to a process can cause, and a simulator can: lost reports, error events,
GPUs that fail, instances that drain, proxies that die or get other settings, gossip that is false.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvrs.config.file import Config
from kvrs.config.policy import Dispatch, PolicyName
from kvrs.core.configured import Configured
from kvrs.core.model.member import Health
from kvrs.core.watch import gone, remove
from kvrs.protocol.instance import GpuHealth, GpuState
from kvrs.transfer.meter import Measurement
from kvrs_lab.sim.cluster import CUT, MOVED, SimCluster, holders_of, mirrored, open_streams
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.fault_scenarios import FaultEvent
from kvrs_lab.sim.process import Clock, require
from kvrs_lab.sim.proxy import SimProxy
from kvrs_lab.sim.ranks import SimRanks
from kvrs_lab.sim.streams import Arrival, SimJournal
from kvrs_lab.sim.world import World
from kvrs_testkit import death_scenarios
from kvrs_testkit.half_deaths import HalfDeaths


class DisturbedWorld(World):
    """A world whose deaths may be disturbances: events without a fault of the language."""

    def __init__(
        self,
        config: Config,
        arrivals: Sequence[Arrival],
        deaths: Sequence[FaultEvent],
        **settings: Any,
    ) -> None:
        """Take the arguments of `World`."""
        super().__init__(config, arrivals, deaths, **settings)
        self._disturbances = Disturbances(self.cluster)
        self._others = [death for death in deaths if not death.faults]

    def _begin(self) -> None:
        super()._begin()
        others, self._others = self._others, []
        for death in others:
            self.cluster.clock.after(death.at_s, partial(self._disturbances.strike, death))

    def _is_over(self) -> bool:
        return super()._is_over() and not self._disturbances.is_moving


class Disturbances:
    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._half_deaths = HalfDeaths(cluster)
        self._moving = 0  # Streams that their clients are about to resume.

    @property
    def is_moving(self) -> bool:
        return bool(self._moving or self._half_deaths.moving)

    def strike(self, death: FaultEvent) -> None:
        """Apply a fault that only a simulator can cause."""
        match death.name:
            case death_scenarios.LOST_REPORTS:
                self._lose_reports()
            case death_scenarios.ERROR_EVENT:
                self._fail_one()
            case death_scenarios.GPU_DEGRADED | death_scenarios.GPU_FAILING:
                fails = death.name == death_scenarios.GPU_FAILING
                self._judge_gpu(death.name, GpuState.FAILING if fails else GpuState.DEGRADED)
            case death_scenarios.DRAINED:
                self._drain()
            case death_scenarios.DRAIN_ORDERED:
                self._order_drain()
            case death_scenarios.REMOVED:
                self._remove()
            case death_scenarios.SICK:
                self._sicken()
            case death_scenarios.PROXY_KILLED:
                self._kill_proxy()
            case death_scenarios.FALSE_GOSSIP:
                self._gossip_falsely()
            case death_scenarios.RELOADED:
                self._reload()
            case (
                death_scenarios.TWO_RANKS
                | death_scenarios.TOO_MANY_RANKS
                | death_scenarios.MID_MOVE
                | death_scenarios.LATE
            ):
                self._lose_ranks(death.name)
            case death_scenarios.LEAVES:
                self._let_leave()
            case _:
                require(self._half_deaths.strike(death.name), death.name)

    def _fail_one(self) -> None:
        """Fail one stream of an engine that has some."""
        cluster = self._cluster
        busy = [each for each in cluster.engines.values() if each.is_running and each.runs]
        if busy and (stream := cluster.rng.choice(busy).fail_one()) is not None:
            cluster.note(death_scenarios.ERROR_EVENT, str(stream), 1)

    def _lose_reports(self) -> None:
        proxies = self._cluster.running_proxies()
        if not proxies:
            return
        proxy, name = (
            self._cluster.rng.choice(proxies),
            self._cluster.rng.choice(list(self._cluster.holders)),
        )
        proxy.fleet.backend(name).drop += self._cluster.rng.randint(1, 4)
        hit = sum(name in (live.instance, *holders_of(live)) for live in open_streams(proxy))
        self._cluster.note(death_scenarios.LOST_REPORTS, f"{proxy.name} of {name}", hit)

    def _judge_gpu(self, death: str, state: GpuState) -> None:
        """Gossip brings every proxy the news, each at its own moment; in the end the GPU is healthy
        again, or its instance dies.
        """
        engine = self._cluster.any_engine()
        if engine is None:
            return
        self._cluster.note(death, engine.id, self._cluster.streams_on(engine.id))
        self._tell_gpu(engine, state)
        if state is GpuState.FAILING and self._cluster.rng.random() < 0.5:
            self._cluster.clock.after(
                self._cluster.rng.uniform(0.3, 3.0), partial(self._cluster.end, engine, engine.life)
            )
        self._cluster.clock.after(
            self._cluster.rng.uniform(1.0, 6.0), partial(self._tell_gpu, engine, GpuState.HEALTHY)
        )

    def _tell_gpu(self, engine: SimEngine, state: GpuState) -> None:
        reason = "" if state is GpuState.HEALTHY else "xid 79"
        gpu = GpuHealth(str(engine.id), 0, state, reason, 0.0)
        for proxy in self._cluster.running_proxies():
            seen = partial(proxy.control.gpus_seen, engine.node, [gpu])
            proxy.after(
                self._cluster.rng.uniform(0.01, 0.6), partial(_with_time, seen, self._cluster.clock)
            )

    def _drain(self) -> None:
        """It reports that it is draining, and ends later with whatever is still there."""
        engine = self._cluster.any_engine()
        if engine is not None and not engine.draining:
            self._cluster.note(
                death_scenarios.DRAINED, engine.id, self._cluster.streams_on(engine.id)
            )
            engine.draining = True
            self._cluster.clock.after(
                self._cluster.rng.uniform(0.3, 5.0), partial(self._cluster.end, engine, engine.life)
            )

    def _order_drain(self) -> None:
        """Every proxy is told at its own moment, and later that it is over; meanwhile the process
        may be replaced by another one.
        """
        cluster, rng = self._cluster, self._cluster.rng
        engine = cluster.any_engine()
        if engine is None:
            return
        cluster.note(death_scenarios.DRAIN_ORDERED, engine.id, cluster.streams_on(engine.id))
        drain_s = rng.choice([0.0, rng.uniform(0.1, 3.0)])
        for proxy in cluster.running_proxies():
            order = partial(proxy.control.drains.begin, engine.id, drain_s)
            proxy.after(rng.uniform(0.0, 0.5), partial(_with_time, order, cluster.clock))
            end = partial(proxy.control.drains.end, engine.id)
            proxy.after(rng.uniform(1.0, 8.0), partial(_with_time, end, cluster.clock))
        if rng.random() < 0.5:
            cluster.clock.after(rng.uniform(0.5, 4.0), partial(cluster.end, engine, engine.life))

    def _remove(self) -> None:
        """Every proxy is told at its own moment; where streams have left the instance, it is added
        again a while later.
        """
        engine = self._cluster.any_engine()
        if engine is None:
            return
        self._cluster.note(death_scenarios.REMOVED, engine.id, self._cluster.streams_on(engine.id))
        for proxy in self._cluster.running_proxies():
            wait_s = self._cluster.rng.uniform(0.0, 0.5)
            proxy.after(wait_s, partial(self._remove_at, proxy, engine))

    def _remove_at(self, proxy: SimProxy, engine: SimEngine) -> None:
        rng, now_s = self._cluster.rng, self._cluster.clock.now_s
        if proxy.control.instances.known[engine.id].health is Health.REMOVED:
            return
        if remove(proxy.control, engine.id, rng.uniform(0.0, 2.0), now_s):
            self._come_back(proxy, engine)
        else:
            self._see_off(proxy, engine)

    def _see_off(self, proxy: SimProxy, engine: SimEngine) -> None:
        if proxy.control.instances.known[engine.id].health is Health.REMOVED:
            return
        if gone(proxy.control, self._cluster.clock.now_s):
            self._come_back(proxy, engine)
        else:
            proxy.after(0.05, partial(self._see_off, proxy, engine))

    def _come_back(self, proxy: SimProxy, engine: SimEngine) -> None:
        proxy.fleet.leave(engine.id)
        again = partial(_add_again, proxy, engine)
        proxy.after(self._cluster.rng.uniform(0.1, 3.0), again)

    def _sicken(self) -> None:
        """It answers every call with an error, at once, and its reports are healthy."""
        engine = self._cluster.any_engine()
        if engine is None:
            return
        self._cluster.note(death_scenarios.SICK, engine.id, self._cluster.streams_on(engine.id))
        engine.answer = self._cluster.rng.choice(["HTTP 404", "HTTP 500", "HTTP 503"])
        self._cluster.clock.after(
            death_scenarios.SICK_FOR_S, partial(setattr, engine, "answer", None)
        )

    def _lose_ranks(self, death: str) -> None:
        """Two at once, all but one with their devices, one while the instance re-forms without
        another, or one whose re-forming takes five times as long as was said.
        """
        rng, clock = self._cluster.rng, self._cluster.clock
        if (found := self._with_ranks(death)) is None:
            return
        engine, ranks = found
        kept = rng.random() < 0.3
        first, *others = rng.sample(ranks.layout.ranks, 2)
        if death == death_scenarios.LATE:
            ranks.late_factor = 5.0
        match death:
            case death_scenarios.TWO_RANKS:
                ranks.lose([first, *others], kept)
            case death_scenarios.TOO_MANY_RANKS:
                ranks.lose(
                    [rank for rank in ranks.layout.ranks if rank != first], memory_kept=False
                )
            case _:
                ranks.lose([first], kept)
        if death == death_scenarios.MID_MOVE:
            again = partial(self._lose_again, engine, engine.life, others)
            clock.after(rng.uniform(0.0, 0.3), again)

    def _with_ranks(self, death: str) -> tuple[SimEngine, SimRanks] | None:
        """An instance that computes with several ranks, one with streams if there is one."""
        having = [
            (engine, engine.ranks)
            for engine in self._cluster.engines.values()
            if engine.is_running
            and isinstance(engine.ranks, SimRanks)
            and len(engine.ranks.layout.ranks) > 1
        ]
        if not having:
            return None
        busy = [each for each in having if self._cluster.streams_on(each[0].id)]
        engine, ranks = self._cluster.rng.choice(busy or having)
        self._cluster.note(death, engine.id, self._cluster.streams_on(engine.id))
        return engine, ranks

    def _let_leave(self) -> None:
        """A rank leaves by order, and is had back later. As it leaves it may be lost, or another
        one.
        """
        rng, clock = self._cluster.rng, self._cluster.clock
        if (found := self._with_ranks(death_scenarios.LEAVES)) is None:
            return
        engine, ranks = found
        leaving, other = rng.sample(ranks.layout.ranks, 2)
        if not ranks.order(leaving, leaves=True):
            return
        lost = rng.choice([None, None, leaving, other])
        if lost is not None:
            again = partial(self._lose_again, engine, engine.life, [lost])
            clock.after(rng.uniform(0.0, 0.05), again)
        clock.after(rng.uniform(1.0, 5.0), partial(self._have_back, engine, engine.life, leaving))

    def _have_back(self, engine: SimEngine, life: int, rank: int) -> None:
        if engine.is_running and engine.life == life and isinstance(engine.ranks, SimRanks):
            engine.ranks.order(rank, leaves=False)

    def _lose_again(self, engine: SimEngine, life: int, ranks: list[int]) -> None:
        if engine.is_running and engine.life == life and isinstance(engine.ranks, SimRanks):
            engine.ranks.lose(ranks, memory_kept=False)

    def _kill_proxy(self) -> None:
        """Its clients resume keyed streams at another proxy, from its mirror's record; another
        process is started in its place.
        """
        running = self._cluster.running_proxies()
        if not running:
            return
        proxy = self._cluster.rng.choice(running)
        open_ = proxy.die()
        self._cluster.note(death_scenarios.PROXY_KILLED, proxy.name, len(open_))
        others = [other for other in running if other is not proxy]
        for live in open_:
            if not live.journal.resumable or not others:
                proxy.settle(live, CUT)
                continue
            proxy.settle(live, MOVED)
            journal = mirrored(live, proxy, self._cluster.rng)
            self._moving += 1
            adopt = partial(self._adopt, self._cluster.rng.choice(others), journal)
            self._cluster.clock.after(self._cluster.rng.uniform(0.005, 0.5), adopt)
        place = self._cluster.serving.index(proxy)
        self._cluster.clock.after(
            self._cluster.rng.uniform(0.2, 2.0), partial(self._replace_proxy, place)
        )

    def _adopt(self, proxy: SimProxy, journal: SimJournal) -> None:
        self._moving -= 1
        if proxy.is_alive:
            proxy.adopt(journal)
            self._cluster.outcome.adopted += 1
        else:
            self._cluster.outcome.ended[CUT] += 1

    def _replace_proxy(self, place: int) -> None:
        self._cluster.serving[place] = proxy = self._cluster.new_proxy()
        proxy.begin()
        self._cluster.log.append(
            f"{self._cluster.clock.now_s:.6f} {proxy.name} takes the place of a dead one"
        )

    def _gossip_falsely(self) -> None:
        """A process that runs is gossiped dead: nothing may be lost while it reports."""
        engine = self._cluster.any_engine()
        if engine is None:
            return
        self._cluster.note(
            death_scenarios.FALSE_GOSSIP, engine.id, self._cluster.streams_on(engine.id)
        )
        for proxy in self._cluster.running_proxies():
            gossip, name = proxy.fleet.gossip, engine.id
            died = partial(gossip.died, name, engine.epoch)
            proxy.after(self._cluster.rng.uniform(0.0, 0.5), died)
            proxy.after(self._cluster.rng.uniform(1.0, 3.0), gossip.withdrawn, name)
            measured = Measurement(
                10 ** self._cluster.rng.uniform(7.0, 10.0), 0.0, self._cluster.rng.uniform(0, 5)
            )
            source = self._cluster.rng.choice(list(self._cluster.holders.values())).node
            linked = partial(proxy.control.link_measured, source, engine.node, measured)
            proxy.after(
                self._cluster.rng.uniform(0.0, 0.5),
                partial(_with_time, linked, self._cluster.clock),
            )

    def _reload(self) -> None:
        """Every proxy gets other settings, each at its own moment."""
        rng, config = self._cluster.rng, self._cluster.config
        rng.choice(range(2))  # A seed draws what it drew when there was one setting more.
        policy = {
            "name": rng.choice(list(PolicyName)),
            "dispatch": rng.choice(list(Dispatch)),
        }
        slo = {"abort": rng.random() < 0.25, "recovery_gap_s": rng.choice([1.0, 10.0])}
        after = config.model_copy(
            update={
                "policy": config.policy.model_copy(update=policy),
                "slo": config.slo.model_copy(update=slo),
            }
        )
        proxies = self._cluster.running_proxies()
        hit = sum(len(list(open_streams(proxy))) for proxy in proxies)
        self._cluster.note(death_scenarios.RELOADED, "proxies", hit)
        for proxy in proxies:
            proxy.after(rng.uniform(0.0, 0.5), partial(self._reload_at, proxy, after))

    def _reload_at(self, proxy: SimProxy, after: Config) -> None:
        proxy.control.reload(Configured.of(after), self._cluster.clock.now_s)


def _with_time(call: Callable[[float], None], clock: Clock) -> None:
    call(clock.now_s)


def _add_again(proxy: SimProxy, engine: SimEngine) -> None:
    known = proxy.control.instances.add(engine.id, engine.node, engine.role)
    proxy.fleet.watch(known)
