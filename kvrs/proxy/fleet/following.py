"""Carries out orders about the fleet that were given at other proxies."""

import asyncio
import logging

from kvrs.ids import InstanceId
from kvrs.proxy.reload import Reloads

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


class FleetFollower:
    """One that cannot be carried out now, since it would take the last instance of a role that is
    up, or an instance of that id is still being removed, is set aside and tried again.
    """

    def __init__(self, reloads: Reloads) -> None:
        self._reloads = reloads
        self._news = asyncio.Event()
        self._logged: dict[InstanceId, str] = {}

    def heard(self) -> None:
        """There are new ones."""
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while not await self.follow():
                await asyncio.sleep(_AGAIN_S)

    async def follow(self) -> bool:
        """Carry out the orders that are known; False: some could not be carried out yet."""
        await self._reloads.follow_orders()
        orders = self._reloads.orders
        for instance, cause in orders.aside.items():
            if self._logged.get(instance) != cause:
                extra = {"instance": instance, "cause": cause}
                log.warning("order not carried out yet", extra=extra)
        self._logged = {**orders.aside}
        return not orders.aside
