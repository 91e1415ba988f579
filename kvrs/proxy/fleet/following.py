"""Carries out orders about the fleet that were given at other proxies."""

import asyncio
import logging
from collections.abc import Callable

from kvrs.control.fleet_orders import FleetOrders
from kvrs.errors import ConfigError
from kvrs.proxy.reload import Reloads

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


class FleetFollower:
    """One that cannot be carried out now, since it would take the last instance of a role that is
    up, or an instance of that id is still being removed, is tried again. `obeyed` is called after
    each that could.
    """

    def __init__(self, reloads: Reloads, obeyed: Callable[[FleetOrders], None] | None) -> None:
        self._reloads = reloads
        self._obeyed = obeyed
        self._news = asyncio.Event()
        self._cause: str | None = None

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
        """Whether all that are known are carried out."""
        try:
            await self._reloads.follow_orders()
        except ConfigError as error:
            if (cause := str(error)) != self._cause:
                log.warning("orders not carried out yet", extra={"cause": cause})
                self._cause = cause
            return False
        self._cause = None
        if self._obeyed is not None:
            self._obeyed(self._reloads.orders)
        return True
