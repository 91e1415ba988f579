"""Requests to a peer for pages that lack cells here."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.pages import TrafficClass, page_tags, root_tag
from kvrs.transfer.peers import Peer, PullRequest, PullResult
from kvrs_engine.engine.fetching import PageFetcher
from kvrs_engine.engine.ranks.cells import WholePages, memory_bytes
from kvrs_engine.scheduling import sequences
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.reservation import reserve
from kvrs_engine.scheduling.sequences import Pull
from kvrs_engine.scheduling.sources import PullSource

P, PAGES = 4, 8
PEER, STREAM = InstanceId("p0"), StreamId("s")
GEOMETRY = KvGeometry(layers=2, kv_heads=2, page_size_tokens=P, head_dim=2, dtype_bytes=4)


class AskedPeer:
    """Has everything."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int | None]] = []

    async def pull(
        self,
        peer: Peer,
        request: PullRequest,
        pages: Sequence[memoryview],
        tail: memoryview | None,
        expected_epoch: int | None = None,
        verified: Callable[[int], None] = lambda pages: None,
    ) -> PullResult:
        views = [*pages, *([] if tail is None else [tail])]
        self.asked.append((len(pages), views[0].nbytes, request.tail_index))
        size = sum(view.nbytes for view in views)
        return PullResult(len(pages), tail is not None, size, 0.0, gone=False, error=None)


async def test_a_partial_page_behind_pages_that_lack_cells_comes_whole() -> None:
    """Nothing of it is here, so it is asked for alone: with the others only their cells of it would
    come.
    """
    pages, root = PageManager(PAGES, P), root_tag("model")
    tokens = list(range(2 * P + 3))
    run = pages.allocate(2)
    assert run is not None
    for page, tag in zip(run, page_tags(root, tokens, P), strict=False):
        pages.register(page, tag)
    pages.release(run)
    pages.lose(lambda page: frozenset({(0, 1)}))
    sequence = sequences.Sequence(
        STREAM, (1, 1), tokens, len(tokens), root, False, (range(2),), pull_tail=True
    )
    sequence.extend_tags(P)
    assert reserve(pages, sequence, 0) == 0
    pool = WholePages(
        GEOMETRY, PAGES, torch.zeros(memory_bytes(GEOMETRY, PAGES), dtype=torch.uint8)
    )
    peer = AskedPeer()
    fetcher = PageFetcher(
        cast(Any, pool), pages, cast(Any, peer), {PEER: Peer(PEER, cast(Any, "n0"), "host", 1)}
    )
    source = PullSource(PEER, 1, range(2), TrafficClass.RECOVERY, handoff=STREAM)

    result = await fetcher.fetch(Pull(sequence, (range(2),), 2, 2), source, range(2))

    assert (result.full_pages, result.tail) == (2, True)
    cell_bytes = GEOMETRY.page_bytes // GEOMETRY.page_cells
    assert peer.asked == [(2, cell_bytes, None), (0, GEOMETRY.page_bytes, 2)]
