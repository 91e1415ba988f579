"""Pairs of calls that attempts have given up while KV may be moving between their servers.

Each is kept in the background until its end (`sglang_legs.py`), at most MOST_KEPT at a time, so
that no server gives pages to others that a transfer still writes. Whatever the attempt's stream
holds of its tenant's share is held until then.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry

from kvrs.core.control import Control
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId
from kvrs.proxy.backends.bodies import Detached
from kvrs.proxy.streams.open_stream import OpenStream

MOST_KEPT = 1024

# Begins to hold a share of something, and returns the function that releases it.
Hold = Callable[[], Callable[[], None]]


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
        self._at = Counter[InstanceId]()
        self._tasks = set[asyncio.Task[None]]()

    @property
    def at(self) -> Mapping[InstanceId, int]:
        return self._at

    def keeper(self, decode: InstanceId, hold: Hold | None = None) -> "PairKeeper":
        """Return the keeper of an attempt's calls; `hold` is called if they are kept."""
        return PairKeeper(self, decode, self._control.instances.known[decode].epoch, hold)

    def keep(self, keeper: "PairKeeper", end: Coroutine[Any, Any, Detached]) -> bool:
        if len(self._tasks) >= MOST_KEPT:
            self._ends.labels(Detached.DROPPED).inc()
            return False
        self._at[keeper.decode] += 1
        release = _nothing if keeper.hold is None else keeper.hold()
        task = asyncio.create_task(self._run(keeper.decode, end, release))
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

    async def _run(
        self, decode: InstanceId, end: Coroutine[Any, Any, Detached], release: Callable[[], None]
    ) -> None:
        outcome = Detached.CLOSED
        try:
            outcome = await end
        finally:
            self._ends.labels(outcome).inc()
            self._at[decode] -= 1
            release()


def _nothing() -> None: ...


class PairKeeper:
    """The keeper of one attempt's calls, as `sglang_legs.Keeper`."""

    __slots__ = ("_epoch", "_pairs", "decode", "hold")

    def __init__(
        self, pairs: DetachedPairs, decode: InstanceId, epoch: int, hold: Hold | None
    ) -> None:
        self._pairs, self._epoch = pairs, epoch
        self.decode, self.hold = decode, hold

    def keep(self, end: Coroutine[Any, Any, Detached]) -> bool:
        return self._pairs.keep(self, end)

    def doubt(self) -> None:
        self._pairs.hung(self.decode, self._epoch)
