"""Carries out orders about the fleet that were given at other proxies."""

import asyncio
import logging
from collections.abc import Callable

from kvrs.control.fleet_orders import FleetOrders
from kvrs.ids import InstanceId
from kvrs.proxy.reload import Reloads

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


class FleetFollower:
    """One that cannot be carried out now, since it would take the last instance of a role that is
    up, or an instance of that id is still being removed, is set aside and tried again. `obeyed` is
    called after each that could.
    """

    def __init__(self, reloads: Reloads, obeyed: Callable[[FleetOrders], None] | None) -> None:
        self._reloads = reloads
        self._obeyed = obeyed
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
        has_changed, orders = await self._reloads.follow_orders(), self._reloads.orders
        for instance, cause in orders.aside.items():
            if self._logged.get(instance) != cause:
                extra = {"instance": instance, "cause": cause}
                log.warning("order not carried out yet", extra=extra)
        self._logged = {**orders.aside}
        if self._obeyed is not None and (has_changed or not orders.aside):
            self._obeyed(orders)
        return not orders.aside
