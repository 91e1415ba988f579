"""Fetching pages of a sequence from peers into the pool of this engine."""

from collections.abc import Mapping

from kvrs.engine.staging import PagePool
from kvrs.ids import InstanceId
from kvrs.scheduling.sequences import Pull
from kvrs.scheduling.sources import PullSource
from kvrs.transfer.peers import Peer, PullRequest, PullResult
from kvrs.transfer.puller import PagePuller


class PageFetcher:
    """Pulls the pages of one source into the pages that a sequence owns."""

    def __init__(
        self, pool: PagePool, puller: PagePuller, registry: Mapping[InstanceId, Peer]
    ) -> None:
        self._pool = pool
        self._puller = puller
        self._registry = registry

    async def fetch(self, pull: Pull, source: PullSource, wanted: range) -> PullResult:
        """The full pages `wanted` from one source, then the partial one if the source has it and
        all before it arrives.

        Raises:
            TransferError: the pool is gone, or full. Errors of a peer stand in the result.
        """
        sequence = pull.sequence
        has_tail = source.handoff is not None and wanted.stop == pull.tail_index
        pages = [sequence.pages[index] for index in wanted]
        tail_page = sequence.pages[wanted.stop] if has_tail else None
        request = PullRequest(
            tags=tuple(sequence.tags[wanted.start : wanted.stop]),
            handoff=source.handoff if has_tail else None,
            tail_index=pull.tail_index if has_tail else None,
            traffic=source.traffic,
        )
        staged = self._pool.stage(pages if tail_page is None else [*pages, tail_page])
        try:
            result = await self._puller.pull(
                self._registry[source.instance],
                request,
                staged.views[: len(pages)],
                None if tail_page is None else staged.views[-1],
                expected_epoch=source.epoch,
            )
            await staged.restore(result.full_pages + result.tail)
        finally:
            staged.free()
        return result
