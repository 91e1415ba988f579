"""Common part of the backends for unmodified vLLM and SGLang, which replaces what the instance
protocol would do.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, ClassVar

import msgspec

from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.instance import (
    FailedQuestion,
    Fails,
    InstanceInfo,
    LeaseAnswer,
    LeaseUpdate,
    LoadReport,
    RankAnswer,
    RankRequest,
    WatchQuestion,
)
from kvrs.proxy.backends.idle_connection import IdleConnection
from kvrs.proxy.backends.pd import OpenAiPeer
from kvrs.proxy.backends.questions import Asked, ended_with, failing, poll
from kvrs.proxy.wire.errors import ConnectionLostError, UnusableError

# Seconds between polls while no stream waits for a token; a report is overdue after 1 s.
_IDLE_INTERVAL_S = 0.5
# Time within which the end of the idle connection follows a lost question, if the process is dead.
_LOST_TOGETHER_S = 0.02


class Watched(msgspec.Struct):
    """The questions of a watch: of the process's life, of its figures (one question may be both),
    and others.
    """

    life: Asked[Any]
    figures: Asked[LoadReport]
    others: Sequence[Asked[Any]]
    # Interval of the question of life while no stream waits for a token.
    life_every_s: float

    @property
    def all(self) -> list[Asked[Any]]:
        return [*dict.fromkeys((self.life, self.figures, *self.others))]


def _are_of_another(asked: Watched) -> bool:
    """Return whether the figures and another answer are those of another server."""
    failed = (asked.figures.failed, *(each.failed for each in asked.others))
    return sum(each is not None and each.by is Fails.OTHER for each in failed) > 1


class StockPeer(OpenAiPeer):
    """An instance of a stock engine: its load is polled, and requests that need a capability are
    refused.
    """

    ENGINE: ClassVar[str]

    @abstractmethod
    def _ask_watched(self) -> "Watched":
        """Return the questions of a watch."""

    @abstractmethod
    def _beside(self, asked: "Watched") -> dict[str, Any]:
        """Return the fields of a report that its figures do not have. Raises UpstreamError: an
        answer shows that the instance is lost, or must not be used.
        """

    @abstractmethod
    def _connection_ended(self) -> None:
        """Note that the idle connection has ended, so the process may be another one."""

    @property
    @abstractmethod
    def _epoch_now(self) -> int: ...

    async def _reports(
        self, interval_s: float, is_awaited: Callable[[], bool]
    ) -> AsyncGenerator[LoadReport]:
        """Yield load reports; the watcher limits the time between them. While the question of life
        has no answer there is none.
        """
        clock, asked = asyncio.get_running_loop().time, self._ask_watched()
        figures, life = asked.figures, asked.life
        report: LoadReport | None = None
        known: Any = None  # Answers and failures of which `report` was made.
        # Number of figures as the idle connection ended: until there are new ones, the process may
        # be another one.
        doubted_at: int | None = None
        async with ended_with(asked.all), IdleConnection(self.pool) as idle:
            while True:
                has_streams = is_awaited()
                life.every_s = 0.0 if has_streams else asked.life_every_s
                await poll(asked.all, clock)
                failed, is_doubted = failing(asked.all), doubted_at == figures.answers
                lost = failed.get(life.question)
                if (lost is not None and lost.by is Fails.LOST) and (
                    is_doubted or await idle.wait(_LOST_TOGETHER_S)
                ):
                    raise ConnectionLostError(lost.cause)
                unread = figures.failed
                if unread is not None and is_doubted and _are_of_another(asked):
                    cause = f"its idle connection ended, then {unread.cause}"
                    failed[WatchQuestion.PROCESS] = FailedQuestion(unread.by, cause)
                if unread is not None and unread.by is Fails.OTHER and figures.answer is None:
                    # Another version of the engine, or another server, shows at the first read.
                    raise UnusableError(unread.cause)
                beside = self._beside(asked)
                if not life.is_running and not figures.is_open:
                    now = figures.answers, beside, failed
                    if report is None or now != known:
                        known, report = now, self._report(asked, beside, failed)
                    yield report
                pause_s = interval_s if has_streams else max(interval_s, _IDLE_INTERVAL_S)
                if await idle.wait(pause_s):
                    self._connection_ended()
                    doubted_at = figures.answers
                    for each in asked.all:
                        each.ask_at_once()

    def _report(
        self,
        asked: "Watched",
        beside: dict[str, Any],
        failed: Mapping[WatchQuestion, FailedQuestion],
    ) -> LoadReport:
        """Make a report of the answers. Without new figures it has the last ones, but no load."""
        report = asked.figures.answer
        if report is None:
            report = LoadReport(self._epoch_now, 0, 0, 0, 0.0, [])
        if asked.figures.failed is not None:
            nothing = {"queued": 0, "running": 0, "queue_delay_s": 0.0, "progress": 0.0}
            report = msgspec.structs.replace(report, **nothing, links=[], fetches=[])
        return msgspec.structs.replace(report, **beside, failing=failed)

    def watch_load(
        self, interval_s: float, is_awaited: Callable[[], bool]
    ) -> AbstractAsyncContextManager[AsyncIterator[LoadReport]]:
        return aclosing(self._reports(interval_s, is_awaited))

    async def order_rank(self, order: RankRequest) -> RankAnswer:
        raise UpstreamError(f"{self.ENGINE}'s ranks do not leave one by one")

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        raise UpstreamError(f"{self.ENGINE} has no leases of proxies")

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        raise UpstreamError(f"{self.ENGINE} cannot be fenced")
