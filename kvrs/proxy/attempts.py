"""One attempt at a stream, from its plan to its last token. It reports how it went and decides nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec

from kvrs.errors import ConfigError, UpstreamError
from kvrs.ids import InstanceId
from kvrs.policy.actions import Place, Plan
from kvrs.proxy.backends.backend import Backend, Prefilled, RefusedError
from kvrs.proxy.backends.bodies import decode_call, prefill_call
from kvrs.proxy.backends.peer import ConnectionLostError
from kvrs.proxy.clients import ClientGoneError
from kvrs.proxy.continuation import Continuation
from kvrs.proxy.relay import ErrorEventError, Relay
from kvrs.proxy.slots import SlotDeniedError, Slots
from kvrs.proxy.streams import LiveStream, Stage
from kvrs.proxy.texts import Texts
from kvrs.proxy.watchdog import SilentError, silence_limit

# A killed process resets all its sockets at once, but they are read one after the other: wait this long for the news
# that the whole instance is gone, so that all its victims are decided together.
LOST_TOGETHER_S = 0.002
# A complete response is read to its end, so that its connection can be used again.
_END_TIMEOUT_S = 1.0


class Reports(Protocol):
    """Who hears how an attempt goes."""

    def prefill_done(self, live: LiveStream, attempt: int, instance: InstanceId) -> bool:
        """Whether this attempt goes on to decode."""

    def prefilled(self, live: LiveStream, attempt: int, instance: InstanceId, history_tokens: int) -> None:
        """Of an attempt that is one call: it has its first token, so that prefill was done with the history before it."""

    def resumed(self, live: LiveStream, attempt: int) -> None: ...
    def relayed(self, instance: InstanceId, tokens: int) -> None: ...
    def attempt_failed(self, live: LiveStream, attempt: int, instance: InstanceId, cause: str, *, abrupt: bool) -> None: ...
    def slot_denied(self, live: LiveStream, attempt: int, error: SlotDeniedError) -> None: ...
    def refused(self, live: LiveStream, error: RefusedError) -> None: ...
    def completed(self, live: LiveStream) -> None: ...
    def cannot_continue(self, live: LiveStream, cause: str) -> None: ...
    def client_gone(self, live: LiveStream) -> None: ...


class World(Protocol):
    """What an attempt finds where it runs."""

    texts: Texts
    slots: Slots

    def backend(self, instance: InstanceId) -> Backend: ...

    def is_one_call(self, plan: Plan) -> bool:
        """Whether the decode instance has the history computed by the plan's prefill instance itself."""

    def retains(self, instance: InstanceId) -> bool:
        """Whether it keeps pages under a lease, which is to be renewed and given back."""

    def resumes_exactly(self, instance: InstanceId) -> bool:
        """Whether the engine continues text, stop strings, usage and sampling itself."""

    def places(self, instance: InstanceId, plan: Plan) -> tuple[Place, ...]:
        """Where the instance is to send checkpoints; nowhere if it cannot."""

    def patience_s(self, instance: InstanceId) -> float:
        """How long an instance may be silent before its first token, its queue included."""

    def token_gap_s(self, live: LiveStream) -> float:
        """How long it may be silent between two tokens of the stream."""

    def doubt(self, instance: InstanceId) -> None:
        """It was silent for too long: perhaps not only for this stream."""

    def keeps_waiting(self, instance: InstanceId) -> bool:
        """Whether an instance has more streams than it can run at a time, and gets on with them."""


