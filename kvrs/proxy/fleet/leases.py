"""Sender of the leases by which instances and agents keep KV, in batches when due."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from kvrs.core.books.leases import Leases
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate

log = logging.getLogger(__name__)


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
