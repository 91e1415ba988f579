"""A simulated proxy: turns what it hears into events for its policy, and carries out what that asks for. Decides nothing.

It is more careless than the real one (`kvrs/proxy/driver.py`) in one way, on purpose: it passes late news of former attempts on
to the policy, which has to know them for what they are. Tokens of former attempts it drops itself.
"""

from collections import Counter, deque
from functools import partial
from random import Random

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Action, GiveUp, Place, Recovered, Redirect, Settled, Start, WakeAt
from kvrs.policy.costs import Instance
from kvrs.policy.event_log import event_line, header_line
from kvrs.policy.events import (
    AttemptFailed,
    CheckpointsReported,
    Event,
    HolderLost,
    HolderUp,
    InstanceLost,
    InstanceUp,
    LinkMeasured,
    LoadReported,
    PrefillDone,
    RetentionLost,
    SlotDenied,
    StreamArrived,
    StreamEnded,
    StreamResumed,
    TimerFired,
)
from kvrs.policy.recovery import RecoveryPolicy
from kvrs.protocol.frames import TrafficClass
from kvrs.protocol.instance import Capability
from kvrs.scheduling.sources import Source
from kvrs.sim.agent import Holdings, SimAgent
from kvrs.sim.engine import Call, SimEngine, token_at
from kvrs.sim.laws import Laws, Told
from kvrs.sim.process import require
from kvrs.sim.site import Site
from kvrs.sim.slots import Slots
from kvrs.sim.streams import Arrival, At, Line, Live
from kvrs.sim.watches import Leases, Load, Watch

SHORTEST_SILENCE_S = 2.0  # As the proxy's watchdog.
USUAL_INTERVALS = 20
BOOK_EVERY = 20  # Events: to look at the policy's books takes longer than to handle one.


