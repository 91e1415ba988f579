"""Turns the world into events for the policy, and its actions into the world. Decides nothing."""

import asyncio
import logging
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any, assert_never

from kvrs.config import Config
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Action, GiveUp, Halt, Place, Plan, Reason, Recovered, Redirect, Settled, Start, WakeAt
from kvrs.policy.events import (
    AttemptFailed,
    DrainReported,
    Event,
    GpuJudged,
    InstanceLost,
    InstanceUp,
    LoadReported,
    PrefillDone,
    RetentionLost,
    SlotDenied,
    StreamAdopted,
    StreamArrived,
    StreamEnded,
    StreamResumed,
    TimerFired,
)
from kvrs.policy.recovery import RecoveryPolicy
from kvrs.protocol.gpus import GpuState
from kvrs.protocol.instance import InstanceInfo, LeaseAnswer, LeaseUpdate, LoadReport
from kvrs.protocol.openai import error_body
from kvrs.proxy.agents import Agents
from kvrs.proxy.attempts import Attempt
from kvrs.proxy.backends.backend import Backend, RefusedError
from kvrs.proxy.checkpoints import Checkpoints
from kvrs.proxy.clients import Client
from kvrs.proxy.config import Inexact
from kvrs.proxy.event_log import EventLog
from kvrs.proxy.instances import Health, Instances, Known
from kvrs.proxy.journal import Journal
from kvrs.proxy.leases import Leases
from kvrs.proxy.links import Links
from kvrs.proxy.metrics import Metrics
from kvrs.proxy.recoveries import RecoveryLog
from kvrs.proxy.slots import SlotDeniedError, Slots
from kvrs.proxy.streams import Complete, Failed, LiveStream, Outcome, Stage
from kvrs.proxy.texts import Texts
from kvrs.proxy.watchdog import silent_after_s
from kvrs.transfer.meter import Measurement

log = logging.getLogger(__name__)

_STATUS = {Reason.NO_INSTANCE: 503, Reason.SLO: 503, Reason.RETRIES: 502}


