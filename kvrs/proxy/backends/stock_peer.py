"""Common part of the backends for unmodified vLLM and SGLang, which replaces what the instance
protocol would do.

An idle connection to a server that cannot report its own end: when the server's process dies,
the connection ends.

Questions that a proxy asks a stock engine as it watches it, each beside the others: a late or
failing answer delays no other one. `kvrs/core/model/reports.py` has what follows from it.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, ClassVar, Generic, Protocol, TypeVar

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
from kvrs.proxy.backends.pd import OpenAiPeer
from kvrs.proxy.wire.errors import ConnectionLostError, UnusableError
from kvrs.proxy.wire.upstream import Pool
from kvrs.proxy.wire.watchdog import SilentError, lateness


class IdleConnection:
    """A connection that is kept idle, because the kernel ends it at once when the server's process
    dies.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._gone: asyncio.Task[None] | None = None
        # True after the connection ended: a server may close each idle connection at once, so the
        # next one waits.
        self._must_pause = False

    async def __aenter__(self) -> "IdleConnection":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._gone is not None:
            self._gone.cancel()
            # Any error of the connection is dropped, so that an exception in this block stays
            # visible.
            await asyncio.gather(self._gone, return_exceptions=True)

    async def wait(self, seconds: float) -> bool:
        """Wait `seconds`, or until the connection ends. Return True if it ended: the process is
        dead, or has only closed an idle connection.
        """
        if self._must_pause:
            self._must_pause = False
            await asyncio.sleep(seconds)
            return False
        if self._gone is None:
            self._gone = asyncio.create_task(self._hold())
        await asyncio.wait({self._gone}, timeout=seconds)
        if not self._gone.done():
            return False
        ended, self._gone, self._must_pause = self._gone, None, True
        ended.result()
        return True

    async def _hold(self) -> None:
        ended = asyncio.Event()
        upstream = await self._pool.connect(lambda *_: ended.set())
        try:
            await ended.wait()
        finally:
            upstream.close()


# Time for which a poll waits for answers. Later ones count at a later poll.
PROMPT_S = 0.25
# A request without an answer is given up after this time, and sent again.
_LONGEST_S = 30.0

Answer = TypeVar("Answer")


class Asked(Generic[Answer]):
    """One question, of which at most one request runs at a time."""

    def __init__(
        self,
        question: WatchQuestion,
        ask: Callable[[], Awaitable[Answer]],
        every_s: float,
        late_s: float,
    ) -> None:
        """`every_s`: interval of the requests; `late_s`: age at which a request counts as late."""
        self.question = question
        self.answer: Answer | None = None  # The last answer in time; None: none yet.
        self.failed: FailedQuestion | None = None  # None: the last request was answered, or runs.
        self.every_s = every_s
        self._ask = ask
        self._late_s = late_s
        self._begun_s = 0.0
        self._excused_s = 0.0  # `Lateness.excused_s` as the request began.
        self.answers = 0  # Number of answers so far.
        self._task: asyncio.Task[Answer] | None = None
        self._is_due = True

    @property
    def is_open(self) -> bool:
        """Return whether nothing is known of the answer yet."""
        return self.answer is None and self.failed is None

    def ask_at_once(self) -> None:
        self._is_due = True

    @property
    def is_running(self) -> bool:
        """Return whether a request has no answer and is not late yet."""
        return self._task is not None and self.failed is None

    def begin(self, now_s: float) -> asyncio.Task[Answer] | None:
        """Send the request if it is due; return the one that runs."""
        if self._task is None and (self._is_due or now_s - self._begun_s >= self.every_s):
            self._is_due, self._begun_s = False, now_s
            self._excused_s = lateness().excused_s
            self._task = asyncio.ensure_future(self._ask())
        return self._task

    def take(self, now_s: float) -> None:
        """Note what has become of the request."""
        task = self._task
        if task is None:
            return
        # This process may have been late itself.
        age_s = now_s - self._begun_s - (lateness().excused_s - self._excused_s)
        if task.done():
            self._task = None
            try:
                self.answer, self.failed = task.result(), None
                self.answers += 1
            except UpstreamError as error:
                self.failed = FailedQuestion(_kind(error), str(error))
        elif age_s >= self._late_s:
            self.failed = FailedQuestion(Fails.LATE, f"no answer to {self.question} in time")
            if age_s >= _LONGEST_S:
                self.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None


class _AnyAsked(Protocol):
    """An `Asked`, whatever its answer is."""

    @property
    def question(self) -> WatchQuestion: ...
    @property
    def failed(self) -> FailedQuestion | None: ...
    def begin(self, now_s: float) -> asyncio.Task[object] | None: ...
    def take(self, now_s: float) -> None: ...
    def close(self) -> None: ...


async def poll(asked: Sequence[_AnyAsked], clock: Callable[[], float]) -> None:
    """Send the requests that are due, and take the answers that come at once."""
    now_s = clock()
    running = [task for each in asked if (task := each.begin(now_s)) is not None]
    if running:
        await asyncio.wait(running, timeout=PROMPT_S)
    now_s = clock()
    for each in asked:
        each.take(now_s)


def failing(asked: Sequence[_AnyAsked]) -> dict[WatchQuestion, FailedQuestion]:
    return {each.question: each.failed for each in asked if each.failed is not None}


@asynccontextmanager
async def ended_with(asked: Sequence[_AnyAsked]) -> AsyncIterator[None]:
    """End the requests that run when the block ends."""
    try:
        yield
    finally:
        for each in asked:
            each.close()


def _kind(error: UpstreamError) -> Fails:
    match error:
        case UnusableError():
            return Fails.OTHER
        case ConnectionLostError():
            return Fails.LOST
        case SilentError():
            return Fails.LATE
        case _:
            return Fails.ERROR


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
