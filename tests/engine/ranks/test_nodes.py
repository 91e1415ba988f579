"""Stages of one instance on two nodes: real processes, connections over loopback."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kvrs.config.file import Config
from kvrs.config.sections import TransferSettings
from kvrs.errors import DamagedPageError, KvrsError, RanksLostError, TransferError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.frames import SESSION_MAC_BYTES, Session
from kvrs.protocol.pages import Part
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.stream import SocketStream
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.ranks.connection import StageAt
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.host import StageHost
from kvrs_engine.engine.ranks.link import (
    PagesDone,
    ReadPages,
    StageLink,
    ToStage,
    facts_digest,
)
from kvrs_engine.engine.ranks.nodes import StageGroup
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.engine.worker import Worker, geometry_of
from kvrs_engine.scheduling.sequences import Chunk
from tests.cluster.launches import until
from tests.engine.ranks.on_nodes import (
    D0,
    SECRET,
    TOKENS,
    chunks,
    closing,
    config_of,
    head_of,
    hosting,
    layout_in,
    model_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.process]

LIMIT_S = 60.0
TRANSFER = TransferSettings(stall_timeout_s=10.0)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def group_of(config: Config, stages: range) -> RankGroup:
    settings = config.cluster.engine
    return RankGroup(model_of(config), settings, layout_in(config), stages=stages)


def connected(config: Config) -> RemoteStage:
    """The second stage, from a process of the instance."""
    model, settings, layout = (
        ModelConfig.from_directory(model_of(config)),
        config.cluster.engine,
        layout_in(config),
    )
    own = Identity(
        D0,
        NodeId("n0"),
        7,
        facts_digest(model, settings, layout),
        geometry_of(model, settings).page_bytes,
    )
    (host,) = config.cluster.nodes[0].instances[0].stage_hosts
    peer = Peer(InstanceId("d0-stage-1"), host.node, host.host, host.port)
    return RemoteStage(StageAt(peer, own, SECRET, TRANSFER), model, settings, layout, 1)


# The contract of a group of stages.


@pytest.fixture(scope="module")
def first_stage(tiny_model: Path) -> Iterator[RankGroup]:
    config = config_of(tiny_model)
    group = group_of(config, range(1))
    yield group
    group.close()


@pytest.fixture(scope="module", params=["local", "remote"])
def second_stage(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StageGroup]:
    config = config_of(tiny_model)
    with ExitStack() as stack:
        group: StageGroup
        if request.param == "local":
            group = group_of(config, range(1, 2))
        else:
            stack.enter_context(hosting(config, tmp_path_factory.mktemp("host")))
            group = connected(config)
        stack.callback(group.close)
        yield group


def through(first: StageGroup, second: StageGroup, chunk: Chunk) -> Tensor:
    return second.execute([chunk], first.execute([chunk], None, LIMIT_S), LIMIT_S)


async def test_a_stage_has_the_bytes_of_one_process(
    tiny_model: Path, first_stage: RankGroup, second_stage: StageGroup
) -> None:
    """Logits from the rows of the stage before; its part of a page is one run of the whole one,
    and comes back where it was put.
    """
    worker = Worker(tiny_model, first_stage.settings)
    for chunk in chunks():
        expected = worker.execute([chunk])
        assert same_bytes(through(first_stage, second_stage, chunk), expected)

    pages = [20, 23, 27]
    theirs = worker.pool.stage(pages)
    await theirs.save()
    part = await second_stage.read(pages)
    size = part.shape[1]
    assert [bytes(view[-size:]) for view in theirs.views] == [
        bytes(row.numpy().data) for row in part
    ]
    await second_stage.write([1, 2, 3], part)
    assert same_bytes(await second_stage.read([3, 1]), part[[2, 0]])


def test_a_killed_rank_comes_back_in_its_stage(
    first_stage: RankGroup, second_stage: StageGroup
) -> None:
    """With the cells that it had, which are not its own. It is told as it is lost and as it is
    back; the batch that was computed is not.
    """
    news: list[tuple[bool, int]] = []
    ended: list[RanksLostError] = []
    second_stage.on_change = lambda: news.append(
        (second_stage.now.reforming is not None, second_stage.now.deaths)
    )
    second_stage.on_end = ended.append
    first, second, *_ = chunks()
    through(first_stage, second_stage, first)
    expected = through(first_stage, second_stage, second)
    before = second_stage.now.pids[1]

    os.kill(before, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        computed = threads.submit(through, first_stage, second_stage, second)
        os.kill(before, signal.SIGKILL)
        with pytest.raises(RanksLostError):
            computed.result()
    second_stage.on_lost()
    found = through(first_stage, second_stage, second)
    until(lambda: second_stage.now.pids[1] != before and second_stage.now.reforming is None)

    assert same_bytes(found, expected)
    # A remote host tells of its start, too, and that may be read late.
    assert (True, 1) in news
    assert news[-1] == (False, 1)
    assert not ended


async def test_lost_cells_of_a_stage_are_named_until_its_books_are_mended(
    first_stage: RankGroup, second_stage: StageGroup
) -> None:
    """Nothing is computed with them, nor sent; other cells are where they were."""
    chunk = chunks()[0]
    expected = through(first_stage, second_stage, chunk)
    whole = await second_stage.read([20])

    cells = second_stage.lose_device(1)
    with pytest.raises(TransferError, match="cells of these pages are lost"):
        await second_stage.read([20])
    while True:
        with pytest.raises(RanksLostError):
            through(first_stage, second_stage, chunk)
        second_stage.on_lost()
        if second_stage.now.reforming is None and 1 in second_stage.now.pids:
            break
    second_stage.on_restart()
    assert same_bytes(through(first_stage, second_stage, chunk), expected)

    assert cells == {0: frozenset(product(second_stage.layers, range(2)))}
    assert same_bytes(await second_stage.read([20]), whole)


async def test_some_cells_of_a_stage_are_written(second_stage: StageGroup) -> None:
    """One layer and one head, named as the model names them; the others stay."""
    await second_stage.write([5], torch.zeros_like(await second_stage.read([5])))
    layer = second_stage.layers[1]
    size = (await second_stage.read([5])).shape[1] // len(second_stage.layers) // 2

    await second_stage.write(
        [5], torch.full((1, size), 7, dtype=torch.uint8), Part(range(layer, layer + 1), range(1, 2))
    )

    found = (await second_stage.read([5])).view(len(second_stage.layers), 2, size)
    assert found.amax(-1).tolist() == [[0, 0], [0, 7]]
    assert found[1, 1].tolist() == [7] * size


# The instance.


@pytest.mark.nightly
def test_a_rank_in_a_host_leaves_by_order_and_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    """The others have its part of the stage meanwhile, as where all ranks are below one process."""
    config = config_of(tiny_model, tp=2)
    worker = Worker(tiny_model, config.cluster.engine)
    with hosting(config, tmp_path), closing(head_of(config)) as head:
        assert head.order(3, leaves=True).result() is None
        until(lambda: head.layout.ranks == (0, 1, 2))
        first, second, *_ = chunks()
        assert same_bytes(head.execute([first]), worker.execute([first]))
        assert head.order(2, leaves=True).result() == "no rank is left for layers [2, 4)"
        assert head.order(7, leaves=True).result() == "rank: got 7; allowed: 0, 1, 2, 3"

        assert head.order(3, leaves=False).result() is None
        until(lambda: head.layout.ranks == (0, 1, 2, 3))
        assert same_bytes(head.execute([second]), worker.execute([second]))


async def test_an_instance_on_two_nodes_has_the_bytes_of_one_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Logits, fingerprint and pages, which are put together from the cells of both. It ends with
    the host of its stage, and the other way round.
    """
    config = config_of(tiny_model)
    worker = Worker(tiny_model, config.cluster.engine)
    with hosting(config, tmp_path) as host:
        head = head_of(config)
        try:
            assert head.fingerprint == worker.fingerprint
            first, *rest, last = chunks()
            for chunk in (first, *rest):
                assert same_bytes(head.execute([chunk]), worker.execute([chunk]))
            pages = list(range(20, 28))
            ours, theirs = head.pool.stage(pages), worker.pool.stage(pages)
            await ours.save()
            await theirs.save()
            assert list(map(bytes, ours.views)) == list(map(bytes, theirs.views))
            moved = head.pool.stage([number + 20 for number in pages])
            for view, other in zip(moved.views, theirs.views, strict=True):
                view[:] = other
            await moved.restore(len(pages))
            there = Chunk(last.token_ids, last.first_position, range(40, 50), logits=1)
            assert same_bytes(head.execute([there]), worker.execute([last]))

            ended = threading.Event()
            head.on_end = lambda _: ended.set()
            host.kill()
            ended.wait()
            with pytest.raises(RanksLostError, match="rank 1 is lost with its node n1"):
                head.on_lost()
            with pytest.raises(TransferError):
                await ours.save()
        finally:
            head.close()


