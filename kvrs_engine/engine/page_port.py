"""The page port of one instance, over which its KV pages are sent and received.

The port has the instance's identity for peers, its page server, puller, pusher and link probes, and
for each pool of pages a fetcher and a checkpointer. The embedded engine has one pool for the life
of the process; a stage of DistServe gets a new pool with every restart.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import product

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.config.file import Config
from kvrs.errors import TransferError
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import MEMORY
from kvrs.protocol.pages import TrafficClass
from kvrs.transfer.checkpoint_sender import PagePusher
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import (
    Identity,
    PagePlace,
    PinnedPages,
    PullRequest,
)
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.registry import (
    agents_of,
    holders_of,
    peers_of,
    probe_links,
)
from kvrs.transfer.server import PageServer
from kvrs_engine.engine.checkpoints import Checkpointer
from kvrs_engine.engine.fetching import PageFetcher
from kvrs_engine.engine.pages import EnginePages
from kvrs_engine.engine.replicas import PeerReplicas
from kvrs_engine.engine.staging import PagePool
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.replicas import ReplicaBook

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InstancePlace:
    """An instance's place in the configuration: its node, ports and secrets."""

    config: Config
    node: NodeSettings
    settings: InstanceSettings
    secret: bytes
    epoch: int  # The first epoch of this start of the process.
    links: SendingLinks  # Shared by all transfers of the process.
    older: Sequence[bytes] = ()  # Secrets that are accepted beside the current one.


class PagePort:
    """Serves, fetches and checkpoints pages for one instance. `start` needs a running event loop.

    `epoch` is the epoch of all served pages; when it rises, peers forget the earlier pages.
    """

    def __init__(self, place: InstancePlace, fingerprint: str, geometry: KvGeometry) -> None:
        self.epoch = place.epoch
        self._place = place
        self.registry = peers_of(place.config, place.node, place.secret)
        self.checkpointer: Checkpointer | None = None  # The checkpointer of the attached pool.
        self.replicas: PeerReplicas | None = None  # None: the instance keeps no replicas.
        self._fingerprint = fingerprint
        self._geometry = geometry
        self._pages: EnginePages | None = None  # The pages of the attached pool.
        self._lends = False
        transfer = place.config.transfer
        self.server = PageServer(self, place.secret, transfer, place.links, older=place.older)
        self.puller = PagePuller(self.identity, place.secret, transfer, time.monotonic)
        self._pusher = PagePusher(self.identity, place.secret, transfer, place.links)

    def identity(self) -> Identity:
        """The current identity of the instance for peers."""
        return Identity(
            instance=self._place.settings.id,
            node=self._place.node.id,
            epoch=self.epoch,
            fingerprint=self._fingerprint,
            page_bytes=self._geometry.page_bytes,
            page_cells=self._geometry.page_cells,
        )

    def pinned(self, request: PullRequest) -> AbstractAsyncContextManager[PinnedPages]:
        """Pin pages of the attached pool; without a pool, no page is pinned."""
        if self._pages is None:
            raise TransferError("the stage that held these pages is down")
        return self._pages.pinned(request)

    def attach(
        self,
        pages: PageManager,
        pool: PagePool,
        released: Callable[[], None],
        place: PagePlace | None = None,
    ) -> tuple[PageFetcher, Checkpointer]:
        """Serve the pages of a pool from now on; return its fetcher and its checkpointer.

        `released` is called when sent pages have lost their pins. `place` is the place of the first
        page in memory that other processes of this host can map.
        """
        config = self._place.config
        self._pages = EnginePages(pages, pool, released, place)
        self._lends = place is not None
        if share := config.backup.replica_share(self._place.settings.role):
            cells = product(range(self._geometry.layers), range(self._geometry.kv_heads))
            book = ReplicaBook(pages, share, time.monotonic, frozenset(cells))
            self.replicas = PeerReplicas(book, pool, released)
            self.server.keep(self.replicas)
        self.checkpointer = Checkpointer(
            pages,
            pool,
            self._pusher,
            holders_of(config, self._place.settings.id),
            config.backup,
            clock=time.monotonic,
            released=released,
        )
        return PageFetcher(pool, pages, self.puller, self.registry), self.checkpointer

    def learn(self, config: Config) -> None:
        """Use the instances and agents of a new configuration, with their addresses."""
        self.registry.update(peers_of(config, self._place.node, self._place.secret))
        if self.checkpointer is not None:
            self.checkpointer.learn(holders_of(config, self._place.settings.id))

    def detach(self) -> None:
        """Drop the pool; the port has no pages until the next `attach`."""
        self._pages = self.checkpointer = None

    @property
    def lag_pages(self) -> int:
        """Number of full pages of protected streams that their agents do not have yet."""
        return 0 if self.checkpointer is None else self.checkpointer.lag_pages

    def agents_bytes_per_s(self) -> float:
        """Bandwidth of the slowest measured link from an agent; 0: no link is measured."""
        links = self.puller.links()
        agents = [self.registry[name] for name in agents_of(self._place.config)]
        nodes = {MEMORY if each.directory is not None else each.node for each in agents}
        return min((links[node].bytes_per_s for node in nodes if node in links), default=0.0)

    def kv_bytes(self) -> dict[str, int]:
        """Bytes of fetched pages and of sent checkpoints since the start, by kind."""
        moved = self.puller.pulled_bytes | {TrafficClass.CHECKPOINT: self._pusher.pushed_bytes}
        return {traffic.label: count for traffic, count in moved.items()}

    async def start(self) -> None:
        """Open the page port."""
        settings = self._place.settings
        await self.server.start(settings.bound(settings.host), settings.page_port)
        own = self.registry[settings.id]
        if self._lends and own.directory is not None:
            try:
                self.server.lend(own.directory, own.socket)
            except OSError as error:
                log.warning("pages are sent, not mapped", extra={"cause": str(error)})

    async def probe(self) -> None:
        """Probe every link into the instance for its estimate, until cancelled."""
        interval_s = self._place.config.transfer.probe_interval_s
        await probe_links(self.puller, self.registry, self._place.settings.id, interval_s)

    async def close(self) -> None:
        await self.server.close()
        await self.puller.close()
        await self._pusher.close()
