"""An agent of the instance's node, and what is fetched from it after losses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrs.config.file import Config
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.pages import Cell, Tag, TrafficClass
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import PullResult
from kvrs.transfer.server import PageServer
from kvrs.transfer.store.directory import StoreDirectory, store_directory
from kvrs.transfer.store.host import HostStore
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.scheduling.sequences import Pull, SequencePhase
from kvrs_engine.scheduling.sources import PullSource

NODE, AGENT = NodeId("n0"), InstanceId("agent-n0")
RESERVED_BYTES = 1 << 20  # Of a stream.
_CAPACITY_BYTES = 1 << 29
_LEASE_S = 30.0


@asynccontextmanager
async def agent_of(config: Config, secret: bytes) -> AsyncIterator[None]:
    """Keeps checkpoints where the configuration says, and lends them."""
    with StoreDirectory(store_directory(config.backup.directory, secret, NODE)) as directory:
        clock = asyncio.get_running_loop().time
        store = HostStore(AGENT, NODE, directory, _CAPACITY_BYTES, _LEASE_S, clock)

        links = SendingLinks(config.transfer, SendingFaults(), NODE)
        server = PageServer(store, secret, config.transfer, links)
        server.keep(store)
        await server.start("127.0.0.1", config.cluster.nodes[0].agent.page_port)
        server.lend(directory.path)
        try:
            yield
        finally:
            await server.close()
            store.clear()


@dataclass(slots=True)
class FetchedCells:
    """The data fetched after losses, beside the cells that were lost of these pages."""

    losses: int = 0
    pages: int = 0
    fetched_bytes: int = 0
    lost_bytes: int = 0
    whole_bytes: int = 0


class CellsWatch:
    """Notes which cells of each page an instance of ranks loses, and what it fetches then."""

    def __init__(self, instance: EngineInstance) -> None:
        self.found = FetchedCells()
        self._instance, self._pages = instance, instance.pages
        # Of each page, since it was whole here.
        self._lost: dict[Tag, frozenset[Cell]] = {}
        self._bases: dict[Tag, int] = {}
        self._fetch, self._lose = instance.core._fetcher.fetch, instance.pages.lose
        instance.core._fetcher.fetch = self._fetching  # type: ignore[method-assign]
        instance.pages.lose = self._losing  # type: ignore[method-assign]

    def note(self) -> None:
        """Count what has come so far."""
        pulled = self._instance.port.puller.pulled_bytes
        self.found.fetched_bytes = pulled[TrafficClass.RECOVERY]
        if isinstance(ranks := self._instance.ranks, RankGroup):
            self.found.losses = ranks.pool.losses

    def _losing(self, gone: Callable[[int], frozenset[Cell]]) -> None:
        of_base = {base: gone(page) for page, base in enumerate(self._pages.bases)}
        for tag, page in self._pages._page_by_tag.items():
            self._lost[tag], self._bases[tag] = frozenset(), self._pages.bases[page]
        for tag, before in self._lost.items():
            self._lost[tag] = before | of_base.get(self._bases[tag], frozenset())
        self._lose(gone)

    async def _fetching(self, pull: Pull, source: PullSource, wanted: range) -> PullResult:
        result = await self._fetch(pull, source, wanted)
        if pull.sequence.phase is SequencePhase.FINISHED:
            return result  # Its pages are those of the sequence that began again.
        geometry = self._instance.worker.geometry
        for index in wanted[: result.full_pages]:
            lost = self._lost.pop(pull.sequence.tags[index], frozenset())
            self.found.pages += 1
            self.found.whole_bytes += geometry.page_bytes
            self.found.lost_bytes += geometry.page_bytes // geometry.page_cells * len(lost)
        return result
