"""Keeps retained KV alive: one batched message per instance and third of a lease, none per stream."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable

from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate

log = logging.getLogger(__name__)


class Leases:
    """Which instance retains pages of which live streams."""

    def __init__(
        self,
        lease_s: float,
        send: Callable[[InstanceId, LeaseUpdate], Awaitable[LeaseAnswer]],
        lost: Callable[[InstanceId, tuple[StreamId, ...]], None],
        release_s: float | None = None,
    ) -> None:
        """Releases wait for the next renewal, or at most for `release_s`."""
        self._lease_s = lease_s
        self._tick_s = min(lease_s / 3, release_s or lease_s)
        self._send = send
        self._lost = lost
        self._held: defaultdict[InstanceId, set[StreamId]] = defaultdict(set)
        self._ended: defaultdict[InstanceId, set[StreamId]] = defaultdict(set)

    def hold(self, instance: InstanceId, stream: StreamId) -> None:
        self._held[instance].add(stream)
        self._ended[instance].discard(stream)  # It was let go a moment ago, and the instance has not been told.

    def release(self, instance: InstanceId, stream: StreamId) -> None:
        """The stream needs nothing there any more; the next batch says so."""
        self._held[instance].discard(stream)
        self._ended[instance].add(stream)

    def drop(self, instance: InstanceId, stream: StreamId) -> None:
        """The instance retains nothing of the stream, and knows it."""
        self._held[instance].discard(stream)

    def forget(self, instance: InstanceId) -> None:
        """The instance is gone, and what it retained with it."""
        self._held.pop(instance, None)
        self._ended.pop(instance, None)

    async def run(self) -> None:
        """Send batches until cancelled."""
        clock = asyncio.get_running_loop().time
        renewed_s = clock()
        while True:
            await asyncio.sleep(self._tick_s)
            # By the clock, not by the number of batches: one that is answered late must not put off the others' renewals.
            renew = (now_s := clock()) + self._tick_s / 2 >= renewed_s + self._lease_s / 3
            renewed_s = now_s if renew else renewed_s
            await self.send_batches(renew=renew)

    async def send_batches(self, *, renew: bool) -> None:
        known = self._held.keys() | self._ended.keys()
        due = [instance for instance in known if self._ended[instance] or (renew and self._held[instance])]
        await asyncio.gather(*(self._send_batch(instance, renew) for instance in due))

    async def _send_batch(self, instance: InstanceId, renew: bool) -> None:
        renewed, ended = self._held[instance] if renew else set(), self._ended.pop(instance, set())
        update = LeaseUpdate(self._lease_s, renew=sorted(renewed), release=sorted(ended))
        try:
            answer = await self._send(instance, update)
        except UpstreamError as error:
            log.warning("leases not renewed", extra={"instance": instance, "cause": str(error)})
            return  # Releases that did not arrive run out by themselves.
        # Only what is still wanted: a stream may have ended while the answer was on its way.
        unknown = tuple(stream for stream in answer.unknown if stream in self._held[instance])
        if unknown:
            self._held[instance].difference_update(unknown)
            self._lost(instance, unknown)
