"""Driver of the core, and the calls of an attempt: the core's decisions about streams are performed
with tasks, timers, clients, and calls to engines and agents.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from kvrs.config.cluster import Backend as Engine
from kvrs.config.file import Config
from kvrs.config.proxy import Inexact
from kvrs.core.books.at_agents import SlotOutcome
from kvrs.core.configured import Configured
from kvrs.core.control import Attempt, CallFault, Control
from kvrs.core.fleet.known import all_refused
from kvrs.core.fleet.silence import SilenceTimer
from kvrs.core.fleet.tested import AbortedTransfers, aborted_transfers
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Health, Member
from kvrs.core.model.streams import CannotContinue, Complete
from kvrs.core.model.streams import Outcome as CoreOutcome
from kvrs.core.watch import DeathCause
from kvrs.errors import ConfigError, KvrsError, UndecodableError, UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.process.eager_task import EagerTask
from kvrs.protocol.instance import InstanceInfo, LoadReport, Role
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.backends.backend import Backend, Prefilled, RefusedError
from kvrs.proxy.backends.bodies import Call, HandOff, RowLoad, decode_call, prefill_call, store_load
from kvrs.proxy.backends.model_files import ModelFiles
from kvrs.proxy.backends.rendering import tokenize_call, tokenized_ids
from kvrs.proxy.fleet.leases import LeaseSender, SlotDeniedError, SlotSender
from kvrs.proxy.streams.abandoned import DetachedPairs, GivenUpHandOffs
from kvrs.proxy.streams.continuation import Continuation, EngineText, is_answer_plain
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.open_stream import (
    Client,
    ClientGoneError,
    Failed,
    OpenStream,
    Outcome,
    StreamPhase,
    failed_by,
)
from kvrs.proxy.streams.recoveries import RecoveryLog
from kvrs.proxy.streams.relay import ErrorEventError, Relay
from kvrs.proxy.streams.tokenizer import LazyTokenizer
from kvrs.proxy.streams.whole_answers import (
    BeginsAgain,
    Parsers,
    WholeAnswer,
    WholeClient,
    ask_whole,
    is_asked_whole,
)
from kvrs.proxy.wire.errors import (
    BusyError,
    ConnectionLostError,
    DeniedError,
    DifferentOutputError,
    EngineError,
    NotANumberError,
    NotConnectedError,
)
from kvrs.proxy.wire.exactness import WEIGHTS, is_plain_chat
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.message_parts import REASONING
from kvrs.proxy.wire.peer import AgentBackend
from kvrs.proxy.wire.requests import CURRENT
from kvrs.proxy.wire.watchdog import SilentError, Watchdog

if TYPE_CHECKING:
    from kvrs.proxy.streams.event_log import EventLog
    from kvrs.proxy.streams.spans import CallSpan, RequestTrace

log = logging.getLogger(__name__)

_NO_SPAN = nullcontext()

# `Retry-After` for clients if every instance is refused: an operator must repair the instances
# first.
_REFUSED_RETRY_S = 10.0
_MOST_CAUSES = 4  # Most causes in an answer.
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


# Number of streams, cut by one death, that call in one turn of the event loop: about a
# millisecond's work. With one per turn, the last stream would call when nearly all answers to the
# others are handled.
CALLS_IN_TURN = 8


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
        event_log: "EventLog | None" = None,
        files: ModelFiles | None = None,
    ) -> None:
        self._files = files or ModelFiles(config.cluster.model)
        self.metrics = metrics
        self.clock = clock
        self.backends = backends
        self.agent_backends = agent_backends
        self.engine = config.cluster.backend
        self.request_timeout_s = config.proxy.request_timeout_s
        # Id of this run of the proxy: a proxy that replaces this one has another id.
        self.run_id = f"{config.proxy.id}-{secrets.token_hex(8)}"
        self._event_log = event_log
        self._wall_clock = wall_clock
        self._told_at = -inf, 0.0  # Time of the last event by both clocks, as `_wall_s` has it.
        self.control = control = Control[OpenStream](
            Configured.of(config),
            run_id=self.run_id,
            shell=self,
            runs_self_tests=config.proxy.self_test,
            trace=None if event_log is None else self._trace,
        )
        self.recoveries = RecoveryLog(control.streams, clock, wall_clock, metrics.recoveries)
        self.tokenizer = LazyTokenizer(self._files)
        self.parsers = Parsers()
        # vLLM parses reasoning and tool calls differently in streams and in whole answers, so it is
        # asked for a whole answer with these in one piece.
        self.is_vllm = self.engine is Engine.VLLM
        self.refuses_inexact = config.proxy.inexact is Inexact.REFUSE
        self.slots = SlotSender(control.slots, agent_backends)
        self.hand_offs = GivenUpHandOffs(control.instances, backends, metrics.hand_offs, clock)
        self.detached = DetachedPairs(control, metrics.detached_pairs, clock)
        self.turns = asyncio.Semaphore(CALLS_IN_TURN)
        # Functions by instance that treat its silence as its end, and return False if the silence
        # is too short for that.
        self.end_watch: dict[InstanceId, Callable[[], bool]] = {}
        self.tests_wake = asyncio.Event()  # Set when a self-test may be due.
        # HTTP status of the last busy answer of any instance; 503 before the first.
        self.busy_status = 503
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
        if self._event_log is not None:
            self._event_log.note(now_s, self._wall_s(now_s), event, actions)

    def _wall_s(self, now_s: float) -> float:
        """Return the time of day of an event, once rounded, so that the event log and the page show
        the same.
        """
        if self._told_at[0] != now_s:
            self._told_at = now_s, round(self._wall_clock(), 3)
        return self._told_at[1]

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
            self.metrics.worker_lost(known.id, death, silent_s)
        else:
            self.metrics.agent_lost(known.id, death)

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
        self.metrics.streams.active.value += 1
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
            self.fail(live, failure, cause)

    def end_early(self, stream: StreamId, failure: Failed) -> None:
        """End a stream for a reason of the proxy's own; do nothing if it has ended."""
        if (live := self.streams.get(stream)) is not None:
            self.fail(live, failure)

    async def close(self) -> None:
        """End every stream with an explicit error, and wait for the tasks of all streams."""
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
        self.recoveries.close()
        await self.slots.close()
        await self.detached.close()
        await self.hand_offs.close()

    def begin_attempt(self, live: OpenStream, plan: act.Plan, *, gives_end: bool = False) -> None:
        if not gives_end:
            phase = StreamPhase.DECODE if plan.prefill is None else StreamPhase.PREFILL
            live.enter(phase, plan.prefill or plan.decode)
        # The client has just left: its stream ends when the stream's own task runs.
        if live.outcome.done():
            return
        work = AttemptCalls(live, plan, self).run(gives_end=gives_end)
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

    @property
    def penalises_chats(self) -> bool:
        """Return whether the model's own defaults give chats a `repetition_penalty`."""
        model = self._files.served
        return model is not None and model.default_sampling.get("repetition_penalty", 1) != 1

    def suspect_instance(self, instance: InstanceId) -> bool:
        """Handle an instance's long silence, which may concern several streams; return whether the
        instance is given up.

        A hanging instance sends nothing at all. So its streams are decided together, and it is
        fenced when it wakes.
        """
        end_watch = self.end_watch.get(instance)
        if end_watch is None or self.control.progress.is_heard(instance, self.clock()):
            return False
        return end_watch()

    def attempt_over(self, live: OpenStream, event: ev.AttemptFailed | ev.SlotDenied) -> None:
        if isinstance(event, ev.AttemptFailed):
            instance = event.instance
            extra = {
                "stream": live.id,
                "attempt": event.attempt,
                "instance": instance,
                "cause": event.cause,
            }
            is_doubted = event.failure in (ev.FailureKind.REFUSED, ev.FailureKind.ERROR)
            if is_doubted and not live.journal.output_ids:
                log.info("attempt refused", extra=extra)
                live.refused_by = (*live.refused_by, instance)
            elif event.failure is ev.FailureKind.DIFFERS:
                log.info("output differs", extra=extra)
            else:
                log.warning("attempt failed", extra=extra)
                self.metrics.failures.labels(instance).inc()
        # The task that reports here is ending by itself, so it must not be cancelled.
        live.task = None
        self.control.attempt_over(live, event, self.clock())

    def fail(self, live: OpenStream, failure: Failed, cause: str = "") -> None:
        """End the stream with this failure. `cause`: as in `StreamEnded`."""
        if not live.outcome.done():
            live.outcome.set_result(failure)
        self.control.close(live, self.clock(), cause)

    def catch_up_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.control.catch_up)

    def expect_token(self, live: OpenStream) -> None:
        if live.expect_token is not None:
            live.expect_token()

    def can_give_end(self) -> bool:
        return self.tokenizer.available

    def give_end(self, live: OpenStream, plan: act.Plan) -> None:
        self.begin_attempt(live, plan, gives_end=True)

    def stream_closed(self, live: OpenStream) -> bool:
        self.metrics.streams.ended(live, self.clock())
        return live.id in self.recoveries.hit

    def note(self, event: ev.Event, actions: Sequence[act.Action], now_s: float) -> None:
        self.recoveries.note(now_s, self._wall_s(now_s), event, actions)
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
                pass
        for action in actions:
            match action:
                case act.Ejected(instance=name, cause=cause):
                    ejected = {"instance": name, "cause": cause, "pause_s": action.pause_s}
                    log.warning("instance ejected", extra=ejected)
                case act.Readmitted(instance=name):
                    log.info("instance readmitted", extra={"instance": name})
                case _:
                    pass

    def post_slots(self, agent: InstanceId) -> None:
        self.slots.post_soon(agent)

    def leases_begun(self) -> None:
        self.leases.begin()
        self.checkpoint_leases.begin()

    def tests_due(self) -> None:
        self.tests_wake.set()

    def count_slot(self, outcome: SlotOutcome) -> None:
        self.metrics.slots.labels(outcome).inc()

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
            blame_refusers(self.metrics, live)
        found: Outcome
        match outcome:
            case Complete():
                found = outcome
            case act.GiveUp(reason=act.Reason.REFUSED):
                assert live.refusal is not None
                self.metrics.admission.given_up.labels(act.Reason.REFUSED).inc()
                extra = {"stream": live.id, "cause": outcome.message}
                log.info("request rejected", extra=extra)
                found = live.refusal
            case act.GiveUp():
                self.metrics.admission.given_up.labels(outcome.reason).inc()
                if outcome.reason not in _SHED:
                    extra = {
                        "stream": live.id,
                        "reason": outcome.reason,
                        "cause": outcome.message,
                    }
                    log.warning("stream given up", extra=extra)
                status = _STATUS.get(outcome.reason, self.busy_status)
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