class Driver:
    """Owns the policy and every live stream. All methods run on one event loop."""

    def __init__(
        self,
        config: Config,
        instances: Instances,
        agents: Agents,
        metrics: Metrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        event_log: EventLog | None = None,
    ) -> None:
        self.policy = RecoveryPolicy(config.policy, config.slo, config.backup)
        self.instances = instances
        self.links = Links()
        self.streams: dict[StreamId, LiveStream] = {}
        self.recoveries = RecoveryLog(clock, wall_clock, metrics.recovery_settled)
        self.leases = Leases(config.transfer.lease_s, self._send_leases, self._retention_lost)
        self.checkpoints = Checkpoints(config, agents, self.streams, self.tell)
        self.run_id = f"{config.proxy.id}-{secrets.token_hex(8)}"  # Whoever is started in our place is another one.
        share = config.policy.slots_max // (1 + len(config.proxy.peers))
        self.slots = Slots(self.run_id, agents, instances, config.transfer.lease_s, share, metrics.slot_asked)
        self.texts = Texts(config.cluster.model)
        self._token_gap_s = config.proxy.token_gap_s
        self._inexact = config.proxy.inexact
        self._metrics = metrics
        self._clock = clock
        self._event_log = event_log
        self._events: deque[Event] = deque()
        self._telling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._wakes: set[asyncio.TimerHandle] = set()
        self._progress_s: dict[InstanceId, float] = {}  # When an instance last delivered anything.
        # Attempts that may still run at an instance, for the day on which it has to be fenced.
        self._writers: defaultdict[InstanceId, dict[StreamId, tuple[int, int]]] = defaultdict(dict)

    # Streams.

    async def run(self, journal: Journal, client: Client) -> Outcome:
        """See one stream through; a caller that is cancelled takes the stream with it."""
        loop = asyncio.get_running_loop()
        live = LiveStream(journal, client, loop.create_future())
        self.streams[live.id] = live
        self._metrics.streams.inc()
        try:
            self._adopt(live)
            self.tell(self._arrival(journal))
            return await live.outcome
        finally:
            self._forget(live)

    def _arrival(self, journal: Journal) -> StreamArrived | StreamAdopted:
        prompt_tokens = journal.prompt_tokens or journal.asked.tokens_guess
        most_tokens = None if journal.max_tokens is None else prompt_tokens + journal.max_tokens
        if not journal.owner_epoch or journal.prompt_ids is None:
            return StreamArrived(journal.stream, prompt_tokens, most_tokens, journal.deadlines)
        produced, age_s = len(journal.output_ids), self._clock() - journal.arrived_s
        return StreamAdopted(journal.stream, prompt_tokens, produced, most_tokens, journal.deadlines, age_s, journal.kept)

    def _adopt(self, live: LiveStream) -> None:
        """Hold from now on what the proxy before us held of the stream."""
        for kept in live.journal.kept:
            known = self.instances.known.get(kept.holder)
            if known is not None and known.info is not None and known.info.epoch == kept.epoch:
                live.prefilled_at.add(kept.holder)
                self.leases.hold(kept.holder, live.id)
        self.checkpoints.adopt(live)

    def end_early(self, stream: StreamId, failure: Failed) -> None:
        """For a reason that is neither the engines' nor the policy's; nothing happens if it has ended."""
        if (live := self.streams.get(stream)) is not None:
            self._end(live, failure)

    def _forget(self, live: LiveStream) -> None:
        """The stream has ended, however; safe to call again."""
        live.halt()
        if self.streams.get(live.id) is not live:
            return  # Or its client has resumed it, and it is another one by now.
        del self.streams[live.id]
        self._metrics.streams.dec()
        self._metrics.stream_ended(live.journal)
        self.recoveries.ended(live.id)
        # Who resumes it needs what is kept of it; what nobody renews runs out.
        let_go = self.leases.drop if live.resumable else self.leases.release
        for instance in live.prefilled_at:
            let_go(instance, live.id)
        self.checkpoints.ended(live)
        for instance, writers in self._writers.items():
            # One that is up drops the attempt because its connection is closed; one that is cut off cannot know.
            if self.instances.is_up(instance):
                writers.pop(live.id, None)
        self.tell(StreamEnded(live.id, live.journal.attempt))

    def _end(self, live: LiveStream, outcome: Outcome) -> None:
        live.resolve(outcome)
        self._forget(live)

    # Events, in the order in which they came; actions may cause more of them.

    def tell(self, event: Event) -> None:
        self._events.append(event)
        if self._telling:
            return
        self._telling = True
        try:
            while self._events:
                event, now_s = self._events.popleft(), self._clock()
                actions = self.policy.handle(event, now_s)
                if self._event_log is not None:
                    self._event_log.note(now_s, event, actions)
                for action in actions:
                    self._carry_out(action)
        finally:
            self._telling = False

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Recovered():
                if (live := self.streams.get(action.stream)) is not None:
                    self.recoveries.decided(action, live)
            case Redirect():
                self._redirect(action)
            case Halt():
                self._halt(action)
            case Settled():
                self.recoveries.predicted(action)
            case GiveUp():
                self._give_up(action)
            case WakeAt():
                self._wake_at(action.at_s)
            case _:
                assert_never(action)

    def _start(self, action: Start) -> None:
        live = self.streams.get(action.stream)
        if live is None:
            # It ended in an action that came before this one, which the policy has yet to hear, in an attempt that is over.
            self.tell(StreamEnded(action.stream, action.attempt))
            return
        live.halt()
        live.journal.attempt = action.attempt
        live.plan = action.plan
        if live.outcome.done():
            return  # Its client has just left: `run` is about to say that the stream has ended, in this attempt.
        for instance in filter(None, (action.plan.prefill, action.plan.decode)):
            self._writers[instance][live.id] = live.journal.owner_epoch, action.attempt
        # Before the task's first step, because an instance can be lost before it.
        live.enter(Stage.PREFILL if action.plan.prefill else Stage.DECODE, action.plan.prefill or action.plan.decode)
        self.checkpoints.planned(live)
        self._run(live, self._attempt(live, action.plan).run())

    def _redirect(self, action: Redirect) -> None:
        """The attempt, whose prefill has just reported, finds the new plan where it left the old one."""
        live = self.streams.get(action.stream)
        if live is None or live.journal.attempt != action.attempt:
            return
        assert live.plan is not None
        self._writers[live.plan.decode].pop(live.id, None)
        self._writers[action.plan.decode][live.id] = live.journal.owner_epoch, action.attempt
        live.plan = action.plan
        self.recoveries.redirected(live)
        self.checkpoints.planned(live)

    def _halt(self, action: Halt) -> None:
        live = self.streams.get(action.stream)
        if live is not None and live.journal.attempt == action.attempt:
            live.halt()
            self._goes_on(live)

    def _attempt(self, live: LiveStream, plan: Plan) -> Attempt:
        return Attempt(live, live.journal.attempt, plan, world=self, clock=self._clock, reports=self)

    def _run(self, live: LiveStream, work: Coroutine[Any, Any, None]) -> None:
        live.task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(live.task)
        live.task.add_done_callback(lambda task: self._task_ended(task, live))

    def _task_ended(self, task: asyncio.Task[None], live: LiveStream) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of ours. The client's handler raises it, so that neither of them goes on as if nothing had happened.
            log.error("attempt ended by a bug", exc_info=error)
            if not live.outcome.done():
                live.outcome.set_exception(error)

    def _give_up(self, action: GiveUp) -> None:
        if (live := self.streams.get(action.stream)) is not None:
            log.warning("stream given up", extra={"stream": live.id, "reason": action.reason, "cause": action.message})
            body = error_body(action.message, kind="server_error", code=action.reason)
            self._end(live, Failed(_STATUS[action.reason], body, action.retry_after_s))

    def _wake_at(self, at_s: float) -> None:
        def wake() -> None:
            self._wakes.discard(handle)
            self.tell(TimerFired())

        handle = asyncio.get_running_loop().call_later(max(0.0, at_s - self._clock()), wake)
        self._wakes.add(handle)

    # What attempts find.

    def backend(self, instance: InstanceId) -> Backend:
        return self.instances.known[instance].backend

    def is_one_call(self, plan: Plan) -> bool:
        return self.instances.is_one_call(plan)

    def retains(self, instance: InstanceId) -> bool:
        return self.instances.retains(instance)

    def resumes_exactly(self, instance: InstanceId) -> bool:
        return self.instances.resumes_exactly(instance)

    def patience_s(self, instance: InstanceId) -> float:
        return self._token_gap_s + self.instances.queue_delay_s(instance)

    def token_gap_s(self, live: LiveStream) -> float:
        usual_s = live.journal.token_interval_s
        return self._token_gap_s if usual_s is None else silent_after_s(usual_s, self._token_gap_s)

    def places(self, instance: InstanceId, plan: Plan) -> tuple[Place, ...]:
        return plan.places if self.instances.sends_checkpoints(instance) else ()

    def doubt(self, instance: InstanceId) -> None:
        # Of one that hangs nothing comes at all. So its streams are decided together, and it is fenced when it wakes.
        end_watch = self.instances.known[instance].end_watch
        if end_watch is not None and not self.instances.is_reporting(instance, self._clock()):
            end_watch()

    def keeps_waiting(self, instance: InstanceId) -> bool:
        # To give such streams up would only send them to the end of another line, and what they got done to waste. An
        # engine that hangs has a line as well, but no stream that gets on.
        now_s, progress_s = self._clock(), self._progress_s.get(instance)
        is_recent = progress_s is not None and now_s - progress_s < self._token_gap_s
        return is_recent and self.instances.queued(instance) > 0 and self.instances.is_reporting(instance, now_s)

    # What attempts report.

    def prefill_done(self, live: LiveStream, attempt: int, instance: InstanceId) -> bool:
        self.prefilled(live, attempt, instance, live.journal.history_tokens)
        if attempt != live.journal.attempt:
            return False
        # Another one, if the policy has redirected the hand-off.
        assert live.plan is not None
        if not self.instances.is_up(live.plan.decode):
            # The policy knows as well; the stream waits for its next attempt.
            live.halt()
            return False
        return True

    def prefilled(self, live: LiveStream, attempt: int, instance: InstanceId, history_tokens: int) -> None:
        assert live.plan is not None
        if instance != live.plan.decode:
            self._writers[instance].pop(live.id, None)
        self._progress_s[instance] = self._clock()
        if self.instances.retains(instance):
            self.leases.hold(instance, live.id)
        self.tell(PrefillDone(live.id, attempt, history_tokens))
        if attempt == live.journal.attempt and live.task is not None:
            live.enter(Stage.DECODE, live.plan.decode)

    def resumed(self, live: LiveStream, attempt: int) -> None:
        self.tell(StreamResumed(live.id, attempt))
        self.recoveries.resumed(live.id, attempt)
        self.checkpoints.resumed(live)

    def relayed(self, instance: InstanceId, tokens: int) -> None:
        self._progress_s[instance] = self._clock()
        self._metrics.tokens.inc(tokens)

    def attempt_failed(self, live: LiveStream, attempt: int, instance: InstanceId, cause: str, *, abrupt: bool) -> None:
        if live.id not in self.streams or attempt != live.journal.attempt:
            return
        log.warning("attempt failed", extra={"stream": live.id, "attempt": attempt, "instance": instance, "cause": cause})
        self._metrics.failures.labels(instance).inc()
        live.task = None
        live.halt()
        if self._goes_on(live):
            self.tell(AttemptFailed(live.id, attempt, instance, cause, len(live.journal.output_ids), abrupt))

    def _goes_on(self, live: LiveStream) -> bool:
        """Whether a stream whose attempt is over needs another one, and may have it."""
        if live.journal.finished:
            self._end(live, Complete())
            return False
        if live.journal.remaining_tokens == 0 and self.texts.available:
            assert live.plan is not None
            self._run(live, self._attempt(live, live.plan).end_alone())
            return False
        # Found out too late for a status: the engine turned out to parse its output, which another cannot take up.
        if self._inexact is Inexact.REFUSE and live.journal.inexact and live.journal.output_ids:
            self.cannot_continue(live, f"cannot be continued exactly: {', '.join(live.journal.inexact)}")
            return False
        return True

    def cannot_continue(self, live: LiveStream, cause: str) -> None:
        log.warning("stream cannot continue", extra={"stream": live.id, "cause": cause})
        self._end(live, Failed(502, error_body(cause, kind="server_error", code="inexact")))

    def slot_denied(self, live: LiveStream, attempt: int, error: SlotDeniedError) -> None:
        if live.id not in self.streams or attempt != live.journal.attempt:
            return
        live.task = None
        live.halt()
        self.recoveries.denied(live.id)
        self.tell(SlotDenied(live.id, attempt, error.target, error.wait_s))

    def refused(self, live: LiveStream, error: RefusedError) -> None:
        self._end(live, Failed(error.status, error.body))

    def completed(self, live: LiveStream) -> None:
        # Its task still reads the last bytes of the response, so that the connection can be used again.
        live.task = None
        self._end(live, Complete())

    def client_gone(self, live: LiveStream) -> None:
        self._end(live, Failed(499, error_body("the client is gone", kind="client_gone")))

    # What watchers report.

    def instance_up(self, known: Known, info: InstanceInfo, *, lives_on: bool = False) -> None:
        log.info("instance up", extra={"instance": known.id, "epoch": info.epoch})
        instance = self.instances.accept(known, info)
        self._metrics.up.labels(known.id).set(1)
        self.tell(InstanceUp(instance, lives_on))

    def load_reported(self, known: Known, report: LoadReport) -> None:
        if report.draining:
            is_news = known.load is None or (known.load.epoch, known.load.draining) != (report.epoch, True)
            # Again and again, for nobody may have been there to take them when it was said first.
            if (produced := self._produced_on(known.id)) or is_news:
                self.tell(DrainReported(known.id, report.epoch, produced))
        known.load = report
        known.reported_s = self._clock()
        self.tell(LoadReported(known.id, report.queue_delay_s))
        for link in report.links:
            measured = Measurement(link.bytes_per_s, link.spread, link.age_s)
            if (event := self.links.measured(link.source, known.node, measured, known.reported_s)) is not None:
                self.tell(event)

    def gpu_judged(self, instance: InstanceId, state: GpuState, reason: str) -> None:
        log.warning("gpu judged", extra={"instance": instance, "state": state, "reason": reason})
        self.tell(GpuJudged(instance, state, reason, self._produced_on(instance)))

    def _produced_on(self, instance: InstanceId) -> dict[StreamId, int]:
        return {live.id: len(live.journal.output_ids) for live in self.streams.values() if self._runs_on(live, instance)}

    def instance_lost(self, known: Known, cause: str) -> None:
        """All its victims in one event, so that the policy can spread them."""
        assert known.info is not None
        log.warning("instance lost", extra={"instance": known.id, "cause": cause})
        known.health = Health.DOWN
        known.reason = cause
        known.load = None
        self._metrics.up.labels(known.id).set(0)
        self.leases.forget(known.id)
        produced = {}
        for live in [live for live in self.streams.values() if self._runs_on(live, known.id)]:
            live.halt()
            if self._goes_on(live):
                produced[live.id] = len(live.journal.output_ids)
        self.tell(InstanceLost(known.id, known.info.epoch, cause, produced))

    def _runs_on(self, live: LiveStream, instance: InstanceId) -> bool:
        """Whether the current attempt is lost with the instance."""
        if live.instance == instance or live.stage is not Stage.PREFILL:
            return live.instance == instance
        return live.plan is not None and live.plan.decode == instance and self.is_one_call(live.plan)

    def former_attempts(self, instance: InstanceId) -> dict[StreamId, tuple[int, int]]:
        """What a fence must name: one above every attempt that may still run at the instance."""
        return {stream: (owner_epoch, attempt + 1) for stream, (owner_epoch, attempt) in self._writers[instance].items()}

    def fenced(self, instance: InstanceId) -> None:
        self._writers.pop(instance, None)

    # Leases.

    async def _send_leases(self, instance: InstanceId, update: LeaseUpdate) -> LeaseAnswer:
        if not self.instances.is_up(instance):
            raise UpstreamError("not up")
        return await self.instances.known[instance].backend.leases(update)

    def _retention_lost(self, instance: InstanceId, streams: tuple[StreamId, ...]) -> None:
        self.tell(RetentionLost(instance, streams))

    async def close(self) -> None:
        """End every stream with an explicit error, and wait for what runs on their behalf."""
        for handle in self._wakes:
            handle.cancel()
        body = error_body("the proxy is shutting down", kind="server_error", code="shutting_down")
        for live in list(self.streams.values()):
            self._end(live, Failed(503, body, retry_after_s=1.0))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.slots.close()
