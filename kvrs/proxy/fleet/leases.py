"""Sends the batches of leases that are due, until cancelled."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvrs.core.books.leases import Leases
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate

log = logging.getLogger(__name__)


class LeaseSender:
    def __init__(
        self,
        leases: Leases,
        send: Callable[[InstanceId, LeaseUpdate], Awaitable[LeaseAnswer]],
        unknown: Callable[[InstanceId, list[StreamId]], None],
    ) -> None:
        """`unknown` gets what an answer says is not retained."""
        self._leases = leases
        self._send = send
        self._unknown = unknown

    async def run(self) -> None:
        """Send batches until cancelled."""
        clock = asyncio.get_running_loop().time
        self._leases.begin(clock())
        while True:
            await asyncio.sleep(self._leases.tick_s)
            due = self._leases.due(clock())
            await asyncio.gather(*(self._send_batch(*each) for each in due.items()))

    async def _send_batch(self, instance: InstanceId, update: LeaseUpdate) -> None:
        try:
            answer = await self._send(instance, update)
        except UpstreamError as error:
            log.warning("leases not renewed", extra={"instance": instance, "cause": str(error)})
            return  # Releases that did not arrive run out by themselves.
        if answer.unknown:
            self._unknown(instance, answer.unknown)
