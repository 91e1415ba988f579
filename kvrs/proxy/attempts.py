"""One attempt at a stream, from its plan to its last token. It reports how it went and decides nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId
from kvrs.policy.actions import Plan
from kvrs.proxy.backends.pd import PdBackend, Prefilled, RefusedError
from kvrs.proxy.clients import ClientGoneError
from kvrs.proxy.relay import Relay
from kvrs.proxy.streams import LiveStream, Stage
from kvrs.proxy.watchdog import silence_limit

# A killed process resets all its sockets at once, but they are read one after the other: wait this long for the news
# that the whole instance is gone, so that all its victims are decided together.
LOST_TOGETHER_S = 0.002
# A complete response is read to its end, so that its connection can be used again.
_END_TIMEOUT_S = 1.0


class Reports(Protocol):
    """Who hears how an attempt goes."""

    def prefill_done(self, live: LiveStream, attempt: int, instance: InstanceId) -> bool:
        """Whether this attempt goes on to decode."""

    def resumed(self, live: LiveStream, attempt: int) -> None: ...
    def relayed(self, tokens: int) -> None: ...
    def attempt_failed(self, live: LiveStream, attempt: int, instance: InstanceId, cause: str) -> None: ...
    def refused(self, live: LiveStream, error: RefusedError) -> None: ...
    def completed(self, live: LiveStream) -> None: ...
    def client_gone(self, live: LiveStream) -> None: ...


class Attempt:
    """Runs in a task of its own, which is cancelled when a later attempt takes over."""

    def __init__(
        self,
        live: LiveStream,
        attempt: int,
        plan: Plan,
        *,
        backends: Callable[[InstanceId], PdBackend],
        patience_s: Callable[[InstanceId], float],
        clock: Callable[[], float],
        reports: Reports,
    ) -> None:
        self._live = live
        self._attempt = attempt
        self._plan = plan
        self._backends = backends
        self._patience_s = patience_s  # How long an instance may be silent, its queue included.
        self._clock = clock
        self._reports = reports
        self._instance = plan.prefill or plan.decode  # Whom a failure is put down to.

    async def run(self) -> None:
        try:
            await self._produce()
        except RefusedError as error:
            self._reports.refused(self._live, error)
        except ClientGoneError:
            self._reports.client_gone(self._live)
        except UpstreamError as error:
            await asyncio.sleep(LOST_TOGETHER_S)
            self._reports.attempt_failed(self._live, self._attempt, self._instance, str(error))

    async def _produce(self) -> None:
        plan, live = self._plan, self._live
        transfer: msgspec.Raw | None = None
        # Where one instance does both, its prefix cache is the hand-off; what is needed of the call are the prompt's ids.
        prefill = plan.prefill or (plan.decode if live.journal.prompt_ids is None else None)
        if prefill is not None:
            answer = await self._prefill(prefill)
            transfer = answer.transfer if plan.prefill is not None else None
            if not self._reports.prefill_done(live, self._attempt, prefill):
                return
        await self._decode(transfer)

    async def _prefill(self, instance: InstanceId) -> Prefilled:
        live = self._live
        live.enter(Stage.PREFILL, instance)
        live.prefilled_at.add(instance)
        async with silence_limit(self._patience_s(instance), paused=lambda: False):
            answer = await self._backends(instance).prefill(live.journal, self._attempt)
        if live.journal.prompt_ids is None:
            live.journal.prompt_ids = answer.prompt_ids
        return answer

    async def _decode(self, transfer: msgspec.Raw | None) -> None:
        live = self._live
        self._instance = self._plan.decode
        live.enter(Stage.DECODE, self._instance)
        relay = Relay(
            live.journal,
            live.client,
            self._attempt,
            clock=self._clock,
            resumed=lambda: self._reports.resumed(live, self._attempt),
            relayed=self._reports.relayed,
        )
        backend = self._backends(self._plan.decode)
        async with (
            silence_limit(self._patience_s(self._plan.decode), paused=lambda: live.client.blocked) as watchdog,
            backend.decode(live.journal, self._attempt, self._plan, transfer) as chunks,
        ):
            if not await relay.copy(chunks, watchdog.heard):
                return
            # The client need not wait for the rest, and a failure in it is none of the stream's.
            self._reports.completed(live)
            await _read_to_end(chunks)


async def _read_to_end(chunks: AsyncIterator[bytes]) -> None:
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            async for _ in chunks:
                pass
    except (TimeoutError, UpstreamError):
        return
