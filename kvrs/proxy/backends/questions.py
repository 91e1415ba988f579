"""Questions that a proxy asks a stock engine as it watches it, each beside the others: a late or
failing answer delays no other one. `kvrs/core/model/reports.py` has what follows from it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import FailedQuestion, Fails, WatchQuestion
from kvrs.proxy.wire.errors import ConnectionLostError, UnusableError
from kvrs.proxy.wire.watchdog import SilentError, lateness

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
