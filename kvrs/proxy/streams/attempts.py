"""Calls of one attempt at a stream, as `kvrs.core.attempt` decides them."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvrs.core.attempt import Attempt, CallFault
from kvrs.core.fleet.silence import SilenceTimer
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.live_stream import CannotContinue
from kvrs.errors import ConfigError, KvrsError, UndecodableError, UpstreamError
from kvrs.ids import InstanceId
from kvrs.proxy.backends.backend import Prefilled, RefusedError
from kvrs.proxy.backends.bodies import Call, HandOff, RowLoad, decode_call, prefill_call, store_load
from kvrs.proxy.backends.rendering import tokenize_call, tokenized_ids
from kvrs.proxy.fleet.slots import SlotDeniedError
from kvrs.proxy.streams.answer_reader import Told
from kvrs.proxy.streams.clients import ClientGoneError
from kvrs.proxy.streams.context import AttemptContext
from kvrs.proxy.streams.continuation import Continuation, EngineText, is_answer_plain
from kvrs.proxy.streams.open_stream import Failed, OpenStream, StreamPhase, failed_by
from kvrs.proxy.streams.relay import ErrorEventError, Relay
from kvrs.proxy.streams.responses import WholeClient
from kvrs.proxy.streams.whole_answers import WholeAnswer, ask_whole, is_asked_whole
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
from kvrs.proxy.wire.message_parts import REASONING
from kvrs.proxy.wire.watchdog import SilentError, Watchdog

if TYPE_CHECKING:
    from kvrs.proxy.streams.spans import CallSpan, RequestTrace

_NO_SPAN = nullcontext()


class AttemptCalls:
    """The calls of one attempt, in a task that is cancelled when a later attempt takes over."""

    __slots__ = (
        *("_attempt", "_context", "_hand_off", "_instances", "_live", "_relay", "_rows"),
        *("_span", "_trace"),
    )

    def __init__(self, live: OpenStream, plan: act.Plan, context: AttemptContext) -> None:
        self._attempt = Attempt(context.control, live, plan)
        self._live = live
        self._context = context
        self._instances = context.control.instances
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
        attempt, live, context = self._attempt, self._live, self._context
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
            context.fail(live, failed_by(error))
        except ConfigError as error:
            context.control.end(live, CannotContinue(str(error)), context.clock())
        except UpstreamError as error:
            await self._failed(error)
        finally:
            self._give_up_hand_off()

    async def _failed(self, error: UpstreamError) -> None:
        """Report the failure of a call, after a delay if news of its instance may follow."""
        attempt, live, context = self._attempt, self._live, self._context
        self._blame_prefill(error)
        if self._hand_off is not None and isinstance(error, BusyError | DeniedError):
            # A gateway may have answered before any engine had the hand-off, so its blocks must be
            # freed.
            self._hand_off.is_sent = False
        fault, is_silent = _fault_of(error), isinstance(error, SilentError)
        is_given_up = is_silent and context.suspect_instance(attempt.failed_at)
        has_waited = isinstance(error, ConnectionLostError) and error.has_waited
        if delay_s := fault.delay_s(is_given_up=is_given_up, has_waited=has_waited):
            await asyncio.sleep(delay_s)
        retry_after_s, same_tokens, final = None, 0, False
        match error:
            case BusyError():
                context.busy_status, retry_after_s = error.status, error.retry_after_s
            case NotANumberError():
                live.journal.spoilt_attempt = attempt.number
            case EngineError():
                live.refusal = Failed(error.status, error.body, rejected=True)
                final = error.names_input
            case SilentError():
                attempt.fell_silent(context.clock())
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
        context = self._context
        context.hand_offs.add(hand_off.source, hand_off.transfer, history, hand_off.prefilled_s)

    def _blame_prefill(self, error: KvrsError) -> None:
        if error.is_of_prefill:
            self._attempt.blame_prefill()

    def _over(self, event: ev.AttemptFailed | ev.SlotDenied | None) -> None:
        if event is not None:
            self._context.attempt_over(self._live, event)

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
                    self._context.clock(),
                )
            if not attempt.prefilled(self._context.clock(), answer.reused_tokens):
                return None
            live.enter(StreamPhase.DECODE, attempt.plan.decode)
            # The attempt was redirected to an engine that may need other text.
            if attempt.plan is not plan:
                continuation = await self._continuation()
            if (
                transfer is not None
                and answer.good_until_s is not None
                and self._context.clock() > answer.good_until_s
            ):
                raise UpstreamError(
                    "the hand-off came too late to be used: this proxy was stopped in between"
                )
        return self._decode(transfer, continuation, ids_text)

    async def _end_alone(self) -> None:
        try:
            continuation = Continuation(self._live.journal, await self._context.tokenizer.load())
        except DifferentOutputError as error:  # A parser has made the text, and knows the end.
            raise ConfigError(f"cannot be continued exactly: {error}") from None
        self._give_end(continuation)

    def _give_end(self, continuation: Continuation | EngineText) -> None:
        exact = self._instances.known[self._attempt.plan.decode].resumes_exactly
        silence = SilenceTimer(self._context.clock())
        self._new_relay(continuation, exact, silence).end_alone()
        self._context.completed(self._live)

    async def _continuation(self) -> Continuation | EngineText | None:
        """Return the maker of the client's text, if the decode instance's text would not fit the
        text before it; None: the text fits. Without a tokenizer the engine's text is used, unless
        `proxy.inexact: refuse` forbids it.
        """
        journal, tokenizer = self._live.journal, self._context.tokenizer
        resumes_exactly = self._instances.known[self._attempt.plan.decode].resumes_exactly
        fits = resumes_exactly and journal.text_sent is None
        only_the_end = tokenizer.available and journal.remaining_tokens == 0
        is_begun = bool(journal.output_ids) or journal.is_rendered
        if self._attempt.plan.replays or not is_begun or (fits and not only_the_end):
            return None
        if not tokenizer.available and not self._context.refuses_inexact:
            return None if resumes_exactly else EngineText(journal)
        return Continuation(journal, await tokenizer.load())

    async def _rendered(self) -> Continuation | None:
        """Let the engine tokenise a chat's messages, and return the maker of the stream's text.
        None: the stream gets no ids, because its engine parses the output, or there is no
        tokenizer.
        """
        journal, tokenizer = self._live.journal, self._context.tokenizer
        if not (tokenizer.available and is_plain_chat(journal.parsed)):
            return None
        at = self._attempt.failed_at
        with Watchdog(self._attempt.limit_s, self._is_excused):
            answer = await self._context.backends[at].ask(tokenize_call(journal))
        journal.prompt_ids = journal.parsed.tokenised(tokenized_ids(answer))
        journal.is_rendered = True
        if self._context.penalises_chats and "repetition_penalty" not in journal.parsed.fields:
            journal.inexact = tuple(dict.fromkeys((*journal.inexact, "repetition_penalty")))
        model = journal.parsed.request.model or self._instances.model or ""
        head = {"id": f"chatcmpl-{journal.stream}", "created": int(time.time()), "model": model}
        journal.head = msgspec.json.encode(head)[:-1]
        return Continuation(journal, await tokenizer.load())

    async def _prefill(self, instance: InstanceId) -> Prefilled:
        if self._attempt.number > 1:
            await self._turn()
        journal, plan = self._live.journal, self._attempt.plan
        places = self._instances.places(instance, plan) if plan.places else ()
        traced: AbstractContextManager[CallSpan | None] = _NO_SPAN
        if self._trace is not None:
            traced = self._trace.call("prefill", instance, journal)
        watchdog = Watchdog(self._attempt.limit_s, self._is_excused)
        with traced as span, watchdog:
            call = prefill_call(
                journal,
                self._attempt.number,
                places,
                exact=self._instances.known[instance].resumes_exactly,
                replays=plan.replays,
                load=plan.load,
                has_rows=self._instances.known[instance].has_tier,
                traceparent=None if span is None else span.traceparent,
            )
            answer = await self._context.backends[instance].prefill(call)
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
        attempt, live, plan, context = self._attempt, self._live, self._attempt.plan, self._context
        check = self._check_exactness if live.journal.output_ids else self._check_weights
        check(plan.decode)
        asked = attempt.decode()
        slot = 0 if asked is None else await self._context.slots.acquire(asked)
        if attempt.number > 1:
            await self._turn()
            if live.journal.output_ids:
                self._avoid_store()
        exact = self._instances.known[plan.decode].resumes_exactly
        silence = SilenceTimer(self._context.clock())
        relay = self._relay = self._new_reader(continuation, exact, silence)
        live.expect_token = relay.expect_token
        backend = self._context.backends[plan.decode]
        is_handed_off = transfer is not None
        traced: AbstractContextManager[CallSpan | None] = _NO_SPAN
        if self._trace is not None:
            traced = self._trace.call("decode", plan.decode, live.journal)
        watchdog = Watchdog(attempt.limit_s, self._is_excused, silence)
        try:
            with traced as self._span, watchdog:
                call = decode_call(
                    live.journal,
                    attempt.number,
                    plan.runs,
                    self._instances.places(plan.decode, plan) if plan.places else (),
                    transfer,
                    asked=plan.asked,
                    exact=exact,
                    replays=plan.replays,
                    tells_known=self._instances.known[plan.decode].replays,
                    load=plan.load if plan.prefill is None else None,
                    slot_token=slot,
                    has_rows=self._instances.known[plan.decode].has_tier,
                    traceparent=None if self._span is None else self._span.traceparent,
                    ids_text=ids_text,
                )
                self._mark(call, relay)
                live.journal.parsed.pack()
                decoded = backend.decode(call, relay)
                # Release these objects now: the answer may take minutes.
                del call, transfer, continuation, ids_text
                await decoded
                relay.check_end()
            if live.journal.answer_from is not None and context.parsers.plain_answers is None:
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
        journal, tokenizer = self._live.journal, self._context.tokenizer
        is_cut = isinstance(journal.stop_reason, str)  # The text ends before the ids do.
        if journal.finished and not (journal.never_as_text or is_cut) and tokenizer.available:
            is_plain = is_answer_plain(journal, await tokenizer.load())
            self._context.parsers.plain_answers = is_plain

    def _avoid_store(self) -> None:
        """Keep the call from finding KV in the decode instance's store, if that is not trusted."""
        if self._context.control.self_tests.stores.distrusts(self._attempt.plan.decode):
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
        async with self._context.turns:
            await asyncio.sleep(0)

    def _is_excused(self) -> bool:
        relay = self._relay
        return (
            relay is not None and (relay.is_complete or self._live.client.blocked)
        ) or self._attempt.is_excused(self._context.clock())

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
        tests = self._context.control.self_tests
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
        if "tokens" not in live.journal.inexact:
            live.journal.inexact = (*live.journal.inexact, "tokens")

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
        if WEIGHTS not in journal.inexact:
            journal.inexact = (*journal.inexact, WEIGHTS)

    def _end_replays(self) -> None:
        """Note that the attempt continues or ends the stream without a replay: the features in
        `journal.replayed` become inexact. Raises ConfigError: the client was promised exact tokens.
        """
        journal = self._live.journal
        is_promised = journal.promise is not ev.Promise.NONE
        journal.cannot_replay()
        if is_promised:
            features = ", ".join(journal.inexact)
            raise ConfigError(f"cannot be continued exactly without a replay: {features}")

    def _resumed(self) -> None:
        attempt, live = self._attempt, self._live
        if self._hand_off is not None:
            self._hand_off.was_fetched(self._context.clock())
            self._hand_off = None
        if self._rows is not None:
            self._rows.over_s = self._context.clock()
        parts = live.journal.parts
        if parts is not None and REASONING in parts.names():
            self._context.parsers.reasoning = True
        if not attempt.has_resumed:
            if self._span is not None:
                self._span.first_token()
            process = self._context.control.self_tests.processes.get(attempt.plan.decode)
            if process is not None and process not in live.decoders[-1:]:
                live.decoders = (*live.decoders, process)
        self._context.resumed(attempt)
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
            call.beside, call.found = self._context.backends[plan.prefill], self._found
            held = self._live.journal.parsed.held
            share = None if held is None else held.share
            call.keeper = self._context.detached.keeper(plan.decode, share)
        if self._asks_store and self._hand_off is None and self._attempt.number > 1:
            call.rows = store_load(self._live.journal, self._attempt.number, known.page_size_tokens)
        call.hand_off, self._rows = self._hand_off, call.rows
        if call.rows is not None and call.rows.agents and plan.runs:
            agent = self._context.control.agents.known.get(plan.runs[0].holder)
            call.rows.node = None if agent is None else agent.node
        if isinstance(reader, WholeAnswer):
            ask_whole(call)
            self._attempt.asks_whole(self._context.clock())

    def _found(self, reused_tokens: int) -> None:
        self._attempt.found(reused_tokens, self._context.clock())

    def _new_reader(
        self, continuation: Continuation | EngineText | None, exact: bool, silence: SilenceTimer
    ) -> Relay | WholeAnswer:
        """Make the reader of the decode call: a relay, or a reader of whole answers if the engine
        must parse these.
        """
        live, context = self._live, self._context
        if (
            not context.is_vllm
            or not isinstance(live.client, WholeClient)
            or not is_asked_whole(live.journal, parses_reasoning=context.parsers.reasoning)
        ):
            return self._new_relay(continuation, exact, silence)
        number = self._attempt.number
        return WholeAnswer(live.journal, live.client, number, **self._told(silence))

    def _new_relay(
        self, continuation: Continuation | EngineText | None, exact: bool, silence: SilenceTimer
    ) -> Relay:
        live = self._live
        return Relay(
            live.journal,
            live.client,
            self._attempt.number,
            exact=exact,
            continuation=continuation,
            replays=self._attempt.plan.replays,
            **self._told(silence),
        )

    def _told(self, silence: SilenceTimer) -> Told:
        context = self._context
        return {
            "clock": context.clock,
            "resumed": self._resumed,
            "delivered": context.control.progress.delivered[self._attempt.plan.decode],
            "completed": partial(context.completed, self._live),
            "silence": silence,
        }


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
