"""Lost cells of a simulated instance's pages. Streams begin again in the same attempt."""

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from kvrs.ids import StreamId
from kvrs.protocol.pages import Cell, TrafficClass
from kvrs_engine.scheduling.sequences import Sequence
from kvrs_engine.scheduling.sources import PullSource
from kvrs_lab.sim.calls import RankedEngine, SimRun, checkpoints_of
from kvrs_lab.sim.site import Site

_NO_CELLS: frozenset[Cell] = frozenset()


class LostCells:
    def __init__(self, engine: RankedEngine, site: Site) -> None:
        self.missing: dict[StreamId, int] = {}  # Number of lost pages by stream.
        self.held: dict[StreamId, int] = {}  # Number of those pages that agents hold.
        self.held_page_s = 0.0
        self._engine, self._site = engine, site
        self._size = site.config.cluster.engine.page_size_tokens
        self._gone: dict[int, frozenset[Cell]] = {}  # Lost cells of full pages.
        self._has_lost = False  # Cells were lost since the last restart.

    @property
    def page_s(self) -> float:
        """Seconds to compute one page again."""
        return self._site.pace.prefill.page_s(self._size)

    def gone(self, page: int) -> frozenset[Cell]:
        return self._gone.get(page, _NO_CELLS)

    def filled(self, page: int) -> None:
        """Note that all cells of the page have been written."""
        self._gone.pop(page, None)

    def _full_pages(self) -> list[int]:
        contents = enumerate(self._engine.contents)
        return [page for page, content in contents if content is not None]

    def lose(self, cells: Callable[[int], frozenset[Cell]]) -> None:
        """Note the lost cells of each page."""
        for page in self._full_pages():
            self._gone[page] = self.gone(page) | cells(page)
        # Pages of all runs are checked again.
        self._engine.unverified.update(self._engine.runs)
        self._has_lost = True

    def lose_left(self, kept: Container[int], cells: frozenset[Cell]) -> None:
        """Lose these cells of all pages except `kept`, without a note in the books: a check finds
        every use of them.
        """
        left = [page for page in self._full_pages() if page not in kept]
        for page in left:
            self._gone[page] = self.gone(page) | cells
        if left:
            self._engine.unverified.update(self._engine.runs)

    def note_missing(self, share: float, *, memory_kept: bool = False) -> dict[StreamId, float]:
        """Note the pages that each stream lacks, where `share` of each page is lost. Return the
        predicted seconds until each stream has its pages again.
        """
        computed = self._computed_pages()
        self.missing, self.held = ({}, {}) if memory_kept else (computed, self._held_of(computed))
        self.held_page_s = self._fetch_s(share) or self.page_s
        restore_s = {
            stream: self.page_s * (pages - self.held[stream]) + self.held_page_s * self.held[stream]
            for stream, pages in self.missing.items()
        }
        return {stream: restore_s.get(stream, 0.0) for stream in computed}

    def restart(self) -> None:
        """Give up the batches in flight. After a loss every stream begins again in the same
        attempt: pages come from a checkpoint if one has them, and are computed otherwise.
        """
        engine = self._engine
        for batch in engine.flights:
            engine.scheduler.abandon(batch)
        engine.flights = []
        if self._has_lost:
            self._has_lost = False
            self._site.links.drop(engine)
            for run in list(engine.runs.values()):
                self._begin_again(run)
            engine.pages.lose(self.gone)

    def _begin_again(self, run: SimRun) -> None:
        engine, before, call = self._engine, run.sequence, run.call
        del engine.runs[before]
        engine.unverified.discard(before)
        engine.backlog.ended(before, send_rest=False)
        engine.scheduler.finish(before)
        full_pages = (len(before.token_ids) - 1) // self._size
        sources = tuple(
            PullSource(place.holder, None, range(full_pages), TrafficClass.RECOVERY)
            for place in call.places
            if full_pages
        )
        sequence = Sequence(
            stream=before.stream,
            attempt=before.attempt,
            token_ids=before.token_ids,
            prompt_tokens=before.prompt_tokens,
            root=before.root,
            prefill_only=before.prefill_only,
            pulls=tuple(source.pages for source in sources),
        )
        again = replace(call, sources=sources, slot_token=0)
        engine.runs[sequence] = SimRun(again, sequence)
        engine.unverified.add(sequence)
        page_bytes = self._site.geometry.page_bytes
        if checkpoints := checkpoints_of(again, self._size, page_bytes):
            engine.backlog.follow(sequence, checkpoints, handed_over=False)
        engine.scheduler.add(sequence)

    def _computed_pages(self) -> dict[StreamId, int]:
        return {
            run.call.stream: run.sequence.computed_tokens // self._size
            for run in self._engine.runs.values()
        }

    def _held_of(self, computed: Mapping[StreamId, int]) -> dict[StreamId, int]:
        """Number of computed pages at the agent with most of them, by stream."""
        held = self._engine.backlog.held
        return {
            run.call.stream: min(
                max(held(run.sequence).values(), default=0), computed[run.call.stream]
            )
            for run in self._engine.runs.values()
        }

    def _fetch_s(self, share: float) -> float:
        """Seconds to fetch the share of a page over the slowest measured link; 0: unknown."""
        links = self._engine.meter.measurements(self._site.clock.now_s).values()
        rate = min((link.bytes_per_s for link in links), default=0.0)
        return self._site.geometry.page_bytes * share / rate if rate else 0.0
