"""Calls and hand-offs that attempts have given up while servers may still be at work on them.

Release of the blocks that unfetched hand-offs hold at prefill.

vLLM keeps the blocks of a hand-off until a decode instance has fetched them or their lease ends. If
an attempt gives up a hand-off before an engine has its decode call (the client has left, the decode
instance is busy or gone), a background request frees them. It delays no stream, and only few such
requests run at a time.

| the decode call             | the blocks                                            |
| --------------------------- | ----------------------------------------------------- |
| was not sent                | freed here                                            |
| was answered busy or denied | freed here: what answers so may stand before the engine |
| was refused (4xx)           | freed by vLLM as it refuses                           |
| was cut, or was silent      | freed by vLLM as it aborts                            |
| ended with its instance     | left to their lease: what was fetched is not known    |

Pairs of calls that attempts have given up while KV may be moving between their servers.

Each is kept in the background until its end (`sglang.py`), at most MOST_KEPT at a time, so
that no server gives pages to others that a transfer still writes. The place of the attempt's stream
in its tenant's limit is held until then.
"""

import asyncio
import collections
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Counter

from kvrs.core.books.tenants import StreamShare
from kvrs.core.control import Control
from kvrs.core.fleet.known import Instances
from kvrs.core.model import events as ev
from kvrs.core.model.member import Health, Member
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId
from kvrs.proxy.backends.backend import Backend, RefusedError
from kvrs.proxy.backends.bodies import Detached
from kvrs.proxy.streams.open_stream import OpenStream

# Most requests at a time, and most waiting hand-offs.
AT_A_TIME = 16
MOST_WAITING = 256
# Default of vLLM's `kv_lease_duration`, after which vLLM has freed the blocks by itself.
LEASE_S = 30.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 1.0


class Freed(StrEnum):
    """End of a given-up hand-off's blocks, as a label of its counter."""

    FREED = "freed"
    EXPIRED = "expired"  # No decode instance accepted the request before the lease ended.
    GONE = "gone"  # The prefill instance was lost with its blocks.
    DROPPED = "dropped"  # More than MOST_WAITING hand-offs were waiting.


def given_up_counter(registry: CollectorRegistry) -> Counter:
    """Make the counter of given-up hand-offs, with all series at 0."""
    counter = Counter(
        "kvrs_hand_offs_given_up",
        "Hand-offs of vLLM that no stream fetched, by what became of their blocks at prefill.",
        ["outcome"],
        registry=registry,
    )
    for how in Freed:
        counter.labels(how)
    return counter


class GivenUp(NamedTuple):
    source: InstanceId
    epoch: int  # Epoch of the prefill instance at the hand-off.
    transfer: msgspec.Raw
    history: "array[int]"
    until_s: float


class GivenUpHandOffs:
    """Frees the blocks of given-up hand-offs by background requests."""

    def __init__(
        self,
        instances: Instances,
        backends: Mapping[InstanceId, Backend],
        counter: Counter,
        clock: Callable[[], float],
    ) -> None:
        self._instances = instances
        self._backends = backends
        self._clock = clock
        self._counter = counter
        self._waiting: deque[GivenUp] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(
        self, source: InstanceId, transfer: msgspec.Raw, history: "array[int]", prefilled_s: float
    ) -> None:
        """Add a hand-off that prefill made at `prefilled_s`, and that an attempt has given up."""
        if len(self._waiting) >= MOST_WAITING:
            self._counter.labels(Freed.DROPPED).inc()
            return
        epoch = self._instances.known[source].epoch
        self._waiting.append(GivenUp(source, epoch, transfer, history, prefilled_s + LEASE_S))
        if len(self._tasks) < AT_A_TIME:
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        while self._waiting:
            self._counter.labels(await self._free(self._waiting.popleft())).inc()

    async def _free(self, given_up: GivenUp) -> Freed:
        pause_s, tried = _FIRST_PAUSE_S, None
        while self._clock() < given_up.until_s:
            source = self._instances.known[given_up.source]
            if source.health is not Health.UP or source.epoch != given_up.epoch:
                return Freed.GONE
            target = self._target(source, tried)
            if target is not None:
                tried = target.id
                try:
                    await self._backends[target.id].free_hand_off(
                        given_up.transfer, given_up.history
                    )
                    return Freed.FREED
                except RefusedError:  # vLLM frees the blocks of a refused request.
                    return Freed.FREED
                except UpstreamError:
                    pass
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        return Freed.EXPIRED

    def _target(self, source: Member, tried: InstanceId | None) -> Member | None:
        """Return the least loaded decode instance that can fetch from `source`, preferably not
        `tried`; None: no such instance.
        """
        now_s = self._clock()
        able = [
            each
            for each in self._instances.present()
            if each.abilities.decodes
            and each.health is Health.UP
            and each.takes_from(source)
            and not each.answers.is_busy(now_s)
        ]
        return min(able, key=lambda each: (each.id == tried, each.rank), default=None)