@pytest.mark.nightly
def test_stages_on_nodes_compute_different_batches_at_a_time(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Two threads have the bytes that one process has, and both wait where a stage stands still."""
    config = config_of(tiny_model)
    worker = Worker(tiny_model, config.cluster.engine)
    others = [Chunk(TOKENS[at : at + 9], 0, [10 + at], logits=3) for at in range(6)]
    expected = [[worker.execute([chunk]) for chunk in own] for own in (chunks(), others)]
    with hosting(config, tmp_path) as host:
        head = head_of(config)
        own = head.groups[0]
        assert isinstance(own, RankGroup)
        assert own.formation is not None
        line, before = own.formation.memory.lines[0], own.formation._batch
        try:
            with ThreadPoolExecutor(2) as threads:
                os.kill(host.pid, signal.SIGSTOP)
                results = [
                    threads.submit(lambda own: [head.execute([chunk]) for chunk in own], own)
                    for own in (chunks(), others)
                ]
                until(lambda: line.done.has_reached(before + 2))
                assert not any(result.done() for result in results)
                os.kill(host.pid, signal.SIGCONT)
                found = [result.result() for result in results]
        finally:
            head.close()

    for mine, theirs in zip(found, expected, strict=True):
        assert all(same_bytes(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.nightly
def test_a_host_that_hangs_is_lost_at_the_limit_of_a_batch(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Its connection stands. Its ranks end with it."""
    config = config_of(tiny_model)
    with hosting(config, tmp_path) as host:
        head = head_of(config)
        try:
            head.execute([chunks()[0]])
            head.predict = lambda chunks: 0.01
            os.kill(host.pid, signal.SIGSTOP)
            with pytest.raises(RanksLostError, match=r"rank 1 has not answered for 1\.\d s"):
                head.execute([chunks()[1]])
            ranks = [head.pids[1]]
        finally:
            head.close()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        threading.Event().wait(0.02)


@contextmanager
def slow_host(config: Config, pause_s: float) -> Iterator[None]:
    """A host of this process with ranks that begin each batch late, but are not stuck."""
    host = StageHost(config, D0, 1, SECRET)
    execute, listening = host.group.execute, threading.Event()

    def late(batch: Sequence[Chunk], rows: Tensor | None, limit_s: float) -> Tensor:
        time.sleep(pause_s)
        return execute(batch, rows, limit_s)

    async def serve() -> None:
        stop = asyncio.Event()
        end.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set))
        with suppress(KvrsError):  # The client may be gone before `stop`.
            await host.serve(listening.set, stop)
        await stop.wait()

    end: list[Callable[[], object]] = []
    with patch.object(host.group, "execute", late):
        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            assert listening.wait(60)
            yield
        finally:
            end[0]()
            thread.join()


