"""A cluster in virtual time with its clients and faults. Invariants are checked at run time."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, nextafter
from random import Random
from typing import assert_never

from kvrs.config.file import Config
from kvrs.core.books.at_agents import SlotOutcome
from kvrs.core.configured import Configured
from kvrs.core.model import actions as act
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.process.memory import collect_seldom
from kvrs_lab.faults.language import Phase, VictimRole, What, phase_of
from kvrs_lab.faults.schedule import DueFault, FaultSchedule, InstanceView
from kvrs_lab.sim.clients import stream_of
from kvrs_lab.sim.cluster import MOVED, Outcome, SimCluster, holders_of, open_streams
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.fault_scenarios import FaultEvent
from kvrs_lab.sim.first_token import FirstToken
from kvrs_lab.sim.process import require
from kvrs_lab.sim.proxy import SimProxy
from kvrs_lab.sim.rank_model import PipelineModel
from kvrs_lab.sim.ranks import SimRanks
from kvrs_lab.sim.recovering import SimDraftModel
from kvrs_lab.sim.streams import Arrival

LOOK_S = 0.01  # Interval of checks for due faults.
# Longest time after the last arrival and the longest waits, unless a stream is stuck.
LONGEST_S = 3600.0
# Outcomes of streams that lost nothing, or were refused by overloaded queues.
_NOT_LOST = ("complete", MOVED, act.Reason.OVERLOADED.value)


class World:
    def __init__(
        self,
        config: Config,
        arrivals: Sequence[Arrival],
        deaths: Sequence[FaultEvent],
        *,
        seed: int,
        proxies: int = 1,
        stay_away: float = 0.1,
        reload_s: float | None = None,
        load_s: float = 0.0,
        probes: bool = False,
        is_supervised: bool = False,
        keep_log: bool = False,
        pipeline_model: PipelineModel | None = None,
        draft_model: SimDraftModel | None = None,
        first_token: FirstToken = FirstToken.DECODE,
    ) -> None:
        """Take the arguments of `SimCluster`."""
        self.cluster = SimCluster(
            config,
            seed=seed,
            proxies=proxies,
            stay_away=stay_away,
            reload_s=reload_s,
            load_s=load_s,
            probes=probes,
            is_supervised=is_supervised,
            keep_log=keep_log,
            pipeline_model=pipeline_model,
            draft_model=draft_model,
            first_token=first_token,
        )
        self._tally = self.cluster.tally  # Read before each step.
        self.arrivals = arrivals
        self._seed = seed
        self._expect(deaths)  # Sets the schedule.
        self._has_begun = False
        self._sent = 0
        self._unread = 0  # Requests that a frozen proxy has not read.

    def run(self) -> Outcome:
        """Run until every stream has ended and all processes are at rest.

        Raises:
            InvariantError, AssertionError: an invariant is broken.
        """
        with collect_seldom(), self._running():
            # The world is not over before the last request.
            last_s = max((asked.at_s for asked in self.arrivals), default=0.0)
            self._begin()
            self.cluster.clock.run(nextafter(last_s, -inf))
            policy = self.cluster.config.policy
            waits_s = policy.recovery.wait_s + policy.admission.wait_s
            self.cluster.clock.run(last_s + waits_s + LONGEST_S, self._is_over)
            open_ = [live.id for proxy in self.cluster.proxies for live in open_streams(proxy)]
            require(self._is_over(), f"{len(open_)} streams never end: {open_[:5]}")
            self.cluster.outcome.span_s = self.cluster.clock.now_s
            self._come_to_rest()
            self._sum_up()
            self.cluster.close()
            return self.cluster.outcome

    def run_before(self, at_s: float) -> bool:
        """Run all steps before a time; `run` continues from there. Return False if every stream has
        ended.
        """
        with collect_seldom(), self._running():
            self._begin()
            self.cluster.clock.run(nextafter(at_s, -inf), self._is_over)
        return not self._is_over()

    def go_on_with(
        self, deaths: Sequence[FaultEvent], config: Config, draft_model: SimDraftModel | None
    ) -> None:
        """Replace the pending faults, the proxies' policy, and the draft model of restarts."""
        self._expect(deaths)
        self.cluster.draft_model = draft_model
        before, now_s = self.cluster.config, self.cluster.clock.now_s
        for proxy in self.cluster.serving if config.policy != before.policy else ():
            proxy.control.reload(Configured.of(config), now_s)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Disable the logs of senders, which are for operators."""
        before = logging.root.manager.disable
        logging.disable()
        try:
            yield
        except BaseException:
            self.cluster.close()
            raise
        finally:
            logging.disable(before)

    def _expect(self, deaths: Sequence[FaultEvent]) -> None:
        faults = [fault for death in deaths for fault in death.faults]
        self._deaths = {id(fault): death for death in deaths for fault in death.faults}
        self._schedule = FaultSchedule(faults, self._seed, Random)

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self.cluster.begin()
        for number, asked in enumerate(self.arrivals):
            self.cluster.clock.after(asked.at_s, self._arrive, number, asked)
        self.cluster.clock.after(LOOK_S, self._strike)

    def _arrive(self, number: int, asked: Arrival) -> None:
        """Send a request to the proxies in turn. Clients skip a dead proxy."""
        self._sent += 1
        serving = self.cluster.serving
        turns = [serving[(number + n) % len(serving)] for n in range(len(serving))]
        # A frozen proxy accepts connections, and reads them when it wakes.
        able = [proxy for proxy in turns if proxy.is_alive]
        proxy = next((each for each in able if not each.time.is_frozen), next(iter(able), None))
        if proxy is None:
            self.cluster.outcome.ended["refused"] += 1
        elif proxy.time.is_frozen:
            self._unread += 1
            proxy.after(0.0, partial(self._read, proxy, number, asked))
        else:
            proxy.arrive(stream_of(number), asked)

    def _read(self, proxy: SimProxy, number: int, asked: Arrival) -> None:
        self._unread -= 1
        proxy.arrive(stream_of(number), asked)

    def _is_over(self) -> bool:
        return not self._tally.open and self._sent == len(self.arrivals) and not self._unread

    def _come_to_rest(self) -> None:
        """Wake and repair all processes, and wait until all leases have expired."""
        self.cluster.end_probes()
        self.cluster.outcome.never_due = sorted(
            {self._deaths[id(fault)].name for fault in self._schedule.pending}
        )
        for proxy in self.cluster.serving:
            proxy.cut_until_s.clear()
            proxy.time.wake()
        for engine in self.cluster.engines.values():
            engine.hangs = False
        for holder in self.cluster.holders.values():
            holder.stalls_until_s = 0.0
            if holder.frozen:
                holder.wake()
            elif not holder.alive:
                holder.start()
        self.cluster.links.look()
        load_s = max((host.load_s for host in self.cluster.hosts), default=0.0)
        self.cluster.clock.run(
            self.cluster.clock.now_s + 2 * self.cluster.config.transfer.lease_s + 15.0 + load_s
        )
        for proxy in self.cluster.serving:
            proxy.invariants.check_at_rest(proxy.control, proxy.name)
        for holder in (*self.cluster.engines.values(), *self.cluster.agents.values()):
            if holder.is_running:
                holder.check_at_rest()
        require(
            not self.cluster.links.under_way, f"{self.cluster.links.under_way} transfers never end"
        )

    def _sum_up(self) -> None:
        outcome = self.cluster.outcome
        outcome.steps = self.cluster.clock.steps
        engines = self.cluster.engines.values()
        outcome.prompt_tokens = sum(engine.prompt_tokens for engine in engines)
        outcome.cached_tokens = sum(engine.cached_tokens for engine in engines)
        for proxy in self.cluster.proxies:
            lives = proxy.streams.values()
            outcome.ended.update(live.outcome for live in lives if live.outcome != MOVED)
            innocents = [live.outcome for live in lives if not live.arrival.is_poison]
            outcome.innocents_refused += innocents.count(act.Reason.POISON.value)
            outcome.innocents_lost += sum(each not in _NOT_LOST for each in innocents)
            outcome.tokens += sum(len(live.output) for live in lives)
            outcome.recovered_streams += sum(live.recoveries > 0 for live in lives)
            outcome.given_up.update(proxy.given_up)
            outcome.recoveries.update(proxy.recoveries)
            outcome.events.update(proxy.events)
            outcome.actions.update(proxy.actions)
            outcome.pauses_s += proxy.pauses_s
            outcome.dropped_tokens += proxy.dropped_tokens
            outcome.slot_denials += proxy.slot_outcomes[SlotOutcome.DENIED]
            outcome.local_grants += proxy.slot_outcomes[SlotOutcome.LOCAL]

    # Deaths.

    def _strike(self) -> None:
        elapsed_s = self.cluster.clock.now_s
        if self._schedule.needs_load(elapsed_s, self._sent):
            for due in self._schedule.due(elapsed_s, self._sent, self._views()):
                self._carry_out(due)
        if self._schedule.pending:
            self.cluster.clock.after(LOOK_S, self._strike)

    def _views(self) -> dict[InstanceId, InstanceView]:
        """Views of all running instances and agents, with the streams that depend on them."""
        works: Counter[InstanceId] = Counter()
        counts: defaultdict[InstanceId, dict[StreamId, Phase]] = defaultdict(dict)
        for live in (
            live
            for proxy in self.cluster.proxies
            for live in proxy.streams.values()
            if not live.outcome
        ):
            phase = phase_of(
                live.stage.value, len(live.output), live.arrival.max_tokens, live.is_interrupted
            )
            if phase is None or live.instance is None or live.attempt.plan is None:
                continue
            works[live.instance] += 1
            for name in (live.instance, live.attempt.plan.decode, *holders_of(live)):
                counts[name][live.id] = phase
        roles = {
            name: VictimRole(engine.role.value) for name, engine in self.cluster.engines.items()
        }
        roles |= dict.fromkeys(self.cluster.agents, VictimRole.AGENT)
        engines = self.cluster.engines.values()
        ranks = {each.id: each.ranks.count for each in engines if isinstance(each.ranks, SimRanks)}
        stages = Counter(host.owner for host in self.cluster.hosts)
        return {
            name: InstanceView(
                roles[name],
                holder.node,
                len(counts[name]) if name in self.cluster.agents else works[name],
                counts[name],
                tuple(range(ranks.get(name, 0))),
                tuple(range(stages[name])),
            )
            for name, holder in self.cluster.holders.items()
            if holder.is_running
        }

    def _kill(self, due: DueFault) -> None:
        fault = due.fault
        is_node = fault.whom.node is not None and fault.whom.role is None
        for name in due.instances:
            if name in due.ranks:
                memory_kept = fault.what is What.KILL
                engine = self.cluster.engines[name]
                assert isinstance(engine.ranks, SimRanks)
                engine.ranks.lose([due.ranks[name]], memory_kept=memory_kept)
            elif name in due.stages:
                self.cluster.host_of(name, due.stages[name]).kill()
            else:
                self.cluster.kill(self.cluster.holders[name], with_node=is_node)

    def _carry_out(self, due: DueFault) -> None:
        fault, death = due.fault, self._deaths[id(due.fault)]
        self.cluster.note(death.name, due.whom, len(due.streams), tuple(due.instances))
        victims = [self.cluster.holders[name] for name in due.instances]
        for_s = fault.for_s or 0.0
        match fault.what:
            case What.KILL | What.LOSE_DEVICE:
                self._kill(due)
            case What.STOP:
                for victim in victims:
                    victim.freeze()
                    self.cluster.clock.after(for_s, partial(self.cluster.wake, victim, victim.life))
            case What.SLOW:
                for victim in victims:
                    if isinstance(victim, SimEngine):
                        victim.slow_factor = fault.factor or 1.0
                        self.cluster.clock.after(for_s, partial(_mend, victim, victim.life))
            case What.LINK_RATE:
                one, other = _ends(fault.whom.link)
                self.cluster.links.limit(one, other, fault.bytes_per_s)
                self.cluster.clock.after(for_s, lambda: self.cluster.links.limit(one, other, None))
            case What.LINK_CUT:
                one, other = _ends(fault.whom.link)
                self.cluster.links.cut(one, other, for_s)
            case What.CORRUPT_PAGE:
                for victim in victims:
                    victim.corrupt_pages += fault.pages or 0
            case _:
                assert_never(fault.what)


def _mend(engine: SimEngine, life: int) -> None:
    if engine.life == life:
        engine.slow_factor = 1.0


def _ends(link: list[NodeId] | None) -> tuple[NodeId, NodeId]:
    assert link is not None
    one, other = link
    return one, other
