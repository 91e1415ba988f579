"""One worker of a proxy: its side of the channel to the supervisor."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Set
from typing import Any

import msgspec

from kvrs.control.core import Control
from kvrs.control.fleet_orders import FleetOrders
from kvrs.errors import ConfigError, RequestError
from kvrs.ids import InstanceId
from kvrs.policy.model.events import OthersBooked
from kvrs.proxy.api.admin import OwnSource
from kvrs.proxy.fleet.exits import Exited
from kvrs.proxy.fleet.orders import DrainOrder, FleetChange, OrderRefused, RankOrder
from kvrs.proxy.reload import ReloadResult
from kvrs.proxy.workers.asking import Asking
from kvrs.proxy.workers.channel import Channel
from kvrs.proxy.workers.loads import Booked, booked_now, changes
from kvrs.proxy.workers.messages import (
    BOOKED,
    DRAIN,
    EXITED,
    FLEET,
    HEARD,
    METRICS,
    ORDER,
    PING,
    PLAN,
    RANK,
    READY,
    RELOAD,
    STATE,
    Reloaded,
    WorkerPlan,
    packed,
    unpacked,
)
from kvrs.proxy.workers.series import families_of

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.02  # How often workers tell each other what they have sent to instances.


class WorkerLink:
    """`others` are the ids of the other workers; `stop` is called when the whole proxy ends, again
    to hasten it. Without its supervisor a worker ends at once, as by SIGKILL: another supervisor
    may be starting other workers at the same ports.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.others: Set[str] = frozenset()
        self.orders: FleetOrders | None = None  # Those at its start.
        self.all_drain = False
        self.stop: Callable[[], None] | None = None
        self._plan: asyncio.Future[WorkerPlan] = loop.create_future()
        self._source: asyncio.Future[OwnSource] = loop.create_future()
        self.channel = Channel(
            {
                PLAN: self._take_plan,
                STATE: self._state,
                METRICS: self._metrics,
                RELOAD: self._reload,
                PING: lambda body: body,
                DRAIN: self._drain,
                ORDER: self._order,
                RANK: self._order_rank,
                EXITED: self._note_exit,
                FLEET: self._change_fleet,
                BOOKED: self._take_others,
            },
            _end,
        )
        self.shared = Asking(self.channel)
        self._control: Control[Any] | None = None

    async def open(self, end: socket.socket) -> WorkerPlan:
        await self.channel.open(end)
        return await self._plan

    def show(self, source: OwnSource) -> None:
        """From now on questions about this worker are answered."""
        self._source.set_result(source)

    async def share_load(self, control: Control[Any]) -> None:
        """Tell the other workers what this one sends to instances, until cancelled."""
        self._control = control
        told: dict[str, Booked] = {}
        while True:
            booked = booked_now(control.policy.booked())
            if changed := changes(told, booked):
                self.channel.tell(BOOKED, packed(changed))
            told = booked
            await asyncio.sleep(LOAD_INTERVAL_S)

    def _take_others(self, body: bytes) -> bytes:
        now_s = time.monotonic()
        if self._control is not None:
            for name, each in unpacked(body, dict[str, Booked]).items():
                sent = OthersBooked(InstanceId(name), each.work_ms / 1000, each.streams)
                self._control.tell(sent, now_s)
        return b""

    def ready(self) -> None:
        """It takes requests of clients."""
        log.info("worker ready")
        self.channel.tell(READY)

    def heard(self, orders: FleetOrders) -> None:
        """Other proxies have given some."""
        self.channel.tell(HEARD, packed(orders.carried_out()))

    def _take_plan(self, body: bytes) -> bytes:
        self._plan.set_result(unpacked(body, WorkerPlan))
        return b""

    async def _state(self, _: bytes) -> bytes:
        return msgspec.json.encode(await (await self._source).state())

    async def _metrics(self, _: bytes) -> bytes:
        return packed(families_of((await self._source).measured().registry))

    async def _reload(self, _: bytes) -> bytes:
        return await _reloaded((await self._source).reload())

    async def _change_fleet(self, body: bytes) -> bytes:
        change = unpacked(body, FleetChange)
        return await _reloaded((await self._source).change_fleet(change))

    async def _order(self, body: bytes) -> bytes:
        return await _obeyed((await self._source).drain_instance(unpacked(body, DrainOrder)))

    async def _order_rank(self, body: bytes) -> bytes:
        return await _obeyed((await self._source).order_rank(unpacked(body, RankOrder)))

    async def _note_exit(self, body: bytes) -> bytes:
        return await _obeyed((await self._source).note_exit(unpacked(body, Exited)))

    def _drain(self, _: bytes) -> bytes:
        self.all_drain = True
        if self.stop is None:
            os._exit(0)  # It has not begun.
        self.stop()
        return b""


async def _reloaded(change: Awaitable[ReloadResult]) -> bytes:
    try:
        result = await change
    except ConfigError as error:
        return packed(Reloaded(faults=error.faults))
    return packed(Reloaded(result.applied, result.restart_needed))


async def _obeyed(order: Awaitable[None]) -> bytes:
    try:
        await order
    except RequestError as error:
        return packed(OrderRefused(error.status, str(error)))
    return b""


def _end() -> None:
    log.error("the supervisor is gone")
    os._exit(1)
