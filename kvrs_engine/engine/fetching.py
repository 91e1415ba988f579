"""The fetching of a sequence's pages from peers into the pool of an engine."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import inf

from kvrs.ids import InstanceId
from kvrs.protocol.pages import PagePart, rectangles
from kvrs.transfer.peers import Peer, PullRequest, PullResult
from kvrs.transfer.puller import PagePuller
from kvrs_engine.engine.ranks.cells import WholePages
from kvrs_engine.engine.ranks.nodes import PartedPool
from kvrs_engine.engine.staging import PagePool, StagedPages
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.sequences import Pull, SequencePhase
from kvrs_engine.scheduling.sources import PullSource, alike


class PageFetcher:
    """Fetches pages from one source into the pages of a sequence."""

    def __init__(
        self,
        pool: PagePool,
        pages: PageManager,
        puller: PagePuller,
        registry: Mapping[InstanceId, Peer],
    ) -> None:
        self._pool, self._pages = pool, pages
        self._puller = puller
        self._registry = registry

    async def fetch(self, pull: Pull, source: PullSource, wanted: range) -> PullResult:
        """Fetch the full pages `wanted` from one source, then the partial page if the source has it
        and all earlier pages have arrived. Damaged pages get only their missing cells.

        Raises:
            TransferError: the pool is gone or full; errors of a peer are in the result.
        """
        size, sequence = self._pool.geometry, pull.sequence
        until_s: float | None = None
        if source.within_s < inf:
            until_s = asyncio.get_running_loop().time() + source.within_s
        result = PullResult(0, tail=False, bytes=0, seconds=0.0, gone=False, error=None)
        pages, received_bytes, seconds = 0, 0, 0.0
        for span, gone in alike(wanted, sequence.gone):
            if not span and not self._has_tail(pull, source, wanted):
                break
            parts: list[PagePart | None] = [None]
            if gone is not None:
                parts = [PagePart(size.layers, size.kv_heads, part) for part in rectangles(gone)]
            arrived = span
            for part in parts:
                if sequence.phase is SequencePhase.FINISHED:
                    arrived = arrived[:0]
                    break
                result = await self._fetch(pull, source, arrived, part, until_s)
                arrived = arrived[: result.full_pages]
                received_bytes, seconds = received_bytes + result.bytes, seconds + result.seconds
            pages += len(arrived)
            if arrived != span:
                break
        return replace(result, full_pages=pages, bytes=received_bytes, seconds=seconds)

    def _has_tail(self, pull: Pull, source: PullSource, span: range) -> bool:
        """Return whether to request the partial page after these pages."""
        return source.handoff is not None and span.stop == pull.tail_index

    async def _fetch(
        self,
        pull: Pull,
        source: PullSource,
        span: range,
        part: PagePart | None,
        until_s: float | None,
    ) -> PullResult:
        """Send one request, and give up at `until_s` by the event loop's clock."""
        sequence = pull.sequence
        # Nothing of a partial page is here.
        has_tail = part is None and self._has_tail(pull, source, span)
        pages = [sequence.pages[index] for index in span]
        tail_page = sequence.pages[span.stop] if has_tail else None
        request = PullRequest(
            tags=tuple(sequence.tags[span.start : span.stop]),
            handoff=source.handoff if has_tail else None,
            tail_index=pull.tail_index if has_tail else None,
            traffic=source.traffic,
            part=part,
        )
        staged = self._stage(pages if tail_page is None else [*pages, tail_page], part)
        here: list[int] = []  # Pages that have arrived completely so far.
        try:
            try:
                async with asyncio.timeout_at(until_s):
                    result = await self._puller.pull(
                        self._registry[source.instance],
                        request,
                        staged.views[: len(pages)],
                        None if tail_page is None else staged.views[-1],
                        source.epoch,
                        here.append,
                    )
            except TimeoutError:
                late = "fetching took longer than computing the pages"
                result = PullResult(sum(here), False, 0, source.within_s, gone=False, error=late)
            await staged.restore(result.full_pages + result.tail)
            if part is not None:
                cells = frozenset(product(part.part.layers, part.part.heads))
                for page in pages[: result.full_pages]:
                    self._pages.damaged.brought(page, cells)
        finally:
            staged.free()
        return result

    def _stage(self, pages: list[int], part: PagePart | None) -> StagedPages:
        if part is None:
            return self._pool.stage(pages)
        assert isinstance(self._pool, WholePages | PartedPool), "only ranks lose cells"
        return self._pool.stage(pages, part.part)
