"""An agent of the instance's node, and what is fetched from it after losses."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrs.config.file import Config
from kvrs.engine.instance import EngineInstance
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.page_messages import TrafficClass
from kvrs.protocol.parts import Cell
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import PAGES_SOCKET, Identity
from kvrs.transfer.send_faults import SendingFaults
from kvrs.transfer.server import PageServer
from kvrs.transfer.store.directory import StoreDirectory, store_directory
from kvrs.transfer.store.host import HostStore
from kvrs.transfer.unix_sockets import listen_in

NODE, AGENT = NodeId("n0"), InstanceId("agent-n0")
RESERVED_BYTES = 1 << 20  # Of a stream.
_CAPACITY_BYTES = 1 << 29
_LEASE_S = 30.0


@asynccontextmanager
async def agent_of(config: Config, secret: bytes) -> AsyncIterator[None]:
    """Keeps checkpoints where the configuration says, and lends them."""
    with StoreDirectory(store_directory(config.backup.directory, secret, NODE)) as directory:
        clock = asyncio.get_running_loop().time
        store = HostStore(directory, _CAPACITY_BYTES, _LEASE_S, clock)

        def identity() -> Identity:
            kind = store.fingerprint, store.page_bytes, store.page_cells
            return Identity(AGENT, NODE, store.epoch, *kind)

        links = SendingLinks(config.transfer, SendingFaults(), NODE)
        server = PageServer(identity, store, secret, config.transfer, links, store)
        await server.start("127.0.0.1", config.cluster.nodes[0].agent.page_port)
        server.lend(listen_in(directory, PAGES_SOCKET, socket.SOCK_STREAM), store.places)
        try:
            yield
        finally:
            await server.close()
            store.clear()
            directory.unlink(PAGES_SOCKET)


@dataclass(slots=True)
class FetchedCells:
    """Of the time from one loss of cells to the next: what was fetched, beside what was lost of the
    pages that it was fetched for.
    """

    losses: int = 0
    pages: int = 0
    fetched_bytes: int = 0
    lost_bytes: int = 0
    whole_bytes: int = 0


class CellsWatch:
    """Notes the cells that an instance loses, and what it fetches then."""

    def __init__(self, instance: EngineInstance) -> None:
        self.found = FetchedCells()
        self._instance = instance
        self._cells = 0  # Of a page, that were lost last.
        self._seen = 0, 0
        self._lose_cells = instance.core.lose_cells
        instance.core.lose_cells = self._lost  # type: ignore[method-assign]

    def _lost(self, cells: Mapping[int, frozenset[Cell]]) -> None:
        self.note()
        self.found.losses += 1
        self._cells = max(map(len, cells.values()))
        self._lose_cells(cells)

    def note(self) -> None:
        """Count what came since the last loss."""
        instance = self._instance
        fetched_bytes = instance.port.puller.pulled_bytes[TrafficClass.RECOVERY]
        pages, geometry = instance.core.fetched_pages - self._seen[0], instance.worker.geometry
        self.found.pages += pages
        self.found.fetched_bytes += fetched_bytes - self._seen[1]
        self.found.whole_bytes += pages * geometry.page_bytes
        cell_bytes = geometry.page_bytes // geometry.page_cells
        self.found.lost_bytes += pages * self._cells * cell_bytes
        self._seen = instance.core.fetched_pages, fetched_bytes
