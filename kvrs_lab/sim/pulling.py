"""The fetches of a sequence at a simulated instance, source after source, in page order."""

from kvrs.protocol.pages import Cell, Tag
from kvrs_engine.scheduling.sequences import Pull, SequencePhase
from kvrs_engine.scheduling.sources import PullSource, alike, next_source
from kvrs_lab.sim.computing import ComputingInstance
from kvrs_lab.sim.process import require
from kvrs_lab.sim.site import Fetch, PageRequest, Site


class Pulling:
    def __init__(
        self, engine: ComputingInstance, site: Site, pull: Pull, sources: list[PullSource]
    ) -> None:
        self._engine = engine
        self._site = site
        self._pull = pull
        self._sources = sources

    def begin(self) -> None:
        self._next(range(self._pull.first_page, self._pull.first_page), tail=False, is_first=True)

    def _next(self, arrived: range, *, tail: bool, is_first: bool = False) -> None:
        engine, pull = self._engine, self._pull
        step = next_source(self._sources, pull, arrived.stop)
        if step is None or pull.sequence.phase is SequencePhase.FINISHED:
            self._pulled(arrived, tail=tail)
            return
        source, wanted = step
        if not is_first:
            self._pulled(arrived, more_from=wanted.start)
        span, gone = next(alike(wanted, pull.sequence.gone))
        if span != wanted or (gone is not None and source.handoff is not None):
            # The source has further pages, which lack other cells or all cells.
            self._sources.insert(0, source)
        wanted = span
        has_tail = gone is None and source.handoff is not None and wanted.stop == pull.tail_index
        tags = tuple(pull.sequence.tags[wanted.start : wanted.stop])
        asked = PageRequest(
            tags,
            source.traffic,
            source.epoch,
            source.handoff if has_tail else None,
            pull.tail_index if has_tail else None,
            self._share_of(gone),
            source.within_s,
        )

        def page(index: int) -> None:
            number = pull.sequence.pages[wanted.start + index]
            if gone and pull.sequence.phase is SequencePhase.FINISHED:
                return  # More cells were lost meanwhile: another sequence asks again.
            if gone:
                self._verify_left(number, tags[index], gone)
            engine.received(number, tags[index])

        def done(full_pages: int, tail: bool) -> None:
            if full_pages < len(wanted) and self._sources[:1] == [source]:
                del self._sources[0]
            self._next(range(wanted.start, wanted.start + full_pages), tail=tail)

        Fetch(
            self._site, engine, engine.meter, self._site.holders[source.instance], asked, page, done
        )

    def _share_of(self, gone: frozenset[Cell] | None) -> float:
        """The share of a page that is fetched if these cells are lost."""
        ranks = self._engine.ranks
        return 1.0 if ranks is None or not gone else len(gone) / ranks.page_cells

    def _verify_left(self, page: int, content: Tag, brought: frozenset[Cell]) -> None:
        """Check that the fetched cells complete the page."""
        engine = self._engine
        require(
            engine.ranks is not None
            and engine.ranks.gone(page) <= brought
            and engine.contents[page] == content,
            f"{engine.id} mends a page of which more is missing",
        )

    def _pulled(self, arrived: range, *, tail: bool = False, more_from: int | None = None) -> None:
        sequence = self._pull.sequence
        if tail and self._pull.tail_index is not None and sequence.pages:
            # The partial page is overwritten.
            self._engine.contents[sequence.pages[self._pull.tail_index]] = None
        self._engine.scheduler.pulled(sequence, arrived, tail=tail, more_from=more_from)
        self._engine.verify_found(sequence)
        self._engine.note_filled(sequence)
        self._engine.look()
