"""A whole cluster in virtual time: proxies, instances, agents, links and what happens to them. It checks the laws as it runs."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import msgspec

from kvrs.agent.config import BackupMode
from kvrs.config import Config
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.catalog import kv_geometry
from kvrs.protocol.tags import root_tag
from kvrs.replay.faults import DueFault, FaultSchedule, InstanceView, Phase, VictimRole, What, phase_of
from kvrs.scheduling.pace import Pace
from kvrs.sim.agent import SimAgent
from kvrs.sim.deaths import ERROR_EVENT, LOST_REPORTS, Death
from kvrs.sim.engine import SimEngine
from kvrs.sim.laws import Laws
from kvrs.sim.links import Links
from kvrs.sim.process import Clock, require
from kvrs.sim.proxy import SimProxy
from kvrs.sim.site import Holder, Site
from kvrs.sim.streams import Arrival, Live

PACE = "opt-13b-a100-distserve-tp1"  # Where the configuration names none.
LOOK_S = 0.01  # How often the faults that are left look whether their time has come.
STEPS_MAX = 5_000_000
LONGEST_S = 3600.0  # Nothing that is not stuck takes that long behind the last arrival.


@dataclass(frozen=True, slots=True)
class Hit:
    """One fault that was carried out."""

    death: str
    at_s: float
    whom: str
    streams: int  # That counted on the victim.


@dataclass(slots=True)
class Outcome:
    """What became of one simulated run."""

    ended: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)
    recovered_streams: int = 0
    pauses_s: list[float] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    never_due: list[str] = field(default_factory=list)
    dropped_tokens: int = 0  # Of attempts that were over.
    slot_denials: int = 0  # By agents, because other proxies had the slots.
    unarbitrated: int = 0  # Recoveries by fetching whose agent could not be asked.
    tokens: int = 0
    span_s: float = 0.0
    steps: int = 0


class World:
    def __init__(
        self,
        config: Config,
        arrivals: Sequence[Arrival],
        deaths: Sequence[Death],
        *,
        seed: int,
        proxies: int = 1,
        stay_away: float = 0.1,
        keep_log: bool = False,
    ) -> None:
        """`stay_away` is the chance that what was killed is not back for 20 s or more."""
        self.rng = Random(seed)
        self.clock = Clock()
        pace = Pace(config.cluster.engine.pace or PACE)
        geometry = msgspec.structs.replace(
            kv_geometry(config.cluster.engine.pace or PACE), page_size_tokens=config.cluster.engine.page_size_tokens
        )
        backup = config.backup
        rate = config.transfer.link_bytes_per_s or config.policy.assumed_link_bytes_per_s
        self.links = Links(self.clock, rate, backup.host_to_device_bytes_per_s, config.transfer.stall_timeout_s)
        self._site = site = Site(config, self.clock, self.links, pace, geometry, root_tag("simulated"))
        self.engines = {
            instance.id: SimEngine(instance.id, node.id, instance.role, site) for node, instance in config.cluster.instances()
        }
        nodes = config.cluster.nodes if backup.mode is not BackupMode.OFF else []
        self.agents = {node.agent_id: SimAgent(node.agent_id, node.id, site) for node in nodes}
        site.holders.update(self.engines)
        site.holders.update(self.agents)
        self._laws = Laws(config, {holder.id: holder.node for holder in site.holders.values()})
        self.proxies = [SimProxy(f"proxy{n}", site, self._laws, self.rng, keep_log=keep_log) for n in range(proxies)]
        self._arrivals = arrivals
        self._deaths = {id(fault): death for death in deaths for fault in death.faults}
        self._others = [death for death in deaths if not death.faults]
        self._schedule = FaultSchedule([fault for death in deaths for fault in death.faults], seed)
        self._stay_away = stay_away
        self._sent = 0
        self.outcome = Outcome()
        self.log: list[str] = []  # What happened to whom, for people and for comparison.

    def run(self) -> Outcome:
        """Until every stream has ended and everything is at rest.

        Raises:
            LawBrokenError, AssertionError: something happened that must not.
        """
        for holder in (*self.engines.values(), *self.agents.values()):
            holder.start()
        for proxy in self.proxies:
            proxy.begin()
        for number, asked in enumerate(self._arrivals):
            self.clock.after(asked.at_s, partial(self._arrive, number, asked))
        for death in self._others:
            self.clock.after(death.at_s, partial(self._strike_otherwise, death))
        self.clock.after(LOOK_S, self._strike)
        last_s = max((asked.at_s for asked in self._arrivals), default=0.0)
        self.clock.run(last_s + LONGEST_S, self._is_over)
        open_ = [live.id for proxy in self.proxies for live in proxy.streams.values() if not live.outcome]
        require(self._is_over(), f"{len(open_)} streams never end: {open_[:5]}")
        self.outcome.span_s = self.clock.now_s
        self._come_to_rest()
        self._sum_up()
        return self.outcome

    def _arrive(self, number: int, asked: Arrival) -> None:
        self._sent += 1
        self.proxies[number % len(self.proxies)].arrive(StreamId(f"s{number}"), asked)

    def _is_over(self) -> bool:
        assert self.clock.steps < STEPS_MAX, "the world does not come to rest"
        return self._sent == len(self._arrivals) and all(
            live.outcome for proxy in self.proxies for live in proxy.streams.values()
        )

    def _come_to_rest(self) -> None:
        """Wake and mend everything, and wait until all leases have run out."""
        self.outcome.never_due = sorted({self._deaths[id(fault)].name for fault in self._schedule.pending})
        for holder in self._site.holders.values():
            if holder.frozen:
                holder.wake()
            elif not holder.alive:
                holder.start()
        self.links.look()
        self.clock.run(self.clock.now_s + 2 * self._site.config.transfer.lease_s + 15.0)
        for proxy in self.proxies:
            self._laws.check_at_rest(proxy.policy, proxy.name)
        for holder in (*self.engines.values(), *self.agents.values()):
            if holder.is_running:
                holder.check_at_rest()
        require(not self.links.under_way, f"{self.links.under_way} transfers never end")

    def _sum_up(self) -> None:
        outcome = self.outcome
        outcome.steps = self.clock.steps
        for proxy in self.proxies:
            lives = proxy.streams.values()
            outcome.ended.update(live.outcome for live in lives)
            outcome.tokens += sum(len(live.output) for live in lives)
            outcome.recovered_streams += sum(live.recoveries > 0 for live in lives)
            outcome.recoveries.update(proxy.recoveries)
            outcome.pauses_s += proxy.pauses_s
            outcome.dropped_tokens += proxy.dropped_tokens
            outcome.slot_denials += proxy.slots.denials
            outcome.unarbitrated += proxy.slots.unarbitrated

    # Deaths.

    def _strike(self) -> None:
        elapsed_s = self.clock.now_s
        if self._schedule.wants_a_look(elapsed_s, self._sent):
            for due in self._schedule.due(elapsed_s, self._sent, self._views()):
                self._carry_out(due)
        if self._schedule.pending:
            self.clock.after(LOOK_S, self._strike)

    def _views(self) -> dict[InstanceId, InstanceView]:
        """Every instance and agent that is up, and the streams that count on it."""
        works: Counter[InstanceId] = Counter()
        counts: defaultdict[InstanceId, dict[StreamId, Phase]] = defaultdict(dict)
        for live in (live for proxy in self.proxies for live in proxy.streams.values() if not live.outcome):
            phase = phase_of(live.at.value, len(live.output), live.asked.max_tokens, live.recovers)
            if phase is None or live.runs_on is None or live.plan is None:
                continue
            works[live.runs_on] += 1
            named = [live.runs_on, live.prefilled_at, live.plan.decode, *(agent for agent, pages in live.copies.items() if pages)]
            for name in named:
                if name is not None:
                    counts[name][live.id] = phase
        roles = {name: VictimRole(engine.role.value) for name, engine in self.engines.items()}
        roles |= dict.fromkeys(self.agents, VictimRole.AGENT)
        return {
            name: InstanceView(roles[name], holder.node, len(counts[name]) if name in self.agents else works[name], counts[name])
            for name, holder in self._site.holders.items()
            if holder.is_running
        }

    def _carry_out(self, due: DueFault) -> None:
        fault, death = due.fault, self._deaths[id(due.fault)]
        self._note(death.name, due.whom, len(due.streams))
        victims = [self._site.holders[name] for name in due.instances]
        for_s = fault.for_s or 0.0
        match fault.what:
            case What.KILL:
                is_node = fault.whom.node is not None and fault.whom.role is None
                for victim in victims:
                    self._kill(victim, with_node=is_node)
            case What.STOP:
                for victim in victims:
                    victim.freeze()
                    self.clock.after(for_s, partial(self._wake, victim, victim.life))
            case What.SLOW:
                for victim in victims:
                    if isinstance(victim, SimEngine):
                        victim.slow_factor = fault.factor or 1.0
                        self.clock.after(for_s, partial(_mend, victim, victim.life))
            case What.LINK_RATE:
                one, other = _ends(fault.whom.link)
                self.links.limit(one, other, fault.bytes_per_s)
                self.clock.after(for_s, lambda: self.links.limit(one, other, None))
            case What.LINK_CUT:
                one, other = _ends(fault.whom.link)
                self.links.cut(one, other, for_s)
            case What.CORRUPT_PAGE:
                for victim in victims:
                    victim.corrupt_pages += fault.pages or 0

    def _kill(self, holder: Holder, *, with_node: bool) -> None:
        """With its node nobody is left who would reset connections, and the node's memory is lost."""
        if isinstance(holder, SimEngine):
            holder.kill(silently=with_node)
        else:
            holder.kill()
        if with_node and isinstance(holder, SimAgent):
            holder.lose_memory()
        self.links.drop(holder)
        if not with_node:
            for proxy in self.proxies:
                proxy.watches[holder.id].reset()
        back_s = self.rng.uniform(20.0, 60.0) if self.rng.random() < self._stay_away else self.rng.uniform(0.2, 4.0)
        self.clock.after(back_s, partial(self._bring_back, holder, holder.life))

    def _bring_back(self, holder: Holder, life: int) -> None:
        if not holder.alive and holder.life == life:
            holder.start()
            self.log.append(f"{self.clock.now_s:.6f} {holder.id} is back")

    def _wake(self, holder: Holder, life: int) -> None:
        if holder.alive and holder.frozen and holder.life == life:
            self.log.append(f"{self.clock.now_s:.6f} {holder.id} wakes")
            holder.wake()
            self.links.look()

    def _strike_otherwise(self, death: Death) -> None:
        proxy = self.rng.choice(self.proxies)
        name = self.rng.choice(list(self._site.holders))
        if death.name == LOST_REPORTS:
            proxy.watches[name].drop += self.rng.randint(1, 4)
            hit = sum(name in (live.runs_on, live.prefilled_at) or name in live.copies for live in _open(proxy))
            self._note(death.name, f"{proxy.name} of {name}", hit)
        else:
            assert death.name == ERROR_EVENT
            running = [engine for engine in self.engines.values() if engine.is_running]
            victim = self.rng.choice(running) if running else None
            stream = None if victim is None else victim.fail_one()
            if stream is not None:
                self._note(death.name, str(stream), 1)

    def _note(self, death: str, whom: str, streams: int) -> None:
        self.outcome.hits.append(Hit(death, self.clock.now_s, whom, streams))
        self.log.append(f"{self.clock.now_s:.6f} {death}: {whom}, {streams} streams")


def _open(proxy: SimProxy) -> Iterator[Live]:
    return (live for live in proxy.streams.values() if not live.outcome)


def _mend(engine: SimEngine, life: int) -> None:
    if engine.life == life:
        engine.slow_factor = 1.0


def _ends(link: list[NodeId] | None) -> tuple[NodeId, NodeId]:
    assert link is not None
    one, other = link
    return one, other
