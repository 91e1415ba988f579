"""One attempt at a stream, from its plan to its last token. It reports how it went; `kvrs.core`
decides what follows.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kvrs.core.control import Control
from kvrs.core.fleet.silence import EVENT_LOOP_STALL_S, LOST_TOGETHER_S, SilenceTimer
from kvrs.core.live import CannotContinue
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.errors import ConfigError, KvrsError, UpstreamError
from kvrs.ids import InstanceId
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.backends.backend import Backend, Prefilled, RefusedError
from kvrs.proxy.backends.bodies import Call, decode_call, prefill_call
from kvrs.proxy.fleet.slots import SlotDeniedError, SlotSender
from kvrs.proxy.streams.clients import ClientGoneError
from kvrs.proxy.streams.continuation import Continuation, EngineText
from kvrs.proxy.streams.live import Failed, OpenStream, StreamPhase
from kvrs.proxy.streams.relay import ErrorEventError, Relay
from kvrs.proxy.streams.tokenizer import LazyTokenizer
from kvrs.proxy.wire.peer import (
    BusyError,
    ConnectionLostError,
    DeniedError,
    NotConnectedError,
)
from kvrs.proxy.wire.watchdog import SilentError, Watchdog

if TYPE_CHECKING:
    from kvrs.proxy.streams.spans import CallSpan, RequestTrace

_NO_SPAN = nullcontext()


class AttemptDriver(Protocol):
    """Where an attempt runs, and to whom it reports how it went."""

    control: Control[OpenStream]
    backends: Mapping[InstanceId, Backend]
    tokenizer: LazyTokenizer
    refuses_inexact: bool
    slots: SlotSender
    busy_status: int  # Of the last busy answer of any instance.
    clock: Callable[[], float]

    def suspect_instance(self, instance: InstanceId) -> bool: ...
    def resumed(self, live: OpenStream, attempt: int) -> None: ...
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
    ) -> None: ...
    def slot_denied(
        self, live: OpenStream, attempt: int, target: InstanceId, wait_s: float
    ) -> None: ...
    def completed(self, live: OpenStream) -> None: ...
    def fail(self, live: OpenStream, failure: Failed) -> None: ...


class Attempt:
    """Runs in a task of its own, which is cancelled when a later attempt takes over."""

    __slots__ = (
        *("_asks_slot", "_attempt", "_control", "_driver", "_first_token_timeout_s"),
        *("_has_resumed", "_instance", "_instances", "_live", "_plan", "_prefilling"),
        *("_produced_before", "_relay", "_span"),
    )

    def __init__(
        self, live: OpenStream, attempt: int, plan: act.Plan, driver: AttemptDriver
    ) -> None:
        self._live = live
        self._attempt = attempt
        self._plan = plan
        self._driver = driver
        self._control = driver.control
        self._instances = driver.control.instances
        self._instance = plan.prefill or plan.decode  # The one that a failure is attributed to.
        self._has_resumed = False
        self._asks_slot = False  # It fetches history, or is about to.
        self._span: CallSpan | None = None  # That of the decode call, if it is traced.
        # Facts of an attempt that is one call: the instance that computes the history, and how much
        # of the output belongs to that.
        self._prefilling: InstanceId | None = None
        self._produced_before = 0
        # The relay of the decode call, while it runs.
        self._relay: Relay | None = None
        self._first_token_timeout_s = 0.0

    def run(self) -> Coroutine[Any, Any, None]:
        return self._report(self._produce)

    def end_alone(self) -> Coroutine[Any, Any, None]:
        """Give the client what is missing of a stream that has all its ids: no engine is needed for
        it.
        """
        return self._report(self._end_alone)

    async def _report(self, begin: Callable[[], "_Work"]) -> None:
        live, driver = self._live, self._driver
        try:
            work: _Work | None = begin()
            del begin
            while work is not None:
                work = await work
        except RefusedError as error:
            live.refusal = Failed(error.status, error.body, rejected=True)
            self._failed(error, ev.FailureKind.REFUSED)
        except DeniedError as error:
            # Another instance may take the key. If none does, the client is told at once.
            body = error_body(f"{self._instance}: {error}", kind="server_error", code="denied")
            live.refusal = Failed(502, body)
            self._failed(error, ev.FailureKind.REFUSED)
        except SlotDeniedError as error:
            driver.slot_denied(live, self._attempt, error.target, error.wait_s)
        except ClientGoneError:
            gone = error_body("the client is gone", kind="client_gone")
            driver.fail(live, Failed(499, gone))
        except ConfigError as error:
            self._control.end(live, CannotContinue(str(error)), driver.clock())
        except UpstreamError as error:
            is_silent = isinstance(error, SilentError)
            # The loss of an instance that is given up ends this task, however busy the loop is.
            is_given_up = is_silent and driver.suspect_instance(self._instance)
            has_waited = isinstance(error, ConnectionLostError) and error.has_waited
            if not has_waited:
                await asyncio.sleep(EVENT_LOOP_STALL_S if is_given_up else LOST_TOGETHER_S)
            if isinstance(error, BusyError):
                driver.busy_status = error.status
            is_busy = isinstance(error, BusyError | NotConnectedError)
            self._failed(error, ev.FailureKind.BUSY if is_busy else ev.FailureKind.BROKEN)
        finally:
            if self._asks_slot:
                self._release_slot()

    def _failed(self, error: KvrsError, failure: ev.FailureKind) -> None:
        self._driver.attempt_failed(
            self._live,
            self._attempt,
            self._instance,
            str(error),
            abrupt=isinstance(error, ConnectionLostError | SilentError),
            failure=failure,
            retry_after_s=error.retry_after_s if isinstance(error, BusyError) else None,
            final=isinstance(error, RefusedError) and error.is_final,
        )

    async def _produce(self) -> "_Work | None":
        """Everything before the decode call, which is returned: while it lasts, nothing of this is
        kept.
        """
        plan, live = self._plan, self._live
        continuation = await self._continuation() if live.journal.output_ids else None
        if continuation is not None and (live.journal.remaining_tokens == 0 or continuation.ended):
            self._give_end(continuation)
            return None
        if plan.prefill is not None and self._instances.is_one_call(plan):
            self._prefilling, self._produced_before = plan.prefill, len(live.journal.output_ids)
            self._calls_prefill(plan.prefill)
            return self._decode(None, continuation)
        computes_prompt = plan.prefill is None and self._instances.computes_prompts(plan.decode)
        if computes_prompt and not live.journal.output_ids:
            self._prefilling = plan.decode
            self._calls_prefill(plan.decode)
            return self._decode(None, None)
        transfer: msgspec.Raw | None = None
        if (prefill := live.prefills_at(plan)) is not None:
            answer = await self._prefill(prefill)
            transfer = answer.transfer if plan.prefill is not None else None
            if not self._control.prefill_done(live, self._attempt, prefill, self._driver.clock()):
                return None
            assert live.plan is not None
            if live.plan is not plan:
                self._plan = live.plan  # Redirected, to an engine that may need other text.
                continuation = await self._continuation()
            if (
                transfer is not None
                and answer.good_until_s is not None
                and self._driver.clock() > answer.good_until_s
            ):
                raise UpstreamError(
                    "the hand-off came too late to be used: this proxy was stopped in between"
                )
        return self._decode(transfer, continuation)

    async def _end_alone(self) -> None:
        self._give_end(Continuation(self._live.journal, await self._driver.tokenizer.load()))

    def _give_end(self, continuation: Continuation | EngineText) -> None:
        exact = self._instances.resumes_exactly(self._plan.decode)
        self._new_relay(continuation, exact).end_alone()
        self._driver.completed(self._live)

    async def _continuation(self) -> Continuation | EngineText | None:
        """The maker of the client's text, where the decode instance's own would not fit the text
        before it. Without a tokenizer it is the engine's own all the same, unless `proxy.inexact:
        refuse` forbids that.
        """
        journal, tokenizer = self._live.journal, self._driver.tokenizer
        resumes_exactly = self._instances.resumes_exactly(self._plan.decode)
        fits = resumes_exactly and journal.text_sent is None
        only_the_end = journal.remaining_tokens == 0 and tokenizer.available
        if not journal.output_ids or (fits and not only_the_end):
            return None
        if not tokenizer.available and not self._driver.refuses_inexact:
            return None if resumes_exactly else EngineText(journal)
        return Continuation(journal, await tokenizer.load())

    async def _prefill(self, instance: InstanceId) -> Prefilled:
        journal = self._live.journal
        self._calls_prefill(instance)
        timeout_s = self._control.progress.first_token_timeout_s(instance)
        places = self._instances.places(instance, self._plan) if self._plan.places else ()

        def excused() -> bool:
            return self._stays() or self._is_making_progress(instance)

        with (
            self._traced("prefill", instance) as span,
            Watchdog(lambda: timeout_s, excused),
        ):
            call = prefill_call(
                journal,
                self._attempt,
                places,
                exact=self._instances.resumes_exactly(instance),
                traceparent=None if span is None else span.traceparent,
            )
            answer = await self._driver.backends[instance].prefill(call)
        if journal.prompt_ids is None:
            journal.prompt_ids = journal.parsed.tokenised(answer.prompt_ids)
        if journal.cached_tokens is None and not journal.output_ids:
            journal.cached_tokens = answer.cached_tokens
        return answer

    def _calls_prefill(self, instance: InstanceId) -> None:
        self._live.enter(StreamPhase.PREFILL, instance)
        self._control.calls_prefill(self._live, instance)

    def _stays(self) -> bool:
        """The instance re-forms, and the stream waits there for that."""
        return self._live.stays_until_s > self._driver.clock()

    def _is_making_progress(self, instance: InstanceId) -> bool:
        return self._control.progress.is_making_progress(instance, self._driver.clock())

    async def _decode(
        self, transfer: msgspec.Raw | None, continuation: Continuation | EngineText | None
    ) -> None:
        live, plan = self._live, self._plan
        self._instance = plan.decode
        if live.journal.output_ids:
            self._check_exactness(plan.decode)
        if self._prefilling is None:
            live.enter(StreamPhase.DECODE, plan.decode)
        slot = 0
        if plan.runs:  # A hand-off of a prefill is not counted.
            self._asks_slot = True
            slot = await self._driver.slots.acquire(
                plan.decode, live.id, live.journal.owner_epoch, self._attempt
            )
        progress = self._control.progress
        self._first_token_timeout_s = progress.first_token_timeout_s(plan.decode)
        if self._prefilling is not None:
            self._first_token_timeout_s = max(
                self._first_token_timeout_s, progress.first_token_timeout_s(self._prefilling)
            )
        exact = self._instances.resumes_exactly(plan.decode)
        watchdog = Watchdog(self._limit_s, self._is_excused)
        self._relay = relay = self._new_relay(continuation, exact, watchdog.silence)
        live.expect_token = relay.expect_token
        backend = self._driver.backends[plan.decode]
        is_handed_off = transfer is not None and plan.prefill is not None
        try:
            with self._traced("decode", plan.decode) as self._span, watchdog:
                decoded = backend.decode(self._decode_call(transfer, slot, exact), relay)
                del transfer, continuation  # The answer may take minutes.
                await decoded
                relay.check_end()
        except ErrorEventError as error:
            is_blamed = is_handed_off and not self._has_resumed
            if is_blamed and plan.prefill and backend.blames_prefill(error.details):
                self._instance = plan.prefill
            raise
        finally:
            relay.leave()
            self._relay = None
            if self._attempt == live.journal.attempt:
                live.expect_token = None

    def _decode_call(self, transfer: msgspec.Raw | None, slot: int, exact: bool) -> Call:
        plan, instances, journal = self._plan, self._instances, self._live.journal
        call = decode_call(
            journal,
            self._attempt,
            plan.runs,
            instances.places(plan.decode, plan) if plan.places else (),
            transfer,
            exact=exact,
            slot_token=slot,
            traceparent=None if self._span is None else self._span.traceparent,
        )
        journal.parsed.pack()
        return call

    def _traced(self, name: str, instance: InstanceId) -> "AbstractContextManager[CallSpan | None]":
        """The span of a call, if the request has a trace."""
        journal = self._live.journal
        if journal.request is None or journal.request.trace is None:
            return _NO_SPAN
        trace: RequestTrace = journal.request.trace
        return trace.call(name, instance, journal)

    # The silence of the decode call.

    def _waits_at(self) -> tuple[InstanceId, ...]:
        """The instances that it waits for."""
        if self._prefilling is None or self._has_resumed:
            return (self._plan.decode,)
        return self._plan.decode, self._prefilling

    def _limit_s(self) -> float:
        relay, now_s = self._relay, self._driver.clock()
        if not self._has_resumed or relay is None:
            return self._first_token_timeout_s
        return self._control.progress.token_gap_s(
            self._live, self._plan.decode, relay.silence.heard_s, now_s
        )

    def _is_excused(self) -> bool:
        relay = self._relay
        return (
            (relay is not None and relay.is_complete)
            or self._live.client.blocked
            or self._stays()
            or any(map(self._is_making_progress, self._waits_at()))
        )

    def _check_exactness(self, target: InstanceId) -> None:
        """Mark a stream that this instance cannot go on with exactly, as self-tests have seen.

        Raises:
            ConfigError: `proxy.inexact: refuse` forbids to go on.
        """
        live = self._live
        is_sampled = live.journal.parsed.request.temperature > 0
        tests = self._control.self_tests
        if tests.goes_on(live.decoded_by, target, sampled=is_sampled):
            return
        if self._driver.refuses_inexact:
            raise ConfigError(f"cannot be continued exactly: {target} computes other tokens")
        if "tokens" not in live.journal.inexact:
            live.journal.inexact = (*live.journal.inexact, "tokens")

    def _release_slot(self) -> None:
        journal = self._live.journal
        self._driver.slots.release(journal.stream, journal.owner_epoch, self._attempt)

    def _resumed(self) -> None:
        if self._has_resumed:  # It stayed at an instance that has re-formed.
            self._driver.resumed(self._live, self._attempt)
            return
        self._has_resumed = True
        if self._span is not None:
            self._span.first_token()
        self._live.decoded_by = self._control.self_tests.process(self._plan.decode)
        if self._asks_slot:
            self._release_slot()
        if self._prefilling is not None:
            self._control.prefilled(
                self._live,
                self._attempt,
                self._prefilling,
                self._live.prompt_tokens + self._produced_before,
                self._driver.clock(),
            )
            is_current = self._attempt == self._live.journal.attempt
            if is_current and self._live.phase is StreamPhase.PREFILL:
                self._live.enter(StreamPhase.DECODE, self._plan.decode)
        self._driver.resumed(self._live, self._attempt)

    def _new_relay(
        self,
        continuation: Continuation | EngineText | None,
        exact: bool,
        silence: SilenceTimer | None = None,
    ) -> Relay:
        live = self._live
        return Relay(
            live.journal,
            live.client,
            self._attempt,
            clock=self._driver.clock,
            resumed=self._resumed,
            delivered=self._control.progress.of(self._plan.decode),
            completed=partial(self._driver.completed, live),
            exact=exact,
            continuation=continuation,
            silence=silence,
        )


# What an attempt does, and what it goes over to; None: that was all.
_Work = Coroutine[Any, Any, "_Work | None"]