class Attempt:
    """Runs in a task of its own, which is cancelled when a later attempt takes over."""

    def __init__(
        self,
        live: LiveStream,
        attempt: int,
        plan: Plan,
        *,
        world: World,
        clock: Callable[[], float],
        reports: Reports,
    ) -> None:
        self._live = live
        self._attempt = attempt
        self._plan = plan
        self._world = world
        self._clock = clock
        self._reports = reports
        self._instance = plan.prefill or plan.decode  # Whom a failure is put down to.
        self._has_resumed = False
        # Of an attempt that is one call: who computes the history, and how much of the output belongs to that.
        self._prefilling: InstanceId | None = None
        self._produced_before = 0

    async def run(self) -> None:
        try:
            await self._report(self._produce())
        finally:
            self._release_slot()

    async def end_alone(self) -> None:
        """Give the client what is missing of a stream that has all its ids: no engine is needed for it."""
        await self._report(self._end_alone())

    async def _report(self, work: Awaitable[None]) -> None:
        try:
            await work
        except RefusedError as error:
            self._reports.refused(self._live, error)
        except SlotDeniedError as error:
            self._reports.slot_denied(self._live, self._attempt, error)
        except ClientGoneError:
            self._reports.client_gone(self._live)
        except ConfigError as error:
            self._reports.cannot_continue(self._live, str(error))
        except UpstreamError as error:
            if isinstance(error, SilentError):
                self._world.doubt(self._instance)
            await asyncio.sleep(LOST_TOGETHER_S)
            abrupt = isinstance(error, ConnectionLostError | SilentError)
            self._reports.attempt_failed(self._live, self._attempt, self._instance, str(error), abrupt=abrupt)

    async def _produce(self) -> None:
        plan, live = self._plan, self._live
        continuation = await self._continuation()
        if continuation is not None and (live.journal.remaining_tokens == 0 or continuation.ended):
            await self._give_end(continuation)
            return
        if plan.prefill is not None and self._world.is_one_call(plan):
            self._prefilling, self._produced_before = plan.prefill, len(live.journal.output_ids)
            self._note_retention(plan.prefill)
            await self._decode(None, continuation)
            return
        transfer: msgspec.Raw | None = None
        # Where one instance does both, its prefix cache is the hand-off; what is needed of the call are the prompt's ids.
        prefill = plan.prefill or (plan.decode if live.journal.prompt_ids is None else None)
        if prefill is not None:
            answer = await self._prefill(prefill)
            transfer = answer.transfer if plan.prefill is not None else None
            if not self._reports.prefill_done(live, self._attempt, prefill):
                return
            assert live.plan is not None
            if live.plan is not plan:
                self._plan = live.plan  # Redirected, to an engine that may need other text.
                continuation = await self._continuation()
            if transfer is not None and answer.good_until_s is not None and self._clock() > answer.good_until_s:
                raise UpstreamError("the hand-off came too late to be used: this proxy was stopped in between")
        await self._decode(transfer, continuation)

    async def _end_alone(self) -> None:
        await self._give_end(Continuation(self._live.journal, await self._world.texts.tokenizer()))

    async def _give_end(self, continuation: Continuation) -> None:
        await self._relay(continuation).end_alone()
        self._reports.completed(self._live)

    async def _continuation(self) -> Continuation | None:
        """What makes the client's text, where the decode instance's own would not fit the text before it."""
        journal, world = self._live.journal, self._world
        fits = world.resumes_exactly(self._plan.decode) and journal.text_sent is None
        only_the_end = journal.remaining_tokens == 0 and world.texts.available
        if not journal.output_ids or (fits and not only_the_end):
            return None
        return Continuation(journal, await world.texts.tokenizer())

    async def _prefill(self, instance: InstanceId) -> Prefilled:
        live = self._live
        live.enter(Stage.PREFILL, instance)
        self._note_retention(instance)
        world, patience_s = self._world, self._world.patience_s(instance)
        places = world.places(instance, self._plan)
        call = prefill_call(live.journal, self._attempt, places, exact=world.resumes_exactly(instance))
        async with silence_limit(lambda: patience_s, paused=lambda: world.keeps_waiting(instance)):
            answer = await world.backend(instance).prefill(call)
        if live.journal.prompt_ids is None:
            live.journal.prompt_ids = answer.prompt_ids
        return answer

    def _note_retention(self, instance: InstanceId) -> None:
        if self._world.retains(instance):
            self._live.prefilled_at.add(instance)

    async def _decode(self, transfer: msgspec.Raw | None, continuation: Continuation | None) -> None:
        live, plan, world = self._live, self._plan, self._world
        self._instance = plan.decode
        if self._prefilling is None:
            live.enter(Stage.DECODE, plan.decode)
        waits_at = [plan.decode, *filter(None, [self._prefilling])]
        places, exact = world.places(plan.decode, plan), world.resumes_exactly(plan.decode)
        # What fetches no history needs none: the hand-off of a prefill is not counted.
        slot = await world.slots.acquire(plan.decode, live.id, live.journal.owner_epoch, self._attempt) if plan.runs else 0
        call = decode_call(live.journal, self._attempt, plan.runs, places, transfer, exact=exact, slot_token=slot)
        relay = self._relay(continuation)
        patience_s = max(map(world.patience_s, waits_at))

        def limit_s() -> float:
            return world.token_gap_s(live) if self._has_resumed else patience_s

        def excused() -> bool:
            return live.client.blocked or any(map(world.keeps_waiting, waits_at[:1] if self._has_resumed else waits_at))

        backend = world.backend(plan.decode)
        try:
            async with silence_limit(limit_s, excused) as watchdog, backend.decode(call) as chunks:
                if not await relay.copy(chunks, watchdog.heard):
                    return
                # The client need not wait for the rest, and a failure in it is none of the stream's.
                self._reports.completed(live)
                if continuation is None:
                    await _read_to_end(chunks)
        except ErrorEventError as error:
            if transfer is not None and plan.prefill is not None and not self._has_resumed and backend.blames_prefill(error.said):
                self._instance = plan.prefill
            raise

    def _release_slot(self) -> None:
        self._world.slots.release(self._live.id, self._live.journal.owner_epoch, self._attempt)

    def _resumed(self) -> None:
        self._has_resumed = True
        self._release_slot()
        if self._prefilling is not None:
            history_tokens = self._live.journal.prompt_tokens + self._produced_before
            self._reports.prefilled(self._live, self._attempt, self._prefilling, history_tokens)
        self._reports.resumed(self._live, self._attempt)

    def _relay(self, continuation: Continuation | None) -> Relay:
        live = self._live
        return Relay(
            live.journal,
            live.client,
            self._attempt,
            clock=self._clock,
            resumed=self._resumed,
            relayed=lambda tokens: self._reports.relayed(self._plan.decode, tokens),
            exact=self._world.resumes_exactly(self._plan.decode),
            continuation=continuation,
        )


async def _read_to_end(chunks: AsyncIterator[bytes]) -> None:
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            async for _ in chunks:
                pass
    except (TimeoutError, UpstreamError):
        return
