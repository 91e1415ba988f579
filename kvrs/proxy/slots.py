"""Slots of this proxy's attempts at the agents of their targets, which arbitrate between proxies.

Asked for right before the decode call of an attempt that fetches: all that are asked for in one turn of the event loop go to an
agent in one message, with those given back before. Renewed in one message per agent and third of a lease, given back as
soon as the attempt has brought a token or is over. An agent that cannot be asked stops nobody, and that is counted: each proxy
then takes its own part of the target's slots.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvrs.errors import KvrsError, UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import AgentInfo, Slot, SlotAnswer, SlotAsked, SlotUpdate
from kvrs.proxy.agents import Agents, KnownAgent
from kvrs.proxy.instances import Health, Instances

log = logging.getLogger(__name__)

LEASE_S = 10.0  # A proxy that dies keeps others from its slots no longer.
# A recovery does not wait longer for an agent that hangs, and those after it do not wait at all for a while.
_PATIENCE_S = 0.25
_DEAF_S = 1.0
_LAST_WORDS_S = 0.5
_LOOK_S = 0.1
_ALONE_WAIT_S = 0.25  # Until another of the transfers that nobody arbitrates may have ended.


class SlotDeniedError(KvrsError):
    """Other proxies hold the target's slots."""

    def __init__(self, target: InstanceId, wait_s: float) -> None:
        super().__init__(f"{target} has no slot left")
        self.target = target
        self.wait_s = wait_s


@dataclass(slots=True)
class _Outbox:
    """What one agent is told in its next message."""

    release: list[SlotAsked] = field(default_factory=list)
    acquire: dict[SlotAsked, asyncio.Future[Slot | None]] = field(default_factory=dict)


class Slots:
    """`count` hears the outcome of each that was asked for: granted, denied, or unarbitrated; and of each that was lost."""

    def __init__(
        self, owner: str, agents: Agents, instances: Instances, lease_s: float, share: int, count: Callable[[str], None]
    ) -> None:
        """`owner` is this run of this proxy, and of no other; `share` is its part of a target's slots while no agent gives them
        out: all proxies together then take no more than there are.
        """
        self._owner = owner
        self._agents = {known.node: known for known in agents.known.values()}
        self._instances = instances
        self._lease_s = min(lease_s, LEASE_S)
        self._share = max(1, share)
        self._count = count
        self._alone: dict[StreamId, SlotAsked] = {}  # What nobody arbitrates.
        # Whatever an agent may have granted, whether or not its answer came.
        self._held: dict[StreamId, tuple[KnownAgent, SlotAsked]] = {}
        self._outboxes: dict[InstanceId, _Outbox] = {}
        self._deaf_until_s: dict[InstanceId, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def acquire(self, target: InstanceId, stream: StreamId, owner_epoch: int, attempt: int) -> int:
        """The slot's token; 0: the target's node has no agent, or none that answers.

        Raises:
            SlotDeniedError: none is left, or this proxy has its part of them and nobody answers.
        """
        known = self._agents.get(self._instances.known[target].node)
        if known is None:
            return 0
        loop = asyncio.get_running_loop()
        asked = SlotAsked(target, stream, attempt, owner_epoch)
        if known.health is not Health.UP or loop.time() < self._deaf_until_s.get(known.id, 0.0):
            return self._go_alone(asked)
        self._let_go(stream)  # An attempt before this one, which has not come to its end yet.
        self._held[stream] = known, asked
        answered: asyncio.Future[Slot | None] = loop.create_future()
        self._outbox(known).acquire[asked] = answered
        done, _ = await asyncio.wait([answered], timeout=_PATIENCE_S)
        slot = answered.result() if done else None
        if slot is None:
            self._deaf_until_s[known.id] = loop.time() + _DEAF_S
            return self._go_alone(asked)
        if not slot.token:
            self._held.pop(stream, None)  # But it keeps its place in line.
            self._count("denied")
            raise SlotDeniedError(target, slot.wait_s)
        self._count("granted")
        return slot.token

    def _go_alone(self, asked: SlotAsked) -> int:
        if sum(each.target == asked.target and each.stream != asked.stream for each in self._alone.values()) >= self._share:
            self._let_go(asked.stream)  # Its agent may have heard.
            self._count("denied")
            raise SlotDeniedError(asked.target, _ALONE_WAIT_S)
        self._alone[asked.stream] = asked
        self._count("unarbitrated")
        return 0

    def release(self, stream: StreamId, owner_epoch: int, attempt: int) -> None:
        """The attempt fetches nothing any more, if it ever did."""
        alone = self._alone.get(stream)
        if alone is not None and (alone.owner_epoch, alone.attempt) == (owner_epoch, attempt):
            del self._alone[stream]
        if stream in self._held:
            asked = self._held[stream][1]
            if (asked.owner_epoch, asked.attempt) == (owner_epoch, attempt):
                self._let_go(stream)

    async def run(self) -> None:
        """Renew until cancelled; at once where an agent is back, for it may know of nothing, and give to others what is held."""
        loop, met = asyncio.get_running_loop(), dict[InstanceId, AgentInfo]()
        renewed_s = loop.time()
        while True:
            await asyncio.sleep(min(_LOOK_S, self._lease_s / 3))
            if is_time := loop.time() >= renewed_s + self._lease_s / 3:
                renewed_s = loop.time()
            for known in self._agents.values():
                is_back = known.health is Health.UP and met.get(known.id) is not known.info
                if is_back and known.info is not None:
                    met[known.id] = known.info
                held = [asked for holder, asked in self._held.values() if holder is known]
                if held and (is_time or is_back):
                    self._begin(self._send(known, SlotUpdate(self._owner, self._lease_s, renew=held), []))

    async def close(self) -> None:
        """Let others have what this proxy held, as far as that takes no time."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_WORDS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _let_go(self, stream: StreamId) -> None:
        if (held := self._held.pop(stream, None)) is not None:
            self._outbox(held[0]).release.append(held[1])

    def _outbox(self, known: KnownAgent) -> _Outbox:
        outbox = self._outboxes.get(known.id)
        if outbox is None:
            outbox = self._outboxes[known.id] = _Outbox()
            self._begin(self._post(known))
        return outbox

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, known: KnownAgent) -> None:
        """In the next turn of the event loop: the victims of one event have all asked by then."""
        outbox = self._outboxes.pop(known.id)
        update = SlotUpdate(self._owner, self._lease_s, release=outbox.release, acquire=list(outbox.acquire))
        await self._send(known, update, list(outbox.acquire.values()))

    async def _send(self, known: KnownAgent, update: SlotUpdate, answered: list[asyncio.Future[Slot | None]]) -> None:
        slots: list[Slot] | list[None] = [None] * len(answered)
        try:
            answer: SlotAnswer = await known.backend.slots(update)
            if len(answer.acquired) != len(answered):
                raise UpstreamError(f"answers {len(answer.acquired)} of {len(answered)} requests for slots")
            slots = answer.acquired
            self._note_lost(answer.lost, update)
        except UpstreamError as error:
            log.warning("slots not told", extra={"instance": known.id, "cause": str(error)})
        finally:
            for future, slot in zip(answered, slots, strict=True):
                if not future.done():
                    future.set_result(slot)

    def _note_lost(self, lost: list[StreamId], update: SlotUpdate) -> None:
        """The agent has given them to others, and ends the transfers that still run."""
        renewed = {asked.stream: asked for asked in update.renew}
        for stream in lost:
            if stream in self._held and self._held[stream][1] == renewed.get(stream):
                del self._held[stream]
                self._count("lost")
