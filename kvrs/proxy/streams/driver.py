"""Driver of the core: it performs the core's decisions about streams with tasks, timers and
clients.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from kvrs.config.cluster import Backend as Engine
from kvrs.config.file import Config
from kvrs.core.books.agent_slots import SlotOutcome
from kvrs.core.books.incidents import Incidents
from kvrs.core.configured import Configured
from kvrs.core.control import Control
from kvrs.core.fleet.known import all_refused
from kvrs.core.fleet.transfers import AbortedTransfers, aborted_transfers
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.live_stream import CannotContinue, Complete
from kvrs.core.model.live_stream import Outcome as CoreOutcome
from kvrs.core.model.member import Health, Member
from kvrs.core.watch import DeathCause
from kvrs.ids import InstanceId, StreamId
from kvrs.process.eager_task import EagerTask
from kvrs.protocol.instance import InstanceInfo, LoadReport, Role
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.backends.agent import AgentBackend
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.backends.model_files import ModelFiles
from kvrs.proxy.fleet.leases import LeaseSender
from kvrs.proxy.streams.attempts import AttemptCalls
from kvrs.proxy.streams.clients import Client
from kvrs.proxy.streams.context import AttemptContext, blame_refusers
from kvrs.proxy.streams.event_log import EventLog
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.open_stream import Failed, OpenStream, Outcome, StreamPhase
from kvrs.proxy.streams.recoveries import RecoveryLog
from kvrs.proxy.streams.responses import BeginsAgain
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import CURRENT

log = logging.getLogger(__name__)

# `Retry-After` for clients if every instance is refused: an operator must repair the instances
# first.
_REFUSED_RETRY_S = 10.0
_MOST_CAUSES = 4  # Most causes in an answer.
INCIDENTS_KEPT = 100
_STATUS = {
    act.Reason.NO_INSTANCE: 503,
    act.Reason.OVERLOADED: 503,
    act.Reason.SLO: 503,
    act.Reason.RETRIES: 502,
    act.Reason.DENIED: 502,
    act.Reason.INEXACT: 502,
    # Not a 5xx: clients repeat requests after a 5xx, and must not repeat a request that kills
    # instances.
    act.Reason.POISON: 422,
}
_KINDS = {422: "invalid_request_error", 429: "rate_limit_error"}

# Reasons for which clients are told not to repeat a request: it would fail likewise.
_NOT_AGAIN = (act.Reason.POISON, act.Reason.DENIED)
# Reasons of refusals of new requests, which are counted but not logged individually.
_SHED = (act.Reason.OVERLOADED,)


class Driver:
    """Runs streams to their end, and performs the core's decisions, as its `Shell`. It owns every
    task that runs for a stream. All methods run on one event loop.
    """

    def __init__(
        self,
        config: Config,
        backends: Mapping[InstanceId, Backend],
        agent_backends: Mapping[InstanceId, AgentBackend],
        metrics: Metrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        event_log: EventLog | None = None,
        files: ModelFiles | None = None,
    ) -> None:
        self._files = files or ModelFiles(config.cluster.model)
        self._metrics = metrics
        self.clock = clock
        self.backends = backends
        self.agent_backends = agent_backends
        self.engine = config.cluster.backend
        self.request_timeout_s = config.proxy.request_timeout_s
        # Id of this run of the proxy: a proxy that replaces this one has another id.
        self.run_id = f"{config.proxy.id}-{secrets.token_hex(8)}"
        self.recoveries = RecoveryLog(clock, wall_clock, metrics.recoveries.settled)
        self.incidents = Incidents(INCIDENTS_KEPT)
        self._event_log = event_log
        self._wall_clock = wall_clock
        self.control = control = Control[OpenStream](
            Configured.of(config),
            run_id=self.run_id,
            shell=self,
            runs_self_tests=config.proxy.self_test,
            trace=self._trace,
        )
        self.context = AttemptContext(
            config,
            control,
            backends,
            agent_backends,
            self._files,
            self.recoveries,
            metrics,
            clock,
        )
        self.tokenizer = self.context.tokenizer
        self.end_watch = self.context.end_watch
        self.leases = LeaseSender(
            control.leases, backends, control.instances.is_up, control.retention_lost, clock
        )
        self.checkpoint_leases = LeaseSender(
            control.checkpoints.leases,
            agent_backends,
            control.agents.is_up,
            control.checkpoints.unknown,
            clock,
        )
        self._tasks: dict[EagerTask[None], OpenStream] = {}
        self._quiet: asyncio.Future[None] | None = None
        self._wakes: set[asyncio.TimerHandle] = set()

    def _trace(self, now_s: float, event: ev.Event, actions: list[act.Action]) -> None:
        # Rounded as in the event log, so that both show the same time.
        wall_s = round(self._wall_clock(), 3)
        self.incidents.note(now_s, wall_s, event, actions)
        if self._event_log is not None:
            self._event_log.note(now_s, wall_s, event, actions)

    @property
    def streams(self) -> Mapping[StreamId, OpenStream]:
        return self.control.streams

    @property
    def default_tokens(self) -> int | None:
        """Output limit that vLLM gives a chat without `max_tokens`; None: the rest
        of the context.
        """
        model = self._files.served
        return model.default_max_tokens if model and self.engine is Engine.VLLM else None

    async def prepare(self, info: InstanceInfo) -> None:
        # The instance may name the model, on whose tokenizer promises to clients depend.
        await self.tokenizer.prepare(info.root)

    def fault_of_model(self, instance: InstanceId) -> str | None:
        """Return why the model of a refused instance cannot follow the served one; None: it can."""
        root = self.control.instances.root_of(instance)
        if not root or self._files.has_tokenizer_of(root):
            return None
        return (
            f"{instance} has a model with another tokenizer.json ({root}), and open streams need "
            f"that of the present one; allowed: a model with the same one, or a proxy of its own"
        )

    def aborted_transfers(self, of: Sequence[Member]) -> dict[InstanceId, AbortedTransfers]:
        """Judge what instances do with KV of aborted calls; empty: no KV moves between instances,
        or nothing is known to be wrong.
        """
        instances = [*self.control.instances.present()]
        if not (self.engine.is_stock and any(each.role is Role.PREFILL for each in instances)):
            return {}
        held, regions = dict[InstanceId, bool](), Counter[InstanceId]()
        for agent in self.control.agents.present():
            for region in () if agent.report is None else agent.report.rows.regions:
                regions[region.engine] += region.is_alive
                if region.is_alive and region.holds_aborted is not None:
                    held[region.engine] = held.get(region.engine, True) and region.holds_aborted
        ranks = [regions[each.id] or None for each in instances]
        found = {
            each.id: aborted_transfers(
                self.engine,
                self.backends[each.id].engine_version,
                shown=held.get(each.id),
                ranks=ranks,
            )
            for each in of
            if each.was_up
        }
        return {name: judged for name, judged in found.items() if judged is not None}

    def load_reported(self, report: LoadReport) -> None:
        self.recoveries.fetched(report.fetches)
        self.recoveries.restarted(report.restarts)

    def process_lost(self, known: Member | Agent, death: DeathCause, silent_s: float) -> None:
        if isinstance(known, Member):
            self._metrics.worker_lost(known.id, death, silent_s)
        else:
            self._metrics.agent_lost(known.id, death)

    async def run(self, journal: Journal, client: Client) -> Outcome:
        """Run one stream to its end, and return its outcome; a cancelled caller ends the stream."""
        # The stream comes from another proxy, or from a cut connection, and cannot continue without
        # ids.
        is_begun = bool(journal.produced_tokens) and not journal.finished
        if is_begun and (lost := self.control.why_lost(journal)) is not None:
            return Failed(502, error_body(lost, kind="server_error", code="inexact"))
        can_run = journal.output_ids or self.control.policy.members
        if not can_run and (cause := all_refused(self.control.instances)) is not None:
            message = f"no instance can be used: {cause}"
            body = error_body(message, kind="server_error", code=act.Reason.NO_INSTANCE)
            return Failed(503, body, retry_after_s=_REFUSED_RETRY_S)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        journal.request = request = CURRENT.get()
        if request is not None and request.trace is not None:
            request.trace.opened(journal)
        now_s = self.clock()
        live = OpenStream(
            journal.stream,
            journal=journal,
            client=client,
            outcome=outcome,
            clock=self.clock,
            entered_s=now_s,
            picked=() if request is None else request.picked,
        )
        self._metrics.streams.active.value += 1
        limit: asyncio.TimerHandle | None = None
        if self.request_timeout_s is not None:
            loop = asyncio.get_running_loop()
            limit = loop.call_later(self.request_timeout_s, self._out_of_time, live)
        try:
            self.control.open(live, now_s)
            live.is_opening = False
            if live.task is not None:
                live.task.begin()
            return await outcome
        # The client has left, or a bug has occurred: at any other end the stream is closed already.
        except BaseException:
            self.control.close(live, self.clock())
            raise
        finally:
            if limit is not None:
                limit.cancel()

    def _out_of_time(self, live: OpenStream) -> None:
        if live.journal.first_write_s is None and not live.journal.output_ids:
            failure = out_of_time("first token", self.request_timeout_s)
            is_recovering = live.recovery.failed_at_s is not None
            cause = "no token came within proxy.request_timeout_s" if is_recovering else ""
            self.context.fail(live, failure, cause)

    def end_early(self, stream: StreamId, failure: Failed) -> None:
        """End a stream for a reason of the proxy's own; do nothing if it has ended."""
        if (live := self.streams.get(stream)) is not None:
            self.context.fail(live, failure)

    async def close(self) -> None:
        """End every stream with an explicit error, and wait for the tasks of all streams."""
        for handle in self._wakes:
            handle.cancel()
        body = error_body("the proxy is shutting down", kind="server_error", code="shutting_down")
        for live in list(self.streams.values()):
            self.context.fail(live, Failed(503, body, retry_after_s=1.0))
        if self._tasks:
            self._quiet = asyncio.get_running_loop().create_future()
            for task in self._tasks:
                task.cancel()
            await self._quiet
            self._quiet = None
        self.recoveries.close()
        await self.context.slots.close()
        await self.context.detached.close()
        await self.context.hand_offs.close()

    def begin_attempt(self, live: OpenStream, plan: act.Plan, *, gives_end: bool = False) -> None:
        if not gives_end:
            phase = StreamPhase.DECODE if plan.prefill is None else StreamPhase.PREFILL
            live.enter(phase, plan.prefill or plan.decode)
        # The client has just left: its stream ends when the stream's own task runs.
        if live.outcome.done():
            return
        work = AttemptCalls(live, plan, self.context).run(gives_end=gives_end)
        live.task = task = EagerTask(work, self._task_ended)
        self._tasks[task] = live
        # The task of a stream that is opening begins in `run`, after all decisions that belong
        # together.
        if not live.is_opening:
            task.begin_soon()

    def end_attempt(self, live: OpenStream) -> None:
        live.enter(StreamPhase.WAITING, None)
        if live.task is not None:
            live.task.cancel()  # The task closes its connection as it ends.
            live.task = None
        journal, client = live.journal, live.client
        if journal.can_begin_again and journal.begins_again and isinstance(client, BeginsAgain):
            journal.begin_again()
            client.begin_again()

    def catch_up_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.control.catch_up)

    def expect_token(self, live: OpenStream) -> None:
        if live.expect_token is not None:
            live.expect_token()

    def can_give_end(self) -> bool:
        return self.tokenizer.available

    def give_end(self, live: OpenStream, plan: act.Plan) -> None:
        self.begin_attempt(live, plan, gives_end=True)

    def stream_closed(self, live: OpenStream) -> None:
        self._metrics.streams.ended(live, self.clock())
        if live.id in self.recoveries.running:
            self.recoveries.settle(live.id, "ended")

    def note(self, action: act.Record) -> None:
        match action:
            case act.Recovered():
                if (recovering := self.streams.get(action.stream)) is not None:
                    self.recoveries.decided(action, recovering)
            case act.Redirect():
                self.recoveries.redirected(self.streams[action.stream])
            case act.Settled():
                self.recoveries.predicted(action)
            case act.RowsLoaded():
                self.recoveries.loaded(action)
            case act.Ejected():
                extra = {
                    "instance": action.instance,
                    "cause": action.cause,
                    "pause_s": action.pause_s,
                }
                log.warning("instance ejected", extra=extra)
            case act.Readmitted():
                log.info("instance readmitted", extra={"instance": action.instance})
            case _:
                assert_never(action)

    def count_slot(self, outcome: SlotOutcome) -> None:
        self._metrics.slots.labels(outcome).inc()

    def _task_ended(self, task: EagerTask[None], error: BaseException | None) -> None:
        live = self._tasks.pop(task)
        if not self._tasks and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)
        if error is not None and not isinstance(error, asyncio.CancelledError):
            # This is a bug of kvrs. The client's handler raises it too, so that neither task goes
            # on as if nothing had happened.
            log.error("attempt ended by a bug", exc_info=error)
            if not live.outcome.done():
                live.outcome.set_exception(error)

    def end_stream(self, live: OpenStream, outcome: CoreOutcome) -> None:
        is_refused = isinstance(outcome, act.GiveUp) and outcome.reason is act.Reason.REFUSED
        if live.refused_by and not is_refused:
            blame_refusers(self._metrics, live)
        found: Outcome
        match outcome:
            case Complete():
                found = outcome
            case act.GiveUp(reason=act.Reason.REFUSED):
                assert live.refusal is not None
                self._metrics.admission.given_up.labels(act.Reason.REFUSED).inc()
                self.recoveries.rejected(live.id)
                extra = {"stream": live.id, "cause": outcome.message}
                log.info("request rejected", extra=extra)
                found = live.refusal
            case act.GiveUp():
                self._metrics.admission.given_up.labels(outcome.reason).inc()
                if outcome.reason not in _SHED:
                    extra = {
                        "stream": live.id,
                        "reason": outcome.reason,
                        "cause": outcome.message,
                    }
                    log.warning("stream given up", extra=extra)
                status = _STATUS.get(outcome.reason, self.context.busy_status)
                kind = _KINDS.get(status, "server_error")
                message = outcome.message
                if outcome.reason is act.Reason.NO_INSTANCE:
                    message += self._why_not_up()
                body = error_body(message, kind=kind, code=outcome.reason)
                is_final = outcome.reason in _NOT_AGAIN
                retry_after_s = None if is_final else outcome.retry_after_s
                found = Failed(status, body, retry_after_s)
            case CannotContinue():
                log.warning(
                    "stream cannot continue", extra={"stream": live.id, "cause": outcome.cause}
                )
                body = error_body(outcome.cause, kind="server_error", code="inexact")
                found = Failed(502, body)
            case _:
                assert_never(outcome)
        if not live.outcome.done():
            live.outcome.set_result(found)

    def _why_not_up(self) -> str:
        """Describe for a client why instances are not up, without their addresses."""
        causes = [
            f"; {each.id}: {each.reason.removesuffix(f' ({self.backends[each.id].url})')}"
            for each in self.control.instances.present()
            if each.health is not Health.UP and each.reason is not None
        ]
        return "".join(causes[:_MOST_CAUSES])

    def wake_at(self, at_s: float) -> None:
        def wake() -> None:
            self._wakes.discard(handle)
            self.control.tell(ev.TimerFired(), self.clock())

        handle = asyncio.get_running_loop().call_later(max(0.0, at_s - self.clock()), wake)
        self._wakes.add(handle)

    def weights_known(self) -> None:
        for live in [*self.streams.values()]:
            is_promised = live.journal.promise is not ev.Promise.NONE
            if is_promised and self.control.self_tests.differ(live.decoders):
                cause = "cannot be continued exactly: it has tokens of instances that differ"
                self.control.end(live, CannotContinue(cause), self.clock())

    def instance_changed(self, event: ev.InstanceUp | ev.InstanceLost | ev.GpuJudged) -> None:
        match event:
            case ev.InstanceUp(info=info):
                self._files.accept(info.root)
                log.info("instance up", extra={"instance": info.id, "epoch": info.epoch})
                known = self.control.instances.known[info.id]
                judged = self.aborted_transfers([known]).get(info.id)
                if judged is not None and not judged.are_held:
                    extra = {"instance": info.id, "cause": judged.cause}
                    log.warning("pages of aborted transfers may be overwritten", extra=extra)
            case ev.InstanceLost(instance=name, cause=cause):
                log.warning("instance lost", extra={"instance": name, "cause": cause})
            case ev.GpuJudged(instance=name, state=state, reason=reason):
                extra = {"instance": name, "state": state, "reason": reason}
                log.warning("gpu judged", extra=extra)
            case _:
                assert_never(event)


def out_of_time(what: str, limit_s: float | None) -> Failed:
    """Failure of a request that got no `what` within `proxy.request_timeout_s`, here `limit_s`."""
    message = f"no {what} came within {limit_s:g} s (proxy.request_timeout_s)"
    return Failed(504, error_body(message, kind="server_error", code="timeout"))
