"""The asyncio shell of `kvrs.core`: performs what it decides with tasks, timers and clients."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, assert_never

from kvrs.config.file import Config
from kvrs.config.proxy import Inexact
from kvrs.core.books.agent_slots import SlotOutcome
from kvrs.core.control import Control
from kvrs.core.fleet.known import KnownAgent, KnownInstance, all_refused
from kvrs.core.live import CannotContinue, Complete
from kvrs.core.live import Outcome as ControlOutcome
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.eager_tasks import EagerFuture, EagerTask
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.backends.agent import AgentBackend
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.fleet.leases import LeaseSender
from kvrs.proxy.fleet.slots import SlotSender
from kvrs.proxy.streams.attempts import Attempt
from kvrs.proxy.streams.clients import Client
from kvrs.proxy.streams.event_log import EventLog
from kvrs.proxy.streams.live import Failed, OpenStream, Outcome, Phase
from kvrs.proxy.streams.metrics import DeathCause, Metrics
from kvrs.proxy.streams.recoveries import RecoveryLog
from kvrs.proxy.streams.tokenizer import LazyTokenizer
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.request_context import CURRENT

log = logging.getLogger(__name__)

_STATUS = {
    act.Reason.NO_INSTANCE: 503,
    act.Reason.OVERLOADED: 503,
    act.Reason.OVER_SHARE: 429,
    act.Reason.SLO: 503,
    act.Reason.RETRIES: 502,
    # A client repeats a request that got 5xx, and must not repeat one that ends instances.
    act.Reason.POISON: 422,
}
_KINDS = {422: "invalid_request_error", 429: "rate_limit_error"}
_REFUSED_RETRY_S = 10.0  # Somebody has to mend the instances first.
# Refusals of new requests, which are counted and not logged one by one.
_SHED = (act.Reason.OVERLOADED, act.Reason.OVER_SHARE)


class Driver:
    """Owns every task that runs for a stream. All methods run on one event loop."""

    def __init__(
        self,
        config: Config,
        backends: Mapping[InstanceId, Backend],
        agent_backends: Mapping[InstanceId, AgentBackend],
        metrics: Metrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        event_log: EventLog | None = None,
    ) -> None:
        # A proxy that is started in the place of this one gets another one.
        self.run_id = f"{config.proxy.id}-{secrets.token_hex(8)}"
        self.tokenizer = LazyTokenizer(config.cluster.model)
        self.refuses_inexact = config.proxy.inexact is Inexact.REFUSE
        self.control = control = Control[OpenStream](
            config,
            run_id=self.run_id,
            shell=self,
            can_give_end=self.tokenizer.available,
            runs_self_tests=config.proxy.self_test,
        )
        self.backends = backends
        self.agent_backends = agent_backends
        self.recoveries = RecoveryLog(clock, wall_clock, metrics.recoveries.settled)
        self.leases = LeaseSender(control.leases, self._send_leases, self._retention_lost)
        self.checkpoint_leases = LeaseSender(
            control.checkpoints.leases, self._send_reservations, self._reservations_lost
        )
        self.slots = SlotSender(control.slots, agent_backends)
        # Takes silence for the end; False: it has not lasted for long.
        self.end_watch: dict[InstanceId, Callable[[], bool]] = {}
        self.busy_status = 503
        self.clock = clock
        self._metrics = metrics
        self._event_log = event_log
        self._tasks: dict[EagerTask, OpenStream] = {}
        self._ended = self._task_ended  # One for all tasks.
        self._to_begin: list[EagerTask] = []
        self._is_opening = False  # They begin right after it.
        self._quiet: asyncio.Future[None] | None = None
        self._wakes: set[asyncio.TimerHandle] = set()

    @property
    def streams(self) -> Mapping[StreamId, OpenStream]:
        return self.control.streams

    # Streams.

    async def run(self, journal: Journal, client: Client) -> Outcome:
        """See one stream through; a caller that is cancelled takes the stream with it."""
        if not journal.output_ids and (cause := all_refused(self.control.instances)) is not None:
            message = f"no instance can be used: {cause}"
            body = error_body(message, kind="server_error", code=act.Reason.NO_INSTANCE)
            return Failed(503, body, retry_after_s=_REFUSED_RETRY_S)
        outcome: EagerFuture[Outcome] = EagerFuture(asyncio.get_running_loop())
        journal.request = request = CURRENT.get()
        if request is not None and request.trace is not None:
            request.trace.opened(journal)
        live = OpenStream(journal=journal, client=client, outcome=outcome, clock=self.clock)
        self._metrics.streams.active.inc()
        try:
            self._is_opening = True
            try:
                self.control.open(live, self.clock())
            finally:
                self._begin()
            return await outcome
        finally:
            self.control.close(live, self.clock())

    def end_early(self, stream: StreamId, failure: Failed) -> None:
        """End it for a reason of the proxy's own; nothing happens if it has ended."""
        if (live := self.streams.get(stream)) is not None:
            self.fail(live, failure)

    def fail(self, live: OpenStream, failure: Failed) -> None:
        live.resolve(failure)
        self.control.close(live, self.clock())

    # What the core has performed (`kvrs.core.control.Shell`).

    def begin_attempt(self, live: OpenStream, plan: act.Plan) -> None:
        live.enter(
            Phase.DECODE if plan.prefill is None else Phase.PREFILL, plan.prefill or plan.decode
        )
        # A client that has just left ends its stream when its own task runs.
        if not live.outcome.done():
            self._start(live, Attempt(live, live.journal.attempt, plan, self).run())

    def end_attempt(self, live: OpenStream) -> None:
        live.enter(Phase.WAITING, None)
        live.end_task()

    def expect_token(self, live: OpenStream) -> None:
        if live.expect_token is not None:
            live.expect_token()

    def give_end(self, live: OpenStream, plan: act.Plan) -> None:
        self._start(live, Attempt(live, live.journal.attempt, plan, self).end_alone())

    def stream_closed(self, live: OpenStream) -> None:
        self._metrics.streams.ended(live, self.clock())
        self.recoveries.ended(live.id)

    def note(self, action: act.Record) -> None:
        match action:
            case act.Recovered():
                if (recovering := self.streams.get(action.stream)) is not None:
                    self.recoveries.decided(action, recovering)
            case act.Redirect():
                self.recoveries.redirected(self.streams[action.stream])
            case act.Settled():
                self.recoveries.predicted(action)
            case act.Ejected() | act.Readmitted():
                _note_ejection(self._metrics, action)
            case _:
                assert_never(action)

    def count_slot(self, outcome: SlotOutcome) -> None:
        self._metrics.slot_asked(outcome.value)

    def _start(self, live: OpenStream, work: Coroutine[Any, Any, None]) -> None:
        live.task = task = EagerTask(work, self._ended)
        self._tasks[task] = live
        # Decisions that belong together are carried out before any of their attempts begins.
        if not self._to_begin and not self._is_opening:
            asyncio.get_running_loop().call_soon(self._begin)
        self._to_begin.append(task)

    def _begin(self) -> None:
        tasks, self._to_begin, self._is_opening = self._to_begin, [], False
        for task in tasks:
            task.go_on()

    def _task_ended(self, task: EagerTask, _: None, error: BaseException | None) -> None:
        live = self._tasks.pop(task)
        if not self._tasks and self._quiet is not None:
            self._quiet.set_result(None)
        if error is not None and not isinstance(error, asyncio.CancelledError):
            # A bug of ours. The client's handler raises it, so that neither of them goes on as if
            # nothing had happened.
            log.error("attempt ended by a bug", exc_info=error)
            if not live.outcome.done():
                live.outcome.set_exception(error)

    def end_stream(self, live: OpenStream, outcome: ControlOutcome) -> None:
        is_refused = isinstance(outcome, act.GiveUp) and outcome.reason is act.Reason.REFUSED
        if not is_refused:
            _blame_refusers(self._metrics, live)
        match outcome:
            case Complete():
                live.resolve(outcome)
            case act.GiveUp(reason=act.Reason.REFUSED):
                assert live.refusal is not None
                self._metrics.admission.given_up.labels(act.Reason.REFUSED).inc()
                self.recoveries.rejected(live.id)
                extra = {"stream": live.id, "cause": outcome.message}
                log.info("request rejected", extra=extra)
                live.resolve(live.refusal)
            case act.GiveUp():
                self._metrics.admission.given_up.labels(outcome.reason).inc()
                if outcome.reason not in _SHED:
                    extra = {
                        "stream": live.id,
                        "reason": outcome.reason,
                        "cause": outcome.message,
                    }
                    log.warning("stream given up", extra=extra)
                status = _STATUS.get(outcome.reason, self.busy_status)
                kind = _KINDS.get(status, "server_error")
                body = error_body(outcome.message, kind=kind, code=outcome.reason)
                retry_after_s = None if status == 422 else outcome.retry_after_s
                live.resolve(Failed(status, body, retry_after_s))
            case CannotContinue():
                log.warning(
                    "stream cannot continue", extra={"stream": live.id, "cause": outcome.cause}
                )
                body = error_body(outcome.cause, kind="server_error", code="inexact")
                live.resolve(Failed(502, body))
            case _:
                assert_never(outcome)

    def wake_at(self, at_s: float) -> None:
        def wake() -> None:
            self._wakes.discard(handle)
            self.control.tell(ev.TimerFired(), self.clock())

        handle = asyncio.get_running_loop().call_later(max(0.0, at_s - self.clock()), wake)
        self._wakes.add(handle)

    def trace(self, now_s: float, event: ev.Event, actions: list[act.Action]) -> None:
        if self._event_log is not None:
            self._event_log.note(now_s, event, actions)
        match event:
            case ev.InstanceUp(instance=instance):
                log.info("instance up", extra={"instance": instance.id, "epoch": instance.epoch})
                self._metrics.up.labels(instance.id).set(1)
                # A new process begins without a record; one that lives on keeps its own.
                if not event.lives_on:
                    self._metrics.ejected.labels(instance.id).set(0)
            case ev.InstanceLost(instance=name, cause=cause):
                log.warning("instance lost", extra={"instance": name, "cause": cause})
            case ev.GpuJudged(instance=name, state=state, reason=reason):
                extra = {"instance": name, "state": state, "reason": reason}
                log.warning("gpu judged", extra=extra)
            case _:
                pass  # The event log has all of them.

    # What attempts report.

    def suspect_instance(self, instance: InstanceId) -> bool:
        """It was silent for too long, perhaps not only for one stream; whether it is given up.

        From an instance that hangs nothing comes at all. So its streams are decided together, and
        it is fenced when it wakes.
        """
        end_watch = self.end_watch.get(instance)
        if end_watch is None or self.control.instances.is_reporting(instance, self.clock()):
            return False
        return end_watch()

    def resumed(self, live: OpenStream, attempt: int) -> None:
        _blame_refusers(self._metrics, live)
        self.control.resumed(live, attempt, self.clock())
        self.recoveries.resumed(live.id, attempt)

    def attempt_failed(
        self,
        live: OpenStream,
        attempt: int,
        instance: InstanceId,
        cause: str,
        *,
        abrupt: bool,
        failure: ev.FailureKind,
        retry_after_s: float | None,
        final: bool,
    ) -> None:
        if self.streams.get(live.id) is not live or attempt != live.journal.attempt:
            return
        extra = {"stream": live.id, "attempt": attempt, "instance": instance, "cause": cause}
        if failure is ev.FailureKind.REFUSED and not live.journal.output_ids:
            log.info("attempt refused", extra=extra)
            live.refused_by = (*live.refused_by, instance)
        else:
            log.warning("attempt failed", extra=extra)
            self._metrics.failures.labels(instance).inc()
        live.task = None  # It is the task that reports this.
        self.control.attempt_failed(
            live,
            attempt,
            instance,
            cause,
            abrupt=abrupt,
            failure=failure,
            retry_after_s=retry_after_s,
            final=final,
            now_s=self.clock(),
        )

    def slot_denied(
        self, live: OpenStream, attempt: int, target: InstanceId, wait_s: float
    ) -> None:
        if self.streams.get(live.id) is not live or attempt != live.journal.attempt:
            return
        live.task = None
        self.recoveries.denied(live.id)
        self.control.slot_denied(live, attempt, target, wait_s, self.clock())

    def completed(self, live: OpenStream) -> None:
        # Its task still reads the last bytes of the response, so that the connection can be used
        # again.
        live.task = None
        self.control.end(live, Complete(), self.clock())

    # What watches report.

    def instance_lost(self, known: KnownInstance, cause: str, death: DeathCause) -> None:
        now_s = self.clock()
        self._metrics.worker_lost(known.id, death, now_s - max(known.reported_s, known.beat_s))
        self.control.instance_lost(known, cause, now_s, may_live=death is DeathCause.SILENT)

    def agent_lost(self, known: KnownAgent, cause: str, death: DeathCause) -> None:
        self._metrics.agents.lost(known.id, death)
        self.control.checkpoints.lost(known, cause, self.clock())

    # Leases.

    async def _send_leases(self, instance: InstanceId, update: LeaseUpdate) -> LeaseAnswer:
        if not self.control.instances.is_up(instance):
            raise UpstreamError("not up")
        return await self.backends[instance].leases(update)

    def _retention_lost(self, instance: InstanceId, streams: list[StreamId]) -> None:
        self.control.retention_lost(instance, streams, self.clock())

    async def _send_reservations(self, agent: InstanceId, update: LeaseUpdate) -> LeaseAnswer:
        if not self.control.agents.is_up(agent):
            raise UpstreamError("not up")
        return await self.agent_backends[agent].leases(update)

    def _reservations_lost(self, agent: InstanceId, streams: list[StreamId]) -> None:
        self.control.checkpoints.unknown(agent, streams, self.clock())

    async def close(self) -> None:
        """End every stream with an explicit error, and wait for what runs on their behalf."""
        for handle in self._wakes:
            handle.cancel()
        body = error_body("the proxy is shutting down", kind="server_error", code="shutting_down")
        for live in list(self.streams.values()):
            self.fail(live, Failed(503, body, retry_after_s=1.0))
        if self._tasks:
            self._quiet = asyncio.get_running_loop().create_future()
            for task in self._tasks:
                task.cancel()
            await self._quiet
            self._quiet = None
        await self.slots.close()


def _blame_refusers(metrics: Metrics, live: OpenStream) -> None:
    """The request is not at fault, as far as is known: its refusals count as failures."""
    for instance in live.refused_by:
        extra = {"stream": live.id, "instance": instance}
        log.warning("refused a request that is not at fault", extra=extra)
        metrics.failures.labels(instance).inc()
    live.refused_by = ()


def _note_ejection(metrics: Metrics, effect: act.Ejected | act.Readmitted) -> None:
    is_ejected = isinstance(effect, act.Ejected)
    metrics.ejected.labels(effect.instance).set(is_ejected)
    if isinstance(effect, act.Ejected):
        extra = {"instance": effect.instance, "cause": effect.cause, "pause_s": effect.pause_s}
        log.warning("instance ejected", extra=extra)
    else:
        log.info("instance readmitted", extra={"instance": effect.instance})
