"""How often a watcher tries to reach its process, in virtual time."""

import asyncio
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrs.config.proxy import ProxySettings
from kvrs.core.fleet.known import Health
from kvrs.errors import UpstreamError
from kvrs.proxy.streams.metrics import DeathCause
from kvrs.proxy.watch.watcher import Watcher
from kvrs_testkit.virtual_time import run_virtually, virtual_loop


class Refused(Watcher):
    """A watch of a process that takes no connection."""

    def __init__(self) -> None:
        subject = SimpleNamespace(id="d0", node="n0", health=Health.DOWN, reason="")
        peer = SimpleNamespace(url="http://d0")
        super().__init__(cast(Any, subject), cast(Any, peer), ProxySettings(), cast(Any, None))
        self.tries_s: list[float] = []

    async def _watch(self) -> None:
        self.tries_s.append(virtual_loop().time())
        raise UpstreamError("refused")

    def _lose(self, cause: str, death: DeathCause) -> None:
        raise AssertionError(cause)


def test_a_process_that_is_down_is_tried_after_50_ms_and_once_a_second_at_least() -> None:
    """The pause doubles in between: one that restarts is in use soon."""
    watcher = Refused()

    async def watch() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(4.0):
                await watcher.run()

    run_virtually(watch())

    pauses_s = [after - before for before, after in pairwise(watcher.tries_s)]
    assert pauses_s == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
