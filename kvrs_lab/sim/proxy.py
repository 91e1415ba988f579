"""A simulated proxy: `kvrs.core` in virtual time.

The proxy carries out the core's decisions by messages that take time, and passes late news of
former attempts on to the policy on purpose. Invariants are checked with every event.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from kvrs.core.books.at_agents import SlotOutcome
from kvrs.core.configured import Configured
from kvrs.core.control import Control
from kvrs.core.event_log import event_line, header_line
from kvrs.core.fleet.tested import Continues, Generated, SelfTest, TokensTest, TransferTest
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.streams import Complete, Outcome
from kvrs.ids import InstanceId, StreamId
from kvrs.proxy.fleet.leases import LeaseSender, SlotSender
from kvrs_lab.sim.attempts import SimAttempt
from kvrs_lab.sim.calls import Answer
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.fleet import SimFleet
from kvrs_lab.sim.flows import TokenFlow
from kvrs_lab.sim.invariants import Grants, Invariants
from kvrs_lab.sim.process import OwnTime, require
from kvrs_lab.sim.site import Site
from kvrs_lab.sim.streams import Arrival, SimJournal, SimRecovery, SimStream

_SELF_TEST_S = 0.05
_GENERATED = Generated((), (), Continues.SEEDED)

BOOK_EVERY = 20  # Events between two checks of the policy's books, which are slow.


class SimProxy:
    def __init__(
        self,
        name: str,
        site: Site,
        grants: Grants,
        rng: Random,
        *,
        keep_log: bool,
        lost: Callable[["SimProxy", InstanceId, int], None] = lambda proxy, name, epoch: None,
    ) -> None:
        """Create a proxy; `lost` gets every process that the proxy has lost, for gossip."""
        config = site.config
        self.name = name
        self.is_alive = True
        self.time = OwnTime(site.clock)
        self.cut_until_s: dict[InstanceId, float] = {}  # End of a cut, by process.
        self.streams: dict[StreamId, SimStream] = {}  # Ended streams included.
        self.slot_outcomes: Counter[SlotOutcome] = Counter()
        shell = SimShell(self)
        self.control = Control[SimStream](
            Configured.of(config),
            run_id=name,
            shell=shell,
            trace=shell.trace,
            runs_self_tests=config.proxy.self_test,
        )
        self.log: list[str] | None = (
            [header_line(config.policy, config.slo, config.backup)] if keep_log else None
        )
        self.events: Counter[str] = Counter()  # Events of the policy, by kind.
        self.actions: Counter[str] = Counter()  # Actions of the policy, by kind.
        self.recoveries: Counter[str] = Counter()
        self.recovered: list[SimRecovery] = []
        self.given_up: Counter[str] = Counter()  # Streams by reason and message.
        self.pauses_s: list[float] = []
        self.dropped_tokens = 0
        self.page_size_tokens = config.cluster.engine.page_size_tokens
        self.first_token = site.first_token
        self._site = site
        self._grants = grants
        self._rng = rng
        nodes = {holder.id: holder.node for holder in site.holders.values()}
        self.invariants = Invariants(config, nodes, self.streams)
        self.told = 0  # Number of events.
        self._delays_s = {holder: rng.uniform(0.0001, 0.003) for holder in site.holders}
        self.fleet = SimFleet(name, site, self.control, self.time, self.delay_s, grants, rng)
        self.fleet.gossip.found = partial(lost, self)
        self.slots = SlotSender(self.control.slots, self.fleet.agent_backends)

    # Host of attempts and watches.

    @property
    def now_s(self) -> float:
        return self._site.clock.now_s

    def after(self, delay_s: float, step: Callable[..., None], *args: Any) -> None:
        """Run the step after a delay, unless this proxy has died by then."""
        self.time.after(delay_s, step, *args)

    def answered(self, instance: InstanceId, tokens: list[Answer], flow: TokenFlow | None) -> None:
        """Deliver tokens that arrive together in one step. Tokens of closed connections arrive too,
        as late tokens, which must not count.
        """
        first_s, clock, calls = self.arrives_s(instance), self._site.clock, 0
        if flow is not None and not tokens:
            flow.send(first_s)
            clock.after(first_s - clock.now_s, self._arrive, tokens, flow, flow.calls)
            return
        together: dict[float, list[Answer]] = {}
        if flow is not None:
            flow.send(first_s)
            together[first_s], calls = [], flow.calls
        for answer in tokens:
            at_s = answer[0].in_order_s(first_s)
            if (came := together.get(at_s)) is None:
                came = together[at_s] = []
            came.append(answer)
        for at_s, came in together.items():
            # The first message contains the step of the flow.
            clock.after(at_s - clock.now_s, self._arrive, came, flow, calls)
            flow, calls = None, 0

    def _arrive(self, came: list[Answer], flow: TokenFlow | None, calls: int) -> None:
        self._site.clock.steps += len(came) + calls - 1  # Every token counts as a step.
        self.time.do(self._take, came, flow, calls)

    def _take(self, came: list[Answer], flow: TokenFlow | None, calls: int) -> None:
        now_s = self.now_s
        if flow is not None:
            flow.came(calls, now_s)
        for connection, position, token, is_last in came:
            connection.attempt.token(position, token, is_last, now_s)

    def engine(self, name: InstanceId) -> SimEngine:
        engine = self._site.holders[name]
        assert isinstance(engine, SimEngine)
        return engine

    def delay_s(self, name: InstanceId) -> float:
        delay_s = self._delays_s[name]
        if self.cut_until_s:
            delay_s += max(0.0, self.cut_until_s.get(name, 0.0) - self.now_s)
        return delay_s

    def arrives_s(self, name: InstanceId) -> float:
        return self._site.clock.now_s + (
            self.delay_s(name) if self.cut_until_s else self._delays_s[name]
        )

    def be_near(self) -> None:
        """Set all message delays to 0, for comparisons with systems without messages."""
        self._delays_s = dict.fromkeys(self._delays_s, 0.0)

    def late_news_s(self) -> float | None:
        return self._rng.uniform(0.0, 1.0) if self._rng.random() < 0.3 else None

    def resumed(self, live: SimStream) -> None:
        if live.failed_at_s is not None and len(live.output) > 1:
            self.pauses_s.append(self.now_s - live.failed_at_s)
        live.failed_at_s = None
        if live.last_recovery is not None:
            live.last_recovery.resumed(self.now_s)

    def begin(self) -> None:
        self.fleet.begin()
        control, fleet = self.control, self.fleet
        leases = LeaseSender(
            control.leases,
            fleet.backends,
            control.instances.is_up,
            control.retention_lost,
            fleet.clock,
        )
        checkpoint_leases = LeaseSender(
            control.checkpoints.leases,
            fleet.agent_backends,
            control.agents.is_up,
            control.checkpoints.unknown,
            fleet.clock,
        )
        self.lease_senders = (leases, checkpoint_leases)
        self.after(0.0, self._run_senders)

    def _run_senders(self) -> None:
        for sender in (*self.lease_senders, self.slots):
            self.time.loop.create_task(sender.run())

    def self_test(self) -> None:
        tests = self.control.self_tests
        while (test := tests.next(self.now_s)) is not None:
            self.after(_SELF_TEST_S, self._end_self_test, test)

    def _end_self_test(self, test: SelfTest) -> None:
        """End a self-test: simulated engines pass, unless a process has died."""
        tests, names = self.control.self_tests, test.names
        if not all(map(self.control.instances.is_up, names)):
            tests.failed(test, "lost", self.now_s)
        elif isinstance(test, TokensTest):
            tests.generated(test, _GENERATED)
        elif isinstance(test, TransferTest):
            tests.transferred(test, moved=True)
        for news in tests.news(names):
            self.control.tell(news, self.now_s)
        if (retry_s := tests.next_retry_s(self.now_s)) is not None:
            self.after(max(0.0, retry_s - self.now_s), self.self_test)
        self.self_test()

    # Clients.

    def arrive(self, stream: StreamId, arrival: Arrival) -> None:
        count = len(arrival.prompt_ids)
        guess = self._rng.randint(1, 2 * count) if arrival.is_text else count
        ids = None if arrival.is_text else arrival.prompt_ids
        deadlines = arrival.deadlines
        self.adopt(SimJournal(stream, arrival, self.now_s, guess, ids, deadlines=deadlines))

    def adopt(self, journal: SimJournal) -> None:
        """Open a stream that has just arrived, or that another proxy had."""
        live = self.streams[journal.stream] = SimStream(journal.stream, journal=journal)
        self._site.tally.begun()
        self.control.open(live, self.now_s)

    def settle(self, live: SimStream, how: str) -> None:
        """Record the end of a stream at this proxy."""
        if not live.outcome:
            self._site.tally.over()
        live.outcome, live.ended_s = how, self.now_s

    def die(self) -> list[SimStream]:
        """End the proxy without notice; return its open streams."""
        open_ = [live for live in self.streams.values() if not live.outcome]
        for live in open_:
            if live.run is not None:
                live.run.close()
        self.is_alive = False
        self.time.end()
        self.fleet.die()
        self._grants.proxy_died(self.name)
        return open_


class SimShell:
    """The `Shell` of a simulated proxy, which counts the outcomes."""

    def __init__(self, proxy: SimProxy) -> None:
        self.proxy = proxy

    def begin_attempt(self, live: SimStream, plan: act.Plan) -> None:
        live.run = attempt = SimAttempt(self.proxy, live, plan)
        attempt.begin()

    def can_give_end(self) -> bool:
        return False

    def end_attempt(self, live: SimStream) -> None:
        if live.run is None:
            return
        run, live.run = live.run, None
        run.close()
        if live.failed_at_s is None and not live.outcome:
            live.failed_at_s = self.proxy.now_s

    def catch_up_soon(self) -> None:
        self.proxy.control.catch_up()

    def expect_token(self, live: SimStream) -> None:
        if live.run is not None:
            live.run.expect_token()

    def give_end(self, live: SimStream, plan: act.Plan) -> None:
        raise AssertionError("a simulated proxy has no tokenizer")

    def stream_closed(self, live: SimStream) -> bool:
        return False

    def note(self, event: ev.Event, actions: Sequence[act.Action], now_s: float) -> None:
        for action in actions:
            if isinstance(action, act.Recovered):
                live = self.proxy.streams[action.stream]
                live.option = action.option
                live.recoveries += 1
                live.last_recovery = SimRecovery(
                    action,
                    self.proxy.now_s,
                    None if live.attempt.plan is None else live.attempt.plan.decode,
                    len(live.journal.output_ids),
                    live.journal.last_token_s,
                )
                self.proxy.recovered.append(live.last_recovery)
                self.proxy.recoveries[action.option.value] += 1
            elif isinstance(action, act.Settled):
                last = self.proxy.streams[action.stream].last_recovery
                if last is not None and last.action.attempt == action.attempt:
                    last.settled = action

    def wake_at(self, at_s: float) -> None:
        self.proxy.after(at_s - self.proxy.now_s, self._wake)

    def weights_known(self) -> None: ...

    def post_slots(self, agent: InstanceId) -> None:
        # Slots are released after all victims of this moment have asked.
        proxy = self.proxy
        proxy.after(0.0, proxy.time.loop.do, proxy.slots.post_soon, agent)

    def leases_begun(self) -> None:
        for sender in self.proxy.lease_senders:
            sender.begin()

    def tests_due(self) -> None:
        self.proxy.after(0.0, self.proxy.self_test)

    def count_slot(self, outcome: SlotOutcome) -> None:
        self.proxy.slot_outcomes[outcome] += 1

    def end_stream(self, live: SimStream, outcome: Outcome) -> None:
        assert isinstance(outcome, Complete | act.GiveUp), "greedy streams continue exactly"
        how = "complete" if isinstance(outcome, Complete) else outcome.reason.value
        require(not live.outcome, f"{live.id} ends twice: {live.outcome}, {how}")
        self.proxy.settle(live, how)
        if isinstance(outcome, act.GiveUp):
            self.proxy.given_up[f"{how}: {outcome.message}"] += 1

    def trace(self, now_s: float, event: ev.Event, actions: list[act.Action]) -> None:
        if self.proxy.log is not None:
            self.proxy.log.append(event_line(now_s, event, actions))
        self.proxy.invariants.observe(now_s, event, actions)
        self.proxy.events[type(event).__name__] += 1
        for action in actions:
            self.proxy.actions[type(action).__name__] += 1
        self.proxy.told += 1
        if self.proxy.told % BOOK_EVERY == 0:
            self.proxy.after(
                0.0, lambda: self.proxy.invariants.check_slot_book(self.proxy.control.policy)
            )

    def _wake(self) -> None:
        self.proxy.control.tell(ev.TimerFired(), self.proxy.now_s)
