"""Pages between the process of an instance and its hosts, and between hosts, under the limit of a
link: real hosts. It is so low that what is limited does not come while a test lasts.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kvrs.config.file import Config
from kvrs.config.sections import TransferSettings
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.pages import Tag
from kvrs.protocol.secrets import Scope
from kvrs.transfer.connections import admit
from kvrs.transfer.peers import Identity
from kvrs.transfer.stream import SocketStream, page_socket
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.link import (
    VERSION,
    Begin,
    BringParts,
    OfferParts,
    PagesDone,
    PartsRange,
    PartsTaken,
    StageChannel,
    StageLink,
    ToStage,
    facts_digest,
)
from kvrs_engine.engine.worker import geometry_of
from kvrs_engine.scheduling.sequences import Chunk
from tests.engine.ranks import test_stage_ring
from tests.engine.ranks.on_nodes import (
    PATIENCE_S,
    SECRET,
    TOKENS,
    closing,
    head_of,
    hosting,
    layout_in,
    model_of,
    opened,
)

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.process, pytest.mark.nightly]

BYTES_PER_S = 2000.0  # A part of a page takes 8 s.
WAIT_S = 1.0
PAGES = [3, 4, 5, 6]
D0, D1 = InstanceId("d0"), InstanceId("d1")


@pytest.fixture(scope="module")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """d0 and d1 with a node for each stage; d1 has its hosts."""
    transfer = TransferSettings(link_bytes_per_s=BYTES_PER_S)
    config = test_stage_ring.config_of(tiny_model, 2).model_copy(update={"transfer": transfer})
    with ExitStack() as stack:

        def host(stage: int) -> None:
            directory = tmp_path_factory.mktemp("host")
            stack.enter_context(hosting(config, directory, stage, D1))

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(host, (0, 1)))
        yield config


async def waits(work: Awaitable[object]) -> bool:
    """It has not come after a while."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_note)
    await asyncio.wait({task}, timeout=WAIT_S)
    return not task.done()


def _note(task: "asyncio.Future[object]") -> None:
    """Its link is closed."""
    if not task.cancelled():
        task.exception()


async def test_pages_to_and_from_hosts_of_other_nodes_are_limited(config: Config) -> None:
    """Batches are not, nor what stays within a node."""
    batch = [Chunk(TOKENS[:50], 0, range(20, 28), logits=1)]
    with closing(head_of(config, of=D1)) as head:
        near, far = head.groups
        parts = await near.read(PAGES)
        await near.write(PAGES, parts)
        assert await waits(far.read(PAGES))
        head.execute(batch)
    with closing(head_of(config, epoch=2, of=D1)) as head:
        assert await waits(head.groups[1].write(PAGES, parts))
        head.execute(batch)


@contextmanager
def listening(config: Config) -> Iterator[socket.socket]:
    """At the place of the second stage of d0."""
    at = config.cluster.find(D0)[1].stage_hosts[-1]
    with page_socket(at.host) as listener:
        listener.bind((at.host, at.port))
        listener.listen()
        yield listener


@asynccontextmanager
async def brought(config: Config, listener: socket.socket) -> AsyncIterator[StageLink]:
    """The link by which parts come there."""
    model, settings = ModelConfig.from_directory(model_of(config)), config.cluster.engine
    facts = facts_digest(model, settings, layout_in(config))
    page_bytes = geometry_of(model, settings).page_bytes
    node = config.cluster.find(D0)[1].stage_hosts[-1].node
    own = Identity(InstanceId("d0-stage-1"), node, 1, facts, page_bytes)
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    stream = SocketStream(sock, PATIENCE_S)
    try:
        await admit(stream, [SECRET], lambda: own, scope=Scope.STAGES)
        yield StageLink(stream, ToStage, 1 << 24)
    finally:
        stream.close()


async def test_parts_from_host_to_host_are_limited(config: Config) -> None:
    tags = [Tag(at.to_bytes(16, "big")) for at in range(len(PAGES))]
    ranges = [PartsRange(StreamId("s"), 0, tags)]
    with listening(config) as listener:
        batches, ready = await opened(config, 3, Begin(VERSION, StageChannel.BATCHES), D1, D1)
        begin = Begin(VERSION, StageChannel.REPLICAS, ready.session)
        orders, _ = await opened(config, 3, begin, D1, D1)
        await orders.send(BringParts(ready.session, 3, D0, ranges, PAGES))
        async with brought(config, listener) as link:
            began, _ = await link.receive(PATIENCE_S)
            await link.send(PagesDone())
            offer, _ = await link.receive(PATIENCE_S)
            await link.send(PartsTaken([0], [*range(len(PAGES))]))
            await link.stream.wait_for_data()
            assert await waits(link.receive())
        for each in (orders, batches):
            each.stream.close()

    assert began.channel is StageChannel.PARTS
    assert offer == OfferParts(ranges, are_sent=True)
