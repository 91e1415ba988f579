"""One place of a worker: its process, which is started again when it ends."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any

from kvrs.proxy.workers.channel import Channel, Handler
from kvrs.proxy.workers.messages import DRAIN, PLAN, READY, WorkerPlan, packed
from kvrs.proxy.workers.series import Totals

log = logging.getLogger(__name__)

# A worker that ends soon after its start is started again after this pause, then after twice of it.
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_SOON_S = 10.0


class PlaceState(StrEnum):
    STARTING = "starting"
    UP = "up"  # It takes requests of clients.
    DOWN = "down"  # It has ended, and starts again after a pause.


class WorkerPlace:
    """`changed` is called when its state changes, `ended` when its process has ended and all that
    it has said is read. `fault`: how its process ended that has never been ready.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        name: str,
        handlers: dict[str, Handler],
        changed: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._ended = ended
        self.plan = plan
        self.name = name
        self.totals = Totals()
        self.state = PlaceState.STARTING
        self.fault: str | None = None
        self.status: int | None = None  # Of the last process that has ended.
        self.starts = 0
        self.channel: Channel | None = None
        self._handlers = handlers
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def describe(self) -> dict[str, Any]:
        row = {
            "worker": self.plan.worker,
            "id": self.name,
            "pid": self.pid,
            "state": self.state,
            "restarts": max(0, self.starts - 1),
        }
        return row if self.fault is None else row | {"reason": self.fault}

    async def run(self) -> None:
        """Keep a process running until `drain`."""
        pause_s = 0.0
        while not self._ending:
            started_s = time.monotonic()
            await self._run_one()
            if self._ending:
                return
            soon = time.monotonic() < started_s + _SOON_S
            pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s)) if soon else 0.0
            log.error(
                "worker lost",
                extra={"proxy": self.name, "status": self.status, "again_in_s": pause_s},
            )
            until_s = time.monotonic() + pause_s
            while not self._ending and time.monotonic() < until_s:
                await asyncio.sleep(_FIRST_PAUSE_S / 5)

    def drain(self) -> None:
        """Have it end, and start no other one; again, as by a signal: sooner."""
        self._ending = True
        if self.channel is not None:
            self.channel.tell(DRAIN)

    def kill(self) -> None:
        self._ending = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def _run_one(self) -> None:
        was_ready = False

        def ready(_: bytes) -> bytes:
            nonlocal was_ready
            was_ready = True
            self.state, self.fault = PlaceState.UP, None
            log.info("worker up", extra={"proxy": self.name, "pid": process.pid})
            self._changed()
            return b""

        own_end, its_end = socket.socketpair()
        with its_end:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvrs.proxy.workers", str(its_end.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
                # Ctrl-C at a terminal goes to the supervisor alone.
                start_new_session=True,
            )
        self.starts += 1
        all_read = asyncio.Event()
        channel = Channel({**self._handlers, READY: ready}, all_read.set)
        await channel.open(own_end)
        self.channel = channel
        channel.tell(PLAN, packed(self.plan))
        if self._ending:
            channel.tell(DRAIN)
        self.status = await process.wait()
        await all_read.wait()
        self._ended()
        self.channel, self.state = None, PlaceState.DOWN
        self.totals.end()
        if not was_ready:
            self.fault = f"ended with status {self.status} before it was ready"
        self._changed()
