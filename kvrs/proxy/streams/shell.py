"""The shell of the core: decisions about streams performed with tasks, timers and clients."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, assert_never

from kvrs.core.books.agent_slots import SlotOutcome
from kvrs.core.live import CannotContinue, Complete
from kvrs.core.live import Outcome as CoreOutcome
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.streams.attempts import AttemptCalls, AttemptDriver
from kvrs.proxy.streams.event_log import EventLog
from kvrs.proxy.streams.live import Failed, OpenStream, StreamPhase
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.recoveries import RecoveryLog

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

# Refusals of new requests, which are counted and not logged one by one.
_SHED = (act.Reason.OVERLOADED, act.Reason.OVER_SHARE)


class TaskShell:
    """The `Shell` of a proxy: owns every task that runs for a stream."""

    def __init__(
        self,
        driver: AttemptDriver,
        recoveries: RecoveryLog,
        metrics: Metrics,
        event_log: EventLog | None,
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._recoveries = recoveries
        self._metrics = metrics
        self._event_log = event_log
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], OpenStream] = {}
        self._quiet: asyncio.Future[None] | None = None
        self._wakes: set[asyncio.TimerHandle] = set()

    def begin_attempt(self, live: OpenStream, plan: act.Plan) -> None:
        live.enter(
            StreamPhase.DECODE if plan.prefill is None else StreamPhase.PREFILL,
            plan.prefill or plan.decode,
        )
        # A client that has just left ends its stream when its own task runs.
        if not live.outcome.done():
            self._start(live, AttemptCalls(live, plan, self._driver).run())

    def end_attempt(self, live: OpenStream) -> None:
        live.enter(StreamPhase.WAITING, None)
        if live.task is not None:
            live.task.cancel()  # Its connection is closed as it ends.
            live.task = None

    def expect_token(self, live: OpenStream) -> None:
        if live.expect_token is not None:
            live.expect_token()

    def give_end(self, live: OpenStream, plan: act.Plan) -> None:
        self._start(live, AttemptCalls(live, plan, self._driver).run(gives_end=True))

    def stream_closed(self, live: OpenStream) -> None:
        self._metrics.streams.ended(live, self._clock())
        self._recoveries.settle(live.id, "ended")

    def note(self, action: act.Record) -> None:
        match action:
            case act.Recovered():
                if (recovering := self._driver.control.streams.get(action.stream)) is not None:
                    self._recoveries.decided(action, recovering)
            case act.Redirect():
                self._recoveries.redirected(self._driver.control.streams[action.stream])
            case act.Settled():
                self._recoveries.predicted(action)
            case act.Ejected() | act.Readmitted():
                _note_ejection(self._metrics, action)
            case _:
                assert_never(action)

    def count_slot(self, outcome: SlotOutcome) -> None:
        self._metrics.slot_asked(outcome.value)

    def _start(self, live: OpenStream, work: Coroutine[Any, Any, None]) -> None:
        # It begins in a turn of its own: decisions that belong together are carried out before.
        live.task = task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = live
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        live = self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if not self._tasks and self._quiet is not None:
            self._quiet.set_result(None)
        if error is not None:
            # A bug of ours. The client's handler raises it, so that neither of them goes on as if
            # nothing had happened.
            log.error("attempt ended by a bug", exc_info=error)
            if not live.outcome.done():
                live.outcome.set_exception(error)

    def end_stream(self, live: OpenStream, outcome: CoreOutcome) -> None:
        is_refused = isinstance(outcome, act.GiveUp) and outcome.reason is act.Reason.REFUSED
        if live.refused_by and not is_refused:
            blame_refusers(self._metrics, live)
        match outcome:
            case Complete():
                live.resolve(outcome)
            case act.GiveUp(reason=act.Reason.REFUSED):
                assert live.refusal is not None
                self._metrics.admission.given_up.labels(act.Reason.REFUSED).inc()
                self._recoveries.rejected(live.id)
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
                status = _STATUS.get(outcome.reason, self._driver.busy_status)
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
            self._driver.control.tell(ev.TimerFired(), self._clock())

        handle = asyncio.get_running_loop().call_later(max(0.0, at_s - self._clock()), wake)
        self._wakes.add(handle)

    def trace(self, now_s: float, event: ev.Event, actions: list[act.Action]) -> None:
        if self._event_log is not None:
            self._event_log.note(now_s, event, actions)
        match event:
            case ev.InstanceUp(info=info):
                log.info("instance up", extra={"instance": info.id, "epoch": info.epoch})
                self._metrics.up.labels(info.id).set(1)
                # A new process begins without a record; one that lives on keeps its own.
                if not event.lives_on:
                    self._metrics.ejected.labels(info.id).set(0)
            case ev.InstanceLost(instance=name, cause=cause):
                log.warning("instance lost", extra={"instance": name, "cause": cause})
            case ev.GpuJudged(instance=name, state=state, reason=reason):
                extra = {"instance": name, "state": state, "reason": reason}
                log.warning("gpu judged", extra=extra)
            case _:
                pass  # The event log has all of them.

    def cancel_wakes(self) -> None:
        for handle in self._wakes:
            handle.cancel()

    async def close(self) -> None:
        """End what still runs on behalf of streams."""
        if self._tasks:
            self._quiet = asyncio.get_running_loop().create_future()
            for task in self._tasks:
                task.cancel()
            await self._quiet
            self._quiet = None


def blame_refusers(metrics: Metrics, live: OpenStream) -> None:
    """The request is not at fault, as far as is known: its refusals count as failures."""
    for instance in live.refused_by:
        extra = {"stream": live.id, "instance": instance}
        log.warning("refused a request that is not at fault", extra=extra)
        metrics.failures.labels(instance).inc()
    live.refused_by = ()


def _note_ejection(metrics: Metrics, record: act.Ejected | act.Readmitted) -> None:
    is_ejected = isinstance(record, act.Ejected)
    metrics.ejected.labels(record.instance).set(is_ejected)
    if isinstance(record, act.Ejected):
        extra = {"instance": record.instance, "cause": record.cause, "pause_s": record.pause_s}
        log.warning("instance ejected", extra=extra)
    else:
        log.info("instance readmitted", extra={"instance": record.instance})
