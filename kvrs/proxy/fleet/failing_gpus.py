"""Has ranks leave their failing GPUs, and come back when these have recovered."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from kvrs.core.control import Control
from kvrs.core.fleet.gpus import RankDue
from kvrs.errors import RequestError
from kvrs.ids import InstanceId
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.fleet.orders import RankOrder, pass_on

log = logging.getLogger(__name__)

INTERVAL_S = 0.5


class FailingGpus:
    def __init__(self, control: Control[Any], backends: Mapping[InstanceId, Backend]) -> None:
        self._control, self._backends = control, backends

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await asyncio.gather(*map(self._order, self._control.gpus.take_due()))

    async def _order(self, due: RankDue) -> None:
        refused, facts = False, {"instance": due.instance, "rank": due.rank, "gpu": due.gpu}
        try:
            order = RankOrder(due.instance, due.rank, due.leaves)
            await pass_on(order, self._control, self._backends)
        except RequestError as error:
            refused = True
            facts["cause"] = str(error)
        doing = "leaves its failing GPU" if due.leaves else "comes back to its GPU"
        log.warning("a rank %s", f"cannot: {doing}" if refused else doing, extra=facts)
        self._control.gpus.answered(due, refused=refused)
