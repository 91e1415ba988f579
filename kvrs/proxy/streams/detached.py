"""Pairs of calls that attempts have given up while KV may be moving between their servers.

Each is kept in the background until its end (`sglang.py`), at most MOST_KEPT at a time, so
that no server gives pages to others that a transfer still writes. The place of the attempt's stream
in its tenant's limit is held until then.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry

from kvrs.core.books.tenants import StreamShare
from kvrs.core.control import Control
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId
from kvrs.proxy.backends.bodies import Detached
from kvrs.proxy.streams.open_stream import OpenStream

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
        self._at = Counter[InstanceId]()
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
