"""Runs that began again in the same attempt, since cells of a stage were lost: what each found
again, and what it computed once more.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvrs.protocol.stages import RestartReport
from kvrs.protocol.tags import Tag
from kvrs.transfer.puller import RecentReports
from kvrs_engine.engine.hooks import Batch
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.scheduling.sequences import Sequence


@dataclass(slots=True, eq=False)
class _Restart:
    run: GenerationRun
    tokens: int  # That it had.
    fetched_pages: int  # By the run, before.
    adopted_pages: int = 0


class RestartedRuns:
    def __init__(self, page_size_tokens: int, clock: Callable[[], float]) -> None:
        self._page_size = page_size_tokens
        self._waiting: dict[Sequence, _Restart] = {}  # For their next token.
        self.adopted_pages = 0  # Since the start.
        self.recent: RecentReports[RestartReport] = RecentReports(clock)

    def begin(self, runs: Iterable[GenerationRun], adopted: Collection[Tag]) -> None:
        """All runs begin again; the `adopted` pages are there by a loan."""
        self._waiting = {
            run.sequence: _Restart(
                run,
                len(run.sequence.token_ids),
                run.fetched_pages,
                sum(tag in adopted for tag in run.sequence.tags),
            )
            for run in runs
        }

    def computed(self, batch: Batch) -> None:
        """A batch was computed."""
        for sequence, chunk in batch if self._waiting else ():
            if chunk.logits and (restart := self._waiting.pop(sequence, None)) is not None:
                self.adopted_pages += restart.adopted_pages
                self.recent.note(self._report(restart))

    def ended(self, run: GenerationRun) -> None:
        self._waiting.pop(run.sequence, None)

    def _report(self, restart: _Restart) -> RestartReport:
        sequence, run = restart.run.sequence, restart.run
        fetched = max(0, run.fetched_pages - restart.fetched_pages)
        found = (sequence.cached_tokens or 0) + fetched * self._page_size
        owner_epoch, attempt = sequence.attempt
        return RestartReport(
            sequence.stream,
            attempt,
            owner_epoch,
            restart.adopted_pages,
            max(0, restart.tokens - found),
        )
