"""Functions that restart a task after a bug, and that watch the own event loop's lateness."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from enum import StrEnum

from kvrs.proxy.wire.watchdog import lateness

log = logging.getLogger(__name__)

_LAG_INTERVAL_S = 0.5
_PAUSE_S = 0.5
_MAX_FAILURES = 3
_WITHIN_S = 60.0


class TaskKind(StrEnum):
    """Kinds of tasks that serve all streams, as labels of metrics and logs."""

    WATCHER = "watcher"
    LEASES = "leases"
    CHECKPOINT_LEASES = "checkpoint_leases"
    SLOTS = "slots"
    FLEET = "fleet"  # The task that follows names and pods of services.
    KEYS = "keys"  # The task that follows the file of API keys.
    SELF_TESTS = "self_tests"


async def observe_lag(observe: Callable[[float], None]) -> None:
    """Measure how late the event loop runs, report each delay in seconds to `observe`, and log each
    spell of starvation once, until cancelled.
    """
    clock, own = asyncio.get_running_loop().time, lateness()
    spells = own.spells
    while True:
        due_s = clock() + _LAG_INTERVAL_S
        await asyncio.sleep(_LAG_INTERVAL_S)
        now_s = clock()
        observe(max(0.0, now_s - due_s))
        own.looked(due_s, now_s)
        if own.spells > spells:
            spells = own.spells
            late_s = round(own.spell_late_s, 3)
            log.warning("starved: silence is held against no process", extra={"late_s": late_s})


async def keep_running(
    kind: TaskKind, work: Callable[[], Awaitable[None]], failed: Callable[[TaskKind], None]
) -> None:
    """Run `work` until cancelled. A bug costs no stream: it is logged and counted by `failed`, and
    `work` is started again.

    Raises:
        Exception: the task's error, at its third failure within a minute.
    """
    clock = asyncio.get_running_loop().time
    failures: deque[float] = deque(maxlen=_MAX_FAILURES)
    while True:
        try:
            return await work()
        except Exception:
            log.exception("task ended by a bug", extra={"task": kind})
            failed(kind)
            failures.append(clock())
            if len(failures) == _MAX_FAILURES and failures[-1] - failures[0] < _WITHIN_S:
                raise
        await asyncio.sleep(_PAUSE_S)