class SimProxy:
    def __init__(self, name: str, site: Site, laws: Laws, rng: Random, *, keep_log: bool) -> None:
        config = site.config
        self.name = name
        self.clock = site.clock
        self.policy = RecoveryPolicy(config.policy, config.slo, config.backup)
        self.streams: dict[StreamId, Live] = {}
        self.watches: dict[InstanceId, Watch] = {}
        self.told = Told()
        self.log: list[str] | None = [header_line(config.policy, config.slo, config.backup)] if keep_log else None
        self.recoveries: Counter[str] = Counter()
        self.pauses_s: list[float] = []
        self.dropped_tokens = 0
        self._site = site
        self._config = config
        self._laws = laws
        self._rng = rng
        self._delays_s = {holder: rng.uniform(0.0001, 0.003) for holder in site.holders}
        self._leases = Leases()
        self.slots = Slots(name, site, laws, rng, self.told.up.__contains__)
        self._events: deque[Event] = deque()
        self._telling = False
        self._rates: dict[tuple[InstanceId, str], float] = {}
        self._progress_s: dict[InstanceId, float] = {}
        self._writers: dict[InstanceId, dict[StreamId, int]] = {holder: {} for holder in site.holders}
        self._ticks = 0
        self._tells = 0

    def begin(self) -> None:
        for holder in self._site.holders.values():
            assert isinstance(holder, SimEngine | SimAgent)
            delay_s = self._delays_s[holder.id]
            late_s = self._rng.uniform(0.0, self._config.proxy.load_interval_s)
            delay = partial(self._report_delay_s, delay_s, late_s)
            watch = Watch(holder, self, self.clock, self._config.proxy.load_interval_s, delay)
            self.watches[holder.id] = watch
            self.clock.after(self._rng.uniform(0.0, 0.2), watch.begin)
        self.clock.after(self._tick_s, self._tick)

    def _report_delay_s(self, delay_s: float, late_s: float) -> float:
        return delay_s + (late_s if self._rng.random() < 0.2 else 0.0)

    # Clients.

    def arrive(self, stream: StreamId, asked: Arrival) -> None:
        live = self.streams[stream] = Live(stream, asked, self.clock.now_s, knows_prompt=not asked.is_text)
        guess = self._rng.randint(1, 2 * len(asked.prompt_ids)) if asked.is_text else len(asked.prompt_ids)
        most = min(guess + asked.max_tokens, self._config.cluster.engine.max_model_len)
        self.tell(StreamArrived(live.id, guess, most))

    # The policy.

    def tell(self, event: Event) -> None:
        self._events.append(event)
        if self._telling:
            return
        self._telling = True
        while self._events:
            event, now_s = self._events.popleft(), self.clock.now_s
            actions = self.policy.handle(event, now_s)
            if self.log is not None:
                self.log.append(event_line(now_s, event, actions))
            for action in actions:
                self._carry_out(action)
            self._laws.check_slots(self.streams.values())
        self._telling = False
        self._tells += 1
        if self._tells % BOOK_EVERY == 0:
            self._laws.check_slot_book(self.streams.values(), self.policy)

    def late_news_s(self) -> float | None:
        """How much later it is noticed once more that a connection is closed; None: it is not."""
        return self._rng.uniform(0.0, 1.0) if self._rng.random() < 0.3 else None

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Redirect():
                live = self.streams[action.stream]
                require(live.attempt == action.attempt, f"{live.id}: redirected in an attempt that is over")
                assert live.plan is not None
                self._laws.check_plan(live, action.plan, self.told)
                require(action.plan.prefill == live.plan.prefill, f"{live.id}: redirected to another prefill")
                self._writers[live.plan.decode].pop(live.id, None)
                self._writers[action.plan.decode][live.id] = live.attempt
                live.plan = action.plan
                self._hold_places(live)
            case Recovered():
                live = self.streams[action.stream]
                require(live.attempt == action.attempt, f"{live.id}: a record of an attempt that is over")
                live.option = action.option
                self.recoveries[action.option.value] += 1
                live.recoveries += 1
            case Settled():
                require(self.streams[action.stream].attempt == action.attempt, f"{action.stream}: settled too late")
            case GiveUp():
                self._finish(self.streams[action.stream], action.reason.value)
            case WakeAt():
                self.clock.after(action.at_s - self.clock.now_s, lambda: self.tell(TimerFired()))

    def _start(self, action: Start) -> None:
        live = self.streams[action.stream]
        self._laws.check_start(live, action, self.told, self.clock.now_s)
        self._halt(live)
        plan = action.plan
        live.attempt, live.plan, live.broken, live.resumed = action.attempt, plan, False, False
        live.fetching_since_s = self.clock.now_s if plan.runs else None
        for name in (plan.prefill, plan.decode):
            if name is not None:
                self._writers[name][live.id] = live.attempt
        self._hold_places(live)
        prefill = plan.prefill or (plan.decode if not live.knows_prompt else None)
        if prefill is not None:
            self._send(live, At.PREFILL, prefill, ())
        else:
            self._decode(live, ())

    def _hold_places(self, live: Live) -> None:
        assert live.plan is not None
        for place in live.plan.places:
            live.copies.setdefault(place.holder, 0)
            self._leases.hold(place.holder, live.id)

    def _decode(self, live: Live, handed_over: tuple[Source, ...]) -> None:
        assert live.plan is not None
        runs = tuple(
            Source(run.holder, run.generation, range(run.first_page, run.first_page + run.pages), TrafficClass.RECOVERY)
            for run in live.plan.runs
        )
        if not live.plan.runs:
            self._send(live, At.DECODE, live.plan.decode, handed_over)
            return
        live.at, live.runs_on = At.DECODE, live.plan.decode  # With whom it is lost, also before it is called.
        decode = live.plan.decode
        self.slots.acquire(live, lambda: self._send(live, At.DECODE, decode, runs), partial(self._slot_denied, live))

    def _slot_denied(self, live: Live, wait_s: float) -> None:
        assert live.plan is not None
        self._break(live)
        self.tell(SlotDenied(live.id, live.attempt, live.plan.decode, wait_s))

    def _send(self, live: Live, at: At, name: InstanceId, sources: tuple[Source, ...]) -> None:
        engine = self._site.holders[name]
        assert isinstance(engine, SimEngine)
        assert live.plan is not None
        live.at, live.runs_on, live.heard_s = at, name, self.clock.now_s
        delay_s = self._delays_s[name]
        live.line = line = Line(self, live, engine, delay_s)
        places: tuple[Place, ...] = live.plan.places
        prompt_tokens = len(live.asked.prompt_ids) if live.knows_prompt else 0
        call = Call(
            live.id,
            live.attempt,
            live.history_ids,
            prompt_tokens or live.history_tokens,
            live.asked.max_tokens,
            at is At.PREFILL,
            sources,
            places,
            line,
            live.slot_token,
        )
        engine.call(delay_s, lambda: engine.submit(call), lambda: line.broke("refused"))
        self._watch_silence(live, live.attempt, at)

    def _halt(self, live: Live) -> None:
        self.slots.release(live)
        live.at, live.runs_on = At.NOWHERE, None
        if live.line is not None:
            live.line.close()
            live.line = None

    # What is heard on the attempts' connections.

    def prefilled(self, live: Live, attempt: int, name: InstanceId, history_tokens: int) -> None:
        if live.outcome:
            return
        self._progress_s[name] = self.clock.now_s
        event = PrefillDone(live.id, attempt, history_tokens)
        if attempt != live.attempt or live.at is not At.PREFILL:
            self.tell(event)
            return
        assert live.plan is not None
        live.knows_prompt, live.prefilled_at = True, name
        live.leased[name] = None
        self._leases.hold(name, live.id)
        if name in self.told.up:
            self.told.kept[name, live.id] = history_tokens // self._config.cluster.engine.page_size_tokens
        if live.plan.decode not in self.told.up:
            self._break(live)  # Nobody is there to hand it off to.
        self.tell(event)
        if attempt != live.attempt or live.outcome or live.broken:
            return
        handed_over: tuple[Source, ...] = ()
        if live.plan.prefill is not None:
            pages = history_tokens // self._config.cluster.engine.page_size_tokens
            handed_over = (Source(name, None, range(pages), TrafficClass.HANDOFF, live.id),)
            self._writers[name].pop(live.id, None)
        self._decode(live, handed_over)

    def token(self, live: Live, attempt: int, name: InstanceId, position: int, token: int, *, is_last: bool) -> None:
        """The relay: what a former attempt still says is dropped; of the current one every position comes once, in order."""
        if attempt != live.attempt or live.outcome or live.at is not At.DECODE:
            self.dropped_tokens += 1
            if attempt < live.attempt and not live.outcome:
                self.tell(StreamEnded(live.id, attempt) if is_last else StreamResumed(live.id, attempt))
            return
        now_s = self.clock.now_s
        require(not live.broken, f"{live.id}: a token of an attempt that is over")
        require(position == len(live.output), f"{live.id}: token {position} comes after {len(live.output)} others")
        right = token_at(live.id, len(live.asked.prompt_ids) + position)
        require(token == right, f"{live.id}: token {position} is another one")
        live.output.append(token)
        self._progress_s[name] = now_s
        if live.resumed:
            gap_s = now_s - live.heard_s
            live.usual_s = gap_s if live.usual_s is None else live.usual_s + 0.2 * (gap_s - live.usual_s)
        live.heard_s = now_s
        if not live.resumed:
            self._resumed(live, attempt)
        if is_last:
            require(len(live.output) == live.asked.max_tokens, f"{live.id} ends after {len(live.output)} tokens")
            self._finish(live, "complete")

    def _resumed(self, live: Live, attempt: int) -> None:
        live.resumed, live.fetching_since_s = True, None
        self.slots.release(live)
        if live.failed_at_s is not None and len(live.output) > 1:
            self.pauses_s.append(self.clock.now_s - live.failed_at_s)
        live.failed_at_s = None
        self.tell(StreamResumed(live.id, attempt))
        assert live.plan is not None
        # The plan has worked: agents that it does not name are let go of.
        places = {place.holder for place in live.plan.places}
        for agent in [agent for agent in live.copies if agent not in places]:
            del live.copies[agent]
            self._leases.release(agent, live.id)
            self._keeps_nothing(agent, live.id)

    def broke(self, live: Live, attempt: int, name: InstanceId, cause: str) -> None:
        if live.outcome:
            return
        if attempt == live.attempt:
            self._break(live)
        is_said = cause in ("error event", "fenced")
        self.tell(AttemptFailed(live.id, attempt, name, cause, len(live.output), abrupt=not is_said))

    def _break(self, live: Live) -> None:
        live.broken, live.fetching_since_s = True, None
        if live.failed_at_s is None:
            live.failed_at_s = self.clock.now_s
        self._halt(live)

    def _finish(self, live: Live, outcome: str) -> None:
        require(not live.outcome, f"{live.id} ends twice: {live.outcome}, {outcome}")
        live.outcome, live.fetching_since_s = outcome, None
        self._halt(live)
        for name in live.leased:
            self._leases.release(name, live.id)
        for name in live.copies:
            self._leases.release(name, live.id)
        for name, writers in self._writers.items():
            if name in self.told.up:
                writers.pop(live.id, None)
        self.tell(StreamEnded(live.id, live.attempt))

    def _watch_silence(self, live: Live, attempt: int, at: At) -> None:
        """Look again when the attempt will have been silent for too long, unless something is heard until then."""
        name = live.runs_on
        assert name is not None
        patience_s = self._config.proxy.token_gap_s + self.watches[name].queue_delay_s

        def look() -> None:
            if live.outcome or live.attempt != attempt or live.at is not at or live.broken:
                return
            limit_s = patience_s
            if live.resumed:
                usual_s = live.usual_s or self._config.proxy.token_gap_s
                limit_s = min(self._config.proxy.token_gap_s, max(SHORTEST_SILENCE_S, USUAL_INTERVALS * usual_s))
            if self._keeps_waiting(name):
                live.heard_s = self.clock.now_s
            left_s = live.heard_s + limit_s - self.clock.now_s
            if left_s > 1e-9:
                self.clock.after(left_s, look)
                return
            self.watches[name].suspect()
            if live.attempt == attempt and not live.broken:
                self.broke(live, attempt, name, "silent")

        self.clock.after(min(patience_s, SHORTEST_SILENCE_S), look)

    def _keeps_waiting(self, name: InstanceId) -> bool:
        """It has more streams than it can run at a time, and gets on with them."""
        watch, now_s = self.watches[name], self.clock.now_s
        recent = now_s - self._progress_s.get(name, -1e9) < self._config.proxy.token_gap_s
        return recent and watch.queued > 0 and now_s - watch.reported_s < 1.0

    # What is heard of processes.

    def is_up(self, watch: Watch, epoch: int) -> None:
        process = watch.process
        if isinstance(process, SimAgent):
            self.told.up[process.id] = epoch
            for live in self.streams.values():
                if process.id in live.copies and not live.outcome:
                    live.copies[process.id] = 0
                    self._leases.hold(process.id, live.id)
            backup = self._config.backup
            self.tell(HolderUp(process.id, process.node, epoch, backup.capacity_bytes, backup.host_to_device_bytes_per_s))
            return
        self._writers[process.id] = {}
        if process.id in self.told.up:
            # In a new life, or a new epoch: whatever ran there is taken for lost.
            self._lose(process.id)
        self.told.up[process.id] = epoch
        capabilities = frozenset(Capability)
        self.tell(
            InstanceUp(
                Instance(
                    process.id,
                    process.node,
                    process.role,
                    epoch,
                    self._site.geometry,
                    self._site.pace.prefill,
                    capabilities,
                )
            )
        )

    def is_lost(self, watch: Watch, cause: str) -> None:
        process, epoch = watch.process, self.told.up[watch.process.id]
        self._leases.forget(process.id)
        if isinstance(process, SimAgent):
            self.told.lose(process.id)
            for live in self.streams.values():
                if process.id in live.copies:
                    live.copies[process.id] = 0
            self.tell(HolderLost(process.id, epoch, cause))
            return
        produced = self._lose(process.id)
        self.tell(InstanceLost(process.id, epoch, cause, produced))

    def _lose(self, name: InstanceId) -> dict[StreamId, int]:
        self.told.lose(name)
        victims = [live for live in self.streams.values() if live.runs_on == name and not live.outcome]
        for live in victims:
            self._break(live)
        return {live.id: len(live.output) for live in victims}

    def heard(self, watch: Watch, report: Load | Holdings) -> None:
        name = watch.process.id
        if isinstance(report, Load):
            self.tell(LoadReported(name, report.queue_delay_s))
            for source, rate in report.links.items():
                if self._rates.get((name, source)) != rate:
                    self._rates[name, source] = rate
                    self.tell(LinkMeasured(source, watch.process.node, rate))
            return
        pages: dict[StreamId, int] = {}
        for stream, count in report.pages.items():
            live = self.streams.get(stream)
            if live is not None and not live.outcome and name in live.copies:
                if count:
                    self._leases.hold(name, stream)
                    self.told.kept[name, stream] = count
                live.copies[name] = pages[stream] = count
        self.tell(CheckpointsReported(name, report.epoch, report.reserved_bytes, report.checkpoints, pages))
        for stream in report.denied:
            live = self.streams.get(stream)
            if live is not None and not live.outcome and name in live.copies:
                live.copies[name] = 0
                self._leases.drop(name, stream)
                self._keeps_nothing(name, stream)

    def _keeps_nothing(self, name: InstanceId, stream: StreamId) -> None:
        self.told.kept.pop((name, stream), None)
        self.tell(RetentionLost(name, (stream,)))

    def former_attempts(self, name: InstanceId) -> dict[StreamId, int]:
        return {stream: attempt + 1 for stream, attempt in self._writers[name].items()}

    # Leases.

    @property
    def _tick_s(self) -> float:
        return min(self._config.transfer.lease_s / 3, self._config.proxy.load_interval_s)

    def _tick(self) -> None:
        self._ticks += 1
        self.slots.renew(self.streams.values())
        renew = self._ticks % max(1, int(self._config.transfer.lease_s / 3 / self._tick_s)) == 0
        for name, holder in self._site.holders.items():
            renewed = list(self._leases.held.get(name, ())) if renew else []
            ended = list(self._leases.ended.pop(name, ()))
            if (renewed or ended) and name in self.told.up:
                self._send_leases(holder, renewed, ended)
        self.clock.after(self._tick_s, self._tick)

    def _send_leases(self, holder: object, renewed: list[StreamId], ended: list[StreamId]) -> None:
        assert isinstance(holder, SimEngine | SimAgent)
        delay_s = self._delays_s[holder.id]

        def update() -> None:
            if isinstance(holder, SimAgent):
                unknown = holder.renew(renewed)
                holder.release(ended)
            else:
                unknown = holder.pages.renew(renewed, self.clock.now_s + self._config.transfer.lease_s)
                holder.pages.unretain(ended)
            if unknown:
                self.clock.after(delay_s, lambda: self._unknown(holder.id, unknown, is_agent=isinstance(holder, SimAgent)))

        holder.call(delay_s, update)

    def _unknown(self, name: InstanceId, streams: list[StreamId], *, is_agent: bool) -> None:
        """It keeps nothing of these: of agents those that have not said yet that they had anything are asked again."""
        for stream in streams:
            live = self.streams[stream]
            if stream in self._leases.held.get(name, ()) and (not is_agent or live.copies.get(name)):
                self._leases.drop(name, stream)
                if is_agent:
                    live.copies[name] = 0
                self._keeps_nothing(name, stream)
