"""Leases that a proxy holds: of slots at agents, and of pages at instances and agents.

Sender of requests for slots to agents; requests of one turn of the event loop
share a message.

Sender of the leases by which instances and agents keep KV, in batches when due.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from kvrs.core.books.at_agents import ANSWER_TIMEOUT_S, AgentSlots, Denied
from kvrs.core.books.leases import Leases
from kvrs.errors import KvrsError, UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate, Slot, SlotRequest, SlotUpdate
from kvrs.proxy.wire.peer import AgentBackend

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 0.5


class SlotDeniedError(KvrsError):
    """All slots of the target are held by other proxies."""

    def __init__(self, target: InstanceId, wait_s: float) -> None:
        super().__init__(f"{target} has no slot left")
        self.target = target
        self.wait_s = wait_s


class SlotSender:
    def __init__(self, slots: AgentSlots, backends: Mapping[InstanceId, AgentBackend]) -> None:
        self._slots = slots
        self._backends = backends
        self._waiting: dict[SlotRequest, asyncio.Future[Slot | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_asked = asyncio.Event()

    async def acquire(self, asked: SlotRequest) -> int:
        """Acquire a slot and return its token; 0: the target's node has no answering agent.

        Raises:
            SlotDeniedError: no slot is left, or without an answering agent this proxy has its share
                of them.
        """
        loop = asyncio.get_running_loop()
        outcome = self._slots.request(asked, loop.time())
        if isinstance(outcome, str):
            answered = self._waiting[asked] = loop.create_future()
            done, _ = await asyncio.wait([answered], timeout=ANSWER_TIMEOUT_S)
            slot = answered.result() if done else None
            outcome = self._slots.answered(asked, outcome, slot, loop.time())
        if isinstance(outcome, Denied):
            raise SlotDeniedError(asked.target, outcome.wait_s)
        return outcome.token

    async def run(self) -> None:
        """Send renewals of held slots until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._slots.has_asked:
                self._has_asked.clear()
                await self._has_asked.wait()
                self._slots.begin(loop.time())
            await asyncio.sleep(self._slots.tick_s)
            for agent, update in self._slots.renewals(loop.time()).items():
                self._begin(self._send(agent, update))

    async def close(self) -> None:
        """Send the last releases of slots without waiting for answers."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def post_soon(self, agent: InstanceId) -> None:
        """Send the agent's message in the next turn of the event loop."""
        self._has_asked.set()
        self._begin(self._post_to(agent))

    async def _post_to(self, agent: InstanceId) -> None:
        await self._send(agent, self._slots.message(agent))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, agent: InstanceId, update: SlotUpdate) -> None:
        answered = [self._waiting.pop(asked, None) for asked in update.acquire]
        slots: list[Slot] | list[None] = [None] * len(answered)
        try:
            answer = await self._backends[agent].slots(update)
            if len(answer.acquired) != len(answered):
                raise UpstreamError(
                    f"answers {len(answer.acquired)} of {len(answered)} requests for slots"
                )
            slots = answer.acquired
            self._slots.renewed(agent, update, answer)
        except UpstreamError as error:
            log.warning("slots not told", extra={"instance": agent, "cause": str(error)})
        finally:
            for future, slot in zip(answered, slots, strict=True):
                if future is not None and not future.done():
                    future.set_result(slot)


class LeaseHolder(Protocol):
    """An instance or an agent that keeps KV under leases; also a simulated one."""

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        """Renew and end leases. Raises UpstreamError."""


class LeaseSender:
    def __init__(
        self,
        leases: Leases,
        holders: Mapping[InstanceId, LeaseHolder],
        is_up: Callable[[InstanceId], bool],
        unknown: Callable[[InstanceId, list[StreamId], float], None],
        clock: Callable[[], float],
    ) -> None:
        """`unknown` is called with the instance, its streams that an answer reports as not
        retained, and the time by `clock`.
        """
        self._leases = leases
        self._holders = holders
        self._is_up = is_up
        self._unknown = unknown
        self._clock = clock
        self._has_begun = asyncio.Event()

    def begin(self) -> None:
        """Begin to send: there may be a lease to renew or release again."""
        self._has_begun.set()

    async def run(self) -> None:
        """Send due batches of leases until cancelled."""
        clock, leases = asyncio.get_running_loop().time, self._leases
        leases.begin(clock())
        while True:
            if leases.is_empty:
                leases.is_idle = True
                while leases.is_idle:
                    self._has_begun.clear()
                    await self._has_begun.wait()
                leases.begin(clock())
            await asyncio.sleep(leases.tick_s)
            due = leases.due(clock())
            await asyncio.gather(*(self._send_batch(*each) for each in due.items()))

    async def _send_batch(self, instance: InstanceId, update: LeaseUpdate) -> None:
        try:
            if not self._is_up(instance):
                raise UpstreamError("not up")
            answer = await self._holders[instance].leases(update)
        except UpstreamError as error:
            log.warning("leases not renewed", extra={"instance": instance, "cause": str(error)})
            return  # Leases whose renewal or release was lost expire at the instance.
        if answer.unknown:
            self._unknown(instance, answer.unknown, self._clock())