def blame_refusers(metrics: Metrics, live: OpenStream) -> None:
    """Count the refusals of a request that turned out not to be at fault as failures of the
    instances.
    """
    for instance in live.refused_by:
        extra = {"stream": live.id, "instance": instance}
        log.warning("refused a request that is not at fault", extra=extra)
        metrics.failures.labels(instance).inc()
    live.refused_by = ()


def out_of_time(what: str, limit_s: float | None) -> Failed:
    """Failure of a request that got no `what` within `proxy.request_timeout_s`, here `limit_s`."""
    message = f"no {what} came within {limit_s:g} s (proxy.request_timeout_s)"
    return Failed(504, error_body(message, kind="server_error", code="timeout"))


class AttemptCalls:
    """The calls of one attempt, in a task that is cancelled when a later attempt takes over. It is
    the `Reported` of the reader of the decode call's answer.
    """

    __slots__ = (
        "_attempt",
        "_driver",
        "_hand_off",
        "_instances",
        "_live",
        "_relay",
        "_rows",
        "_span",
        "_trace",
        "delivered",
        "now_s",
        "number",
        "silence",
    )

    def __init__(self, live: OpenStream, plan: act.Plan, driver: Driver) -> None:
        self._attempt = Attempt(driver.control, live, plan)
        self._live = live
        self._driver = driver
        self._instances = driver.control.instances
        self.now_s = driver.clock
        self.number = self._attempt.number
        self.delivered = driver.control.progress.delivered[plan.decode]
        self.silence = SilenceTimer(driver.clock())
        request = live.journal.request
        self._trace: RequestTrace | None = None if request is None else request.trace
        # Span of the decode call; None: no call yet, or not traced.
        self._span: CallSpan | None = None
        # Reader of the decode call's answer; None: the call does not run.
        self._relay: Relay | WholeAnswer | None = None
        # Hand-off of an engine without leases of the proxy, until it is fetched; else None.
        self._hand_off: HandOff | None = None
        self._rows: RowLoad | None = None  # Rows that the decode call loads; None: no rows.

    async def run(self, *, gives_end: bool = False) -> None:
        """Run the attempt. With `gives_end`, send the client the missing end of a stream that has
        all its ids, which needs no engine.
        """
        attempt, live, driver = self._attempt, self._live, self._driver
        try:
            work: _Work | None = self._end_alone() if gives_end else self._produce()
            while work is not None:
                work = await work
        except RefusedError as error:
            self._blame_prefill(error)
            live.refusal = Failed(error.status, error.body, rejected=True)
            self._over(attempt.failure(CallFault.REFUSED, str(error), final=error.is_final))
        except SlotDeniedError as error:
            self._over(attempt.denial(error.wait_s))
        except (ClientGoneError, UndecodableError) as error:
            driver.fail(live, failed_by(error))
        except ConfigError as error:
            driver.control.end(live, CannotContinue(str(error)), driver.clock())
        except UpstreamError as error:
            await self._failed(error)
        finally:
            self._give_up_hand_off()

    async def _failed(self, error: UpstreamError) -> None:
        """Report the failure of a call, after a delay if news of its instance may follow."""
        attempt, live, driver = self._attempt, self._live, self._driver
        self._blame_prefill(error)
        if self._hand_off is not None and isinstance(error, BusyError | DeniedError):
            # A gateway may have answered before any engine had the hand-off, so its blocks must be
            # freed.
            self._hand_off.is_sent = False
        fault, is_silent = _fault_of(error), isinstance(error, SilentError)
        is_given_up = is_silent and driver.suspect_instance(attempt.failed_at)
        has_waited = isinstance(error, ConnectionLostError) and error.has_waited
        if delay_s := fault.delay_s(is_given_up=is_given_up, has_waited=has_waited):
            await asyncio.sleep(delay_s)
        retry_after_s, same_tokens, final = None, 0, False
        match error:
            case BusyError():
                driver.busy_status, retry_after_s = error.status, error.retry_after_s
            case NotANumberError():
                live.journal.spoilt_attempt = attempt.number
            case EngineError():
                live.refusal = Failed(error.status, error.body, rejected=True)
                final = error.names_input
            case SilentError():
                attempt.fell_silent(driver.clock())
            case DifferentOutputError():
                same_tokens = error.same_tokens
            case _:
                pass
        cause = str(error)
        self._over(
            attempt.failure(
                fault, cause, retry_after_s=retry_after_s, final=final, same_tokens=same_tokens
            )
        )

    def _give_up_hand_off(self) -> None:
        """Have the KV freed that the attempt leaves at prefill, unless an engine has got the
        hand-off.
        """
        hand_off, self._hand_off = self._hand_off, None
        if hand_off is None or hand_off.is_sent:
            return
        journal = self._live.journal
        history = journal.prompt if self._attempt.plan.replays else journal.history
        assert history is not None
        driver = self._driver
        driver.hand_offs.add(hand_off.source, hand_off.transfer, history, hand_off.prefilled_s)

    def _blame_prefill(self, error: KvrsError) -> None:
        if error.is_of_prefill:
            self._attempt.blame_prefill()

    def _over(self, event: ev.AttemptFailed | ev.SlotDenied | None) -> None:
        if event is not None:
            self._driver.attempt_over(self._live, event)

    async def _produce(self) -> "_Work | None":
        """Do everything before the decode call, and return that call (None: no call is needed any
        more). The call runs outside, so that nothing of this frame is kept while it lasts.
        """
        attempt, live = self._attempt, self._live
        goes_on = live.journal.output_ids or live.journal.is_rendered
        continuation = await self._continuation() if goes_on else None
        if continuation is not None and (live.journal.remaining_tokens == 0 or continuation.ended):
            self._give_end(continuation)
            return None
        plan, transfer, ids_text, prefill = attempt.plan, None, None, attempt.begin()
        decode = self._instances.known[plan.decode]
        if decode.info.chats_by_ids and live.journal.prompt_ids is None:
            continuation = await self._rendered()
        if plan.prefill is None and (prefill or attempt.computes):
            live.enter(StreamPhase.PREFILL, plan.decode)
        if prefill is not None:
            answer = await self._prefill(prefill)
            transfer = answer.transfer if plan.prefill is not None else None
            # Use the engine's text only for the prompt ids that it reported, not for a client's own
            # ids.
            if live.journal.prompt_ids is answer.prompt_ids:
                ids_text = answer.ids_text
            if transfer is not None and answer.good_until_s is not None:
                self._hand_off = HandOff(
                    prefill,
                    self._instances.known[prefill].node,
                    len(answer.prompt_ids),
                    answer.ranks,
                    transfer,
                    self._driver.clock(),
                )
            if not attempt.prefilled(self._driver.clock(), answer.reused_tokens):
                return None
            live.enter(StreamPhase.DECODE, attempt.plan.decode)
            # The attempt was redirected to an engine that may need other text.
            if attempt.plan is not plan:
                continuation = await self._continuation()
            if (
                transfer is not None
                and answer.good_until_s is not None
                and self._driver.clock() > answer.good_until_s
            ):
                raise UpstreamError(
                    "the hand-off came too late to be used: this proxy was stopped in between"
                )
        return self._decode(transfer, continuation, ids_text)

    async def _end_alone(self) -> None:
        try:
            continuation = Continuation(self._live.journal, await self._driver.tokenizer.load())
        except DifferentOutputError as error:  # A parser has made the text, and knows the end.
            raise ConfigError(f"cannot be continued exactly: {error}") from None
        self._give_end(continuation)

    def _give_end(self, continuation: Continuation | EngineText) -> None:
        live, plan = self._live, self._attempt.plan
        exact = self._instances.known[plan.decode].abilities.resumes_exactly
        replays = plan.replays
        Relay(
            live.journal, live.client, self, exact=exact, continuation=continuation, replays=replays
        ).end_alone()
        self.completed()

    async def _continuation(self) -> Continuation | EngineText | None:
        """Return the maker of the client's text, if the decode instance's text would not fit the
        text before it; None: the text fits. Without a tokenizer the engine's text is used, unless
        `proxy.inexact: refuse` forbids it.
        """
        journal, tokenizer = self._live.journal, self._driver.tokenizer
        resumes_exactly = self._instances.known[self._attempt.plan.decode].abilities.resumes_exactly
        fits = resumes_exactly and journal.text_sent is None
        only_the_end = tokenizer.available and journal.remaining_tokens == 0
        is_begun = bool(journal.output_ids) or journal.is_rendered
        if self._attempt.plan.replays or not is_begun or (fits and not only_the_end):
            return None
        if not tokenizer.available and not self._driver.refuses_inexact:
            return None if resumes_exactly else EngineText(journal)
        return Continuation(journal, await tokenizer.load())

    async def _rendered(self) -> Continuation | None:
        """Let the engine tokenise a chat's messages, and return the maker of the stream's text.
        None: the stream gets no ids, because its engine parses the output, or there is no
        tokenizer.
        """
        journal, tokenizer = self._live.journal, self._driver.tokenizer
        if not (tokenizer.available and is_plain_chat(journal.parsed)):
            return None
        at = self._attempt.failed_at
        with Watchdog(self._attempt.limit_s, self._is_excused):
            answer = await self._driver.backends[at].ask(tokenize_call(journal))
        journal.prompt_ids = journal.parsed.tokenised(tokenized_ids(answer))
        journal.is_rendered = True
        if self._driver.penalises_chats and "repetition_penalty" not in journal.parsed.fields:
            journal.exactness.mark("repetition_penalty")
        model = journal.parsed.request.model or self._instances.model or ""
        head = {"id": f"chatcmpl-{journal.stream}", "created": int(time.time()), "model": model}
        journal.head = msgspec.json.encode(head)[:-1]
        return Continuation(journal, await tokenizer.load())

    async def _prefill(self, instance: InstanceId) -> Prefilled:
        if self._attempt.number > 1:
            await self._turn()
        journal, plan = self._live.journal, self._attempt.plan
        traced: AbstractContextManager[CallSpan | None] = _NO_SPAN
        if self._trace is not None:
            traced = self._trace.call("prefill", instance, journal)
        watchdog = Watchdog(self._attempt.limit_s, self._is_excused)
        with traced as span, watchdog:
            call = prefill_call(
                journal,
                self._attempt.number,
                plan,
                self._instances.known[instance],
                None if span is None else span.traceparent,
            )
            answer = await self._driver.backends[instance].prefill(call)
        if journal.prompt_ids is None:
            journal.prompt_ids = journal.parsed.tokenised(answer.prompt_ids)
        elif plan.replays and answer.prompt_ids != journal.prompt:
            raise DifferentOutputError("rendered another prompt")
        if journal.cached_tokens is None and not journal.output_ids:
            journal.cached_tokens = answer.cached_tokens
        return answer

    async def _decode(
        self,
        transfer: msgspec.Raw | None,
        continuation: Continuation | EngineText | None,
        ids_text: msgspec.Raw | None,
    ) -> None:
        attempt, live, plan, driver = self._attempt, self._live, self._attempt.plan, self._driver
        check = self._check_exactness if live.journal.output_ids else self._check_weights
        check(plan.decode)
        asked = attempt.decode()
        slot = 0 if asked is None else await self._driver.slots.acquire(asked)
        if attempt.number > 1:
            await self._turn()
            if live.journal.output_ids:
                self._avoid_store()
        exact = self._instances.known[plan.decode].abilities.resumes_exactly
        relay = self._relay = self._new_reader(continuation, exact)
        live.expect_token = relay.expect_token
        backend = self._driver.backends[plan.decode]
        is_handed_off = transfer is not None
        traced: AbstractContextManager[CallSpan | None] = _NO_SPAN
        if self._trace is not None:
            traced = self._trace.call("decode", plan.decode, live.journal)
        watchdog = Watchdog(attempt.limit_s, self._is_excused, self.silence)
        try:
            with traced as self._span, watchdog:
                call = decode_call(
                    live.journal,
                    attempt.number,
                    plan,
                    self._instances.known[plan.decode],
                    transfer,
                    slot_token=slot,
                    ids_text=ids_text,
                    traceparent=None if self._span is None else self._span.traceparent,
                )
                self._mark(call, relay)
                live.journal.parsed.pack()
                decoded = backend.decode(call, relay)
                # Release these objects now: the answer may take minutes.
                del call, transfer, continuation, ids_text
                await decoded
                relay.check_end()
            if live.journal.answer_from is not None and driver.parsers.plain_answers is None:
                await self._learn_answers()
        except ErrorEventError as error:
            if backend.blames_load(error.details):
                self._blame_load(is_handed_off=is_handed_off)
            raise
        finally:
            relay.leave()
            self._relay = None
            if attempt.number == live.journal.attempt:
                live.expect_token = None

    async def _learn_answers(self) -> None:
        """Learn from a complete message with a thought whether answers are the text of their ids,
        so that later ones can be continued from these.
        """
        journal, tokenizer = self._live.journal, self._driver.tokenizer
        is_cut = isinstance(journal.stop_reason, str)  # The text ends before the ids do.
        if (
            journal.finished
            and not (journal.exactness.never_as_text or is_cut)
            and tokenizer.available
        ):
            is_plain = is_answer_plain(journal, await tokenizer.load())
            self._driver.parsers.plain_answers = is_plain

    def _avoid_store(self) -> None:
        """Keep the call from finding KV in the decode instance's store, if that is not trusted."""
        if self._driver.control.self_tests.stores.distrusts(self._attempt.plan.decode):
            self._live.journal.spoilt_attempt = self._attempt.number

    def _blame_load(self, *, is_handed_off: bool) -> None:
        """Note that the decode instance could not load KV. `is_handed_off`: from the hand-off, so
        the prefill instance is blamed. Otherwise the instance's store is blamed, and this stream's
        later attempts load nothing from a store, which may again announce KV that it does not have.
        """
        if is_handed_off:
            self._attempt.blame_hand_off()
        elif self._asks_store and not self._attempt.has_resumed:
            self._attempt.blame_store()
            self._live.journal.spoilt_attempt = self._attempt.number

    @property
    def _asks_store(self) -> bool:
        """Return whether the decode instance has a store in which the call may find KV. False after
        a spoilt attempt of the stream, whose calls then have a salt that no stored KV has.
        """
        known = self._instances.known[self._attempt.plan.decode]
        return bool(known.store) and not self._live.journal.spoilt_attempt

    async def _turn(self) -> None:
        """Let only a few streams that lost the same instance call in each turn of the event loop,
        so that tokens of other streams and reports of other instances pass in between.
        """
        async with self._driver.turns:
            await asyncio.sleep(0)

    def _is_excused(self) -> bool:
        relay = self._relay
        return (
            relay is not None and (relay.is_complete or self._live.client.blocked)
        ) or self._attempt.is_excused(self._driver.clock())

    def _check_exactness(self, target: InstanceId) -> None:
        """Check that the target continues the stream exactly, by its self-tests and a replay if
        needed; otherwise mark the stream as inexact.

        Raises:
            ConfigError: the continuation is inexact, and the client was promised exact tokens.
        """
        live = self._live
        replays = self._attempt.plan.replays
        if live.journal.needs_replay and not replays:
            self._end_replays()
        is_sampled = live.journal.parsed.request.temperature > 0
        tests = self._driver.control.self_tests
        process = tests.processes.get(target)
        differs = process is not None and tests.differ((*live.decoders, process))
        if not live.decoders:  # Another proxy began the stream, on weights that are not known here.
            differs |= tests.standing(target).is_doubted
        if prefill := self._attempt.plan.prefill:
            differs |= self._instances.known[prefill].is_doubted
        if not differs and all(
            tests.goes_on(each, target, sampled=is_sampled, replays=replays)
            for each in live.decoders
        ):
            return
        if live.journal.promise is not ev.Promise.NONE:
            raise ConfigError(f"cannot be continued exactly: {target} computes other tokens")
        live.journal.exactness.mark("tokens")

    def _check_weights(self, target: InstanceId) -> None:
        """Mark a stream that begins at instances whose weights are not known to be right.

        Raises:
            ConfigError: the client was promised exact tokens; the policy learned of it too late.
        """
        prefill, known = self._attempt.plan.prefill, self._instances.known
        if not (known[target].is_doubted or (prefill and known[prefill].is_doubted)):
            return
        journal = self._live.journal
        if journal.promise is not ev.Promise.NONE:
            raise ConfigError(f"cannot begin at {target}: the weights are not known to be right")
        journal.exactness.mark(WEIGHTS)

    def _end_replays(self) -> None:
        """Note that the attempt continues or ends the stream without a replay: the features in
        `replayed` become inexact. Raises ConfigError: the client was promised exact tokens.
        """
        journal = self._live.journal
        is_promised = journal.promise is not ev.Promise.NONE
        journal.exactness.forgo_replay()
        if is_promised:
            features = ", ".join(journal.inexact)
            raise ConfigError(f"cannot be continued exactly without a replay: {features}")

    def resumed(self) -> None:
        """Note that the client has a token: the first, or the first after a stay."""
        attempt, live = self._attempt, self._live
        if self._hand_off is not None:
            self._hand_off.was_fetched(self._driver.clock())
            self._hand_off = None
        if self._rows is not None:
            self._rows.over_s = self._driver.clock()
        parts = live.journal.parts
        if parts is not None and REASONING in parts.names():
            self._driver.parsers.reasoning = True
        if not attempt.has_resumed:
            if self._span is not None:
                self._span.first_token()
            process = self._driver.control.self_tests.processes.get(attempt.plan.decode)
            if process is not None and process not in live.decoders[-1:]:
                live.decoders = (*live.decoders, process)
        if live.refused_by:
            blame_refusers(self._driver.metrics, live)
        attempt.resumed(self._driver.clock())
        # Prefill and decode are one call, whose first token shows the end of prefill.
        if live.phase is StreamPhase.PREFILL and attempt.is_current:
            live.enter(StreamPhase.DECODE, attempt.plan.decode)

    def _mark(self, call: Call, reader: Relay | WholeAnswer) -> None:
        """Add to the decode call what follows from the plan: prefill beside it, rows to load, and
        the form of the answer.
        """
        plan = self._attempt.plan
        if (request := self._live.journal.request) is not None:
            request.served = plan.decode
        known = self._instances.known[plan.decode]
        if known.info.joins_prefill and plan.prefill is not None:
            call.beside, call.found = self._driver.backends[plan.prefill], self._found
            held = self._live.journal.parsed.held
            share = None if held is None else held.share
            call.keeper = self._driver.detached.keeper(plan.decode, share)
        if self._asks_store and self._hand_off is None and self._attempt.number > 1:
            call.rows = store_load(
                self._live.journal, self._attempt.number, known.abilities.page_size_tokens
            )
        call.hand_off, self._rows = self._hand_off, call.rows
        if call.rows is not None and call.rows.agents and plan.runs:
            agent = self._driver.control.agents.known.get(plan.runs[0].holder)
            call.rows.node = None if agent is None else agent.node
        if isinstance(reader, WholeAnswer):
            ask_whole(call)
            self._attempt.asks_whole(self._driver.clock())

    def _found(self, reused_tokens: int) -> None:
        self._attempt.found(reused_tokens, self._driver.clock())

    def completed(self) -> None:
        """Note that the client has the whole answer."""
        # Do not cancel the task: it still reads the last bytes of the response, so that the
        # connection can be reused.
        self._live.task = None
        self._driver.control.end(self._live, Complete(), self._driver.clock())

    def _new_reader(
        self, continuation: Continuation | EngineText | None, exact: bool
    ) -> Relay | WholeAnswer:
        """Make the reader of the decode call: a relay, or a reader of whole answers if the engine
        must parse these.
        """
        live, driver = self._live, self._driver
        # The plan may be another one than at the attempt's begin.
        self.delivered = driver.control.progress.delivered[self._attempt.plan.decode]
        self.silence.heard_s = self.now_s()
        if (
            not driver.is_vllm
            or not isinstance(live.client, WholeClient)
            or not is_asked_whole(live.journal, parses_reasoning=driver.parsers.reasoning)
        ):
            replays = self._attempt.plan.replays
            journal, client = live.journal, live.client
            return Relay(
                journal, client, self, exact=exact, continuation=continuation, replays=replays
            )
        return WholeAnswer(live.journal, live.client, self)


def _fault_of(error: UpstreamError) -> CallFault:
    match error:
        case DeniedError():
            return CallFault.DENIED
        case BusyError():
            return CallFault.BUSY
        case NotANumberError():
            return CallFault.NOT_A_NUMBER
        case DifferentOutputError():
            return CallFault.DIFFERS
        case NotConnectedError():
            return CallFault.NOT_CONNECTED
        case SilentError():
            return CallFault.SILENT
        case ConnectionLostError():
            return CallFault.LOST
        case EngineError():
            return CallFault.ERROR
        case _:
            return CallFault.WRONG


# Part of an attempt's work, which returns the part to go on with; None: done.
_Work = Coroutine[Any, Any, "_Work | None"]