@pytest.mark.nightly
def test_a_host_with_ranks_that_are_only_slow_is_waited_for(
    first_stage: RankGroup, tiny_model: Path
) -> None:
    """It says that they compute, several times before their time is over. It is heard, too, where
    the instance itself stands still for longer than that.
    """
    config = config_of(tiny_model)
    rows = first_stage.execute([chunks()[0]], None, LIMIT_S)
    with slow_host(config, pause_s=4.0):
        second = connected(config)
        standing = threading.Timer(0.5, second._loop.call_soon_threadsafe, args=(time.sleep, 2.0))
        try:
            standing.start()
            late = second.execute([chunks()[0]], rows, 1.0)
            standing.join()
            in_time = second.execute([chunks()[0]], rows, LIMIT_S)
        finally:
            second.close()

    assert same_bytes(late, in_time)


@pytest.mark.nightly
def test_what_does_not_belong_together_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    """A wrong secret, other settings, other weights: nothing is served, and a host that has refused
    goes on.
    """
    other = tmp_path / "other"
    other.mkdir()
    write_tiny_model(other, seed=1)
    config = config_of(tiny_model)
    # What it hashes is noted beside the files of the whole model.
    Worker(tiny_model, config.cluster.engine)
    (host,) = config.cluster.nodes[0].instances[0].stage_hosts
    with hosting(config, tmp_path):
        with pytest.raises(KvrsError, match=r"stage 1 on node 'n1' .* another secret"):
            head_of(config, b"another secret, as long as that one")
        with pytest.raises(KvrsError, match=r"fingerprints differ: .*; allowed: the same secret"):
            head_of(config_of(tiny_model, host.port, pages=65))
        with pytest.raises(KvrsError, match="stage 1 has the weights of another model"):
            head_of(config_of(other, host.port))