MOST_KEPT = 1024


def detached_counter(registry: CollectorRegistry) -> prometheus_client.Counter:
    """Make the counter of detached pairs, with all series at 0."""
    counter = prometheus_client.Counter(
        "kvrs_detached_pairs",
        "Pairs of calls given up while their KV may have been moving, by what ended them.",
        ["outcome"],
        registry=registry,
    )
    for outcome in Detached:
        counter.labels(outcome)
    return counter


class DetachedPairs:
    """The pairs that are kept. `at` has their number by decode instance."""

    def __init__(
        self,
        control: Control[OpenStream],
        counter: prometheus_client.Counter,
        clock: Callable[[], float],
    ) -> None:
        self._control, self._clock = control, clock
        self._ends = counter
        self._at = collections.Counter[InstanceId]()
        self._tasks = set[asyncio.Task[None]]()

    @property
    def at(self) -> Mapping[InstanceId, int]:
        return self._at

    def keeper(self, decode: InstanceId, share: StreamShare | None = None) -> "PairKeeper":
        """Return the keeper of an attempt's calls, which hold the share of their stream."""
        return PairKeeper(self, decode, self._control.instances.known[decode].epoch, share)

    def keep(self, decode: InstanceId, end: Coroutine[Any, Any, Detached]) -> bool:
        if len(self._tasks) >= MOST_KEPT:
            self._ends.labels(Detached.DROPPED).inc()
            return False
        self._at[decode] += 1
        task = asyncio.create_task(self._run(decode, end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def hung(self, decode: InstanceId, epoch: int) -> None:
        self._control.tell(ev.TransferHung(decode, epoch), self._clock())

    async def close(self) -> None:
        """Close all pairs."""
        await asyncio.sleep(0)  # A task that is cancelled before it begins closes nothing.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, decode: InstanceId, end: Coroutine[Any, Any, Detached]) -> None:
        outcome = Detached.CLOSED
        try:
            outcome = await end
        finally:
            self._ends.labels(outcome).inc()
            self._at[decode] -= 1


class PairKeeper:
    """The keeper of one attempt's calls, as `sglang_legs.Keeper`."""

    __slots__ = ("_epoch", "_is_kept", "_pairs", "_share", "decode")

    def __init__(
        self, pairs: DetachedPairs, decode: InstanceId, epoch: int, share: StreamShare | None
    ) -> None:
        self._pairs, self._epoch, self._share = pairs, epoch, share
        self.decode, self._is_kept = decode, False

    def begin(self) -> None:
        if self._share is not None:
            self._share.hold()

    def end(self) -> None:
        if self._share is not None:
            self._share.release(outlived=self._is_kept)

    def keep(self, end: Coroutine[Any, Any, Detached]) -> bool:
        self._is_kept = self._pairs.keep(self.decode, end)
        if self._is_kept and self._share is not None:
            self._share.outlive()
        return self._is_kept

    def doubt(self) -> None:
        self._pairs.hung(self.decode, self._epoch)
