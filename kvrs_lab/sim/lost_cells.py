"""The cells of a simulated instance's pages that are gone, and its streams, which begin again for
them in the same attempt.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

from kvrs.ids import StreamId
from kvrs.protocol.page_messages import TrafficClass
from kvrs.protocol.parts import Cell
from kvrs_engine.scheduling.sequences import Sequence
from kvrs_engine.scheduling.sources import PullSource
from kvrs_lab.sim.calls import RankedEngine, SimRun, checkpoints_of
from kvrs_lab.sim.site import Site

_NO_CELLS: frozenset[Cell] = frozenset()


class LostCells:
    def __init__(self, engine: RankedEngine, site: Site) -> None:
        self.missing: dict[StreamId, int] = {}  # Pages of streams with cells that are gone.
        self.held: dict[StreamId, int] = {}  # Of these, what agents hold.
        self.held_page_s = 0.0
        self._engine, self._site = engine, site
        self._size = site.config.cluster.engine.page_size_tokens
        self._gone: dict[int, frozenset[Cell]] = {}  # Of pages that were full.
        self._has_lost = False  # Since the last restart.

    @property
    def page_s(self) -> float:
        """Time to compute one page again."""
        return self._site.pace.prefill.page_s(self._size)

    def gone(self, page: int) -> frozenset[Cell]:
        return self._gone.get(page, _NO_CELLS)

    def filled(self, page: int) -> None:
        """All cells of the page have been written."""
        self._gone.pop(page, None)

    def _full_pages(self) -> list[int]:
        contents = enumerate(self._engine.contents)
        return [page for page, content in contents if content is not None]

    def lose(self, cells: Callable[[int], frozenset[Cell]]) -> None:
        """These cells of each page are gone."""
        for page in self._full_pages():
            self._gone[page] = self.gone(page) | cells(page)
        # What they compute with is looked at again.
        self._engine.unverified.update(self._engine.runs)
        self._has_lost = True

    def lose_left(self, kept: Container[int], cells: frozenset[Cell]) -> None:
        """These cells are gone of all pages but those that were kept, without a word to the books:
        whatever computes with them is found out.
        """
        left = [page for page in self._full_pages() if page not in kept]
        for page in left:
            self._gone[page] = self.gone(page) | cells
        if left:
            self._engine.unverified.update(self._engine.runs)

    def note_missing(self, share: float, *, memory_kept: bool = False) -> dict[StreamId, float]:
        """Note what each stream lacks, of which so large a part of each page is gone; returns the
        predicted seconds until each has it again.
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
        """Give up the batches under way. With lost cells every stream begins again in the same
        attempt: they come from a checkpoint, as far as there is one; the rest is computed.
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
        """Those of the computed pages that the agent with most of them has."""
        held = self._engine.backlog.held
        return {
            run.call.stream: min(
                max(held(run.sequence).values(), default=0), computed[run.call.stream]
            )
            for run in self._engine.runs.values()
        }

    def _fetch_s(self, share: float) -> float:
        """Seconds to fetch that share of a page over the slowest measured link; 0: none is
        measured.
        """
        links = self._engine.meter.measurements(self._site.clock.now_s).values()
        rate = min((link.bytes_per_s for link in links), default=0.0)
        return self._site.geometry.page_bytes * share / rate if rate else 0.0