# The link.


@contextmanager
def ends() -> Iterator[tuple[StageLink, StageLink, socket.socket, socket.socket]]:
    """Both ends of a connection, and their sockets."""
    here, there = socket.socketpair()
    with here, there:
        one, other = SocketStream(here, 5.0), SocketStream(there, 5.0)
        one.begin(Session(bytes(32), is_client=True))
        other.begin(Session(bytes(32), is_client=False))
        yield StageLink(one, PagesDone, 100), StageLink(other, ToStage, 100), here, there


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        pytest.param(b"\0" * 12, r"a message of 0 bytes; allowed: 1 to", id="no-message"),
        pytest.param(
            (1 << 31).to_bytes(4, "little") + bytes(8),
            rf"a message of {1 << 31} bytes; allowed",
            id="message",
        ),
        pytest.param(
            b"\5\0\0\0" + (1 << 60).to_bytes(8, "little"),
            rf"a payload of {1 << 60} bytes; allowed: at most 100",
            id="payload",
        ),
    ],
)
async def test_a_length_that_lies_is_refused_before_memory_is_taken(
    start: bytes, reason: str
) -> None:
    with ends() as (_, receiver, under, _):
        under.sendall(start)
        with pytest.raises(TransferError, match=reason):
            await receiver.receive()


async def test_a_message_comes_as_it_was_sent() -> None:
    with ends() as (sender, receiver, _, _):
        await sender.send(ReadPages(1, 1, [1, 2]), torch.arange(8))
        await sender.send(ReadPages(1, 1, [3]))
        order, payload = await receiver.receive()
        after, nothing = await receiver.receive()

    assert (order, payload.view(torch.int64).tolist()) == (ReadPages(1, 1, [1, 2]), list(range(8)))
    assert (after, len(nothing)) == (ReadPages(1, 1, [3]), 0)


@pytest.mark.parametrize("place", [13, -SESSION_MAC_BYTES - 1], ids=["message", "payload"])
async def test_what_was_changed_on_its_way_is_refused(place: int) -> None:
    """Message and payload each have a mac."""
    with ends() as (sender, _, _, taking), ends() as (_, receiver, giving, _):
        await sender.send(ReadPages(1, 1, [1, 2]), torch.arange(8))
        taken = bytearray(taking.recv(1000))
        taken[place] ^= 1
        giving.sendall(taken)
        with pytest.raises(DamagedPageError):
            await receiver.receive(10)


def test_the_host_is_for_a_stage_that_has_one(tiny_model: Path) -> None:
    """Raised before anything is loaded."""
    from kvrs_engine.engine.ranks.host import StageHost

    with pytest.raises(KvrsError, match=r"no stage_hosts for stage 0; allowed: 1"):
        StageHost(config_of(tiny_model), D0, 0, SECRET)


def test_ranks_of_nodes_are_those_of_the_layout(tiny_model: Path) -> None:
    """Named as they are in the state: by the node of their stage."""
    config = config_of(tiny_model)
    instance = config.cluster.nodes[0].instances[0]

    assert instance.stage_nodes(NodeId("n0")) == ["n0", "n1"]
    assert list(instance.remote_stages) == [1]
