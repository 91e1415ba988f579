"""Hosts of stages that serve one process of their instance after another: real processes,
connections over loopback.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvrs.config.file import Config
from kvrs.errors import KvrsError, RanksLostError, TransferError
from kvrs.ids import InstanceId
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.ranks.link import (
    VERSION,
    Begin,
    ComputeStage,
    EndRank,
    Mended,
    PagesDone,
    ReadPages,
    StageChannel,
    StageComputed,
    StageReady,
    StageRefused,
    WritePages,
)
from kvrs_engine.engine.ranks.nodes import StageGroup
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.engine.ranks.wire import WireChunk
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.forked import ForkedProcess
from tests.engine.ranks.on_nodes import (
    D0,
    TOKENS,
    closing,
    config_of,
    head_of,
    hosting,
    model_of,
    opened,
)

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.process]

PATIENCE_S = 60.0


def chunks(first_page: int = 20) -> list[Chunk]:
    """Two batches of one sequence."""
    pages = range(first_page, first_page + 8)
    return [
        Chunk(TOKENS[:50], 0, pages, logits=3),
        Chunk(TOKENS[50:60], 50, pages, logits=1),
    ]


def remote(group: StageGroup) -> RemoteStage:
    assert isinstance(group, RemoteStage)
    return group


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> Config:
    return config_of(tiny_model, hosts=2)


@pytest.fixture(scope="module")
def hosts(
    config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ForkedProcess]]:
    directory = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        yield [stack.enter_context(hosting(config, directory, stage)) for stage in (0, 1)]


@pytest.fixture
def epoch() -> int:
    """Higher than that of any test before."""
    _epochs.append(_epochs[-1] + 10)
    return _epochs[-1]


_epochs = [0]


def test_a_later_process_finds_hosts_as_they_were(
    config: Config, hosts: list[ForkedProcess], epoch: int
) -> None:
    """With the same ranks, and with the bytes of one process; its sessions are new."""
    worker = Worker(model_of(config), config.cluster.engine)
    found: list[tuple[dict[int, int], list[int]]] = []
    for start in range(3):
        with closing(head_of(config, epoch=epoch + start)) as head:
            for chunk in chunks():
                assert same_bytes(head.execute([chunk]), worker.execute([chunk]))
            found.append(
                (head.pids, [remote(group)._hosted.ready.session for group in head.groups])
            )

    assert found[0][0] == found[1][0] == found[2][0]
    first = found[0][1]
    assert [sessions for _, sessions in found] == [
        [number + start for number in first] for start in range(3)
    ]
    assert [host.poll() for host in hosts] == [None, None]


def test_a_later_process_takes_the_hosts_from_one_that_is_served(
    config: Config, hosts: list[ForkedProcess], epoch: int
) -> None:
    """The earlier one ends; it is not served again, and nobody else notices."""
    worker = Worker(model_of(config), config.cluster.engine)
    first, last = chunks()
    with closing(head_of(config, epoch=epoch)) as old:
        old.execute([first])
        ended = threading.Event()
        old.on_end = lambda _: ended.set()
        with closing(head_of(config, epoch=epoch + 1)) as new:
            assert ended.wait(PATIENCE_S)
            with pytest.raises(RanksLostError):
                old.on_lost()
            assert same_bytes(new.execute([first]), worker.execute([first]))

            allowed = f"epoch {epoch}; allowed: {epoch + 1} or above"
            with pytest.raises(KvrsError, match=rf"stage 0 on node 'n0' .*: {allowed}"):
                head_of(config, epoch=epoch)

            assert same_bytes(new.execute([last]), worker.execute([last]))


@pytest.mark.nightly
def test_a_process_that_was_stopped_reaches_nothing_when_it_goes_on(
    config: Config, hosts: list[ForkedProcess], epoch: int, tmp_path: Path
) -> None:
    """In the middle of batches, of pages that another process uses meanwhile. It connects again,
    and is refused by name.
    """
    worker = Worker(model_of(config), config.cluster.engine)
    command = [sys.executable, "-m", "tests.engine.ranks.old_head"]
    path = Path(hosts[0].arguments[1])
    with subprocess.Popen(
        [*command, str(path), str(epoch)], stdout=subprocess.PIPE, text=True
    ) as old:
        assert old.stdout is not None
        try:
            assert old.stdout.readline() == "computed\n"
            os.kill(old.pid, signal.SIGSTOP)
            with closing(head_of(config, epoch=epoch + 1)) as new:
                first, last = chunks()
                assert same_bytes(new.execute([first]), worker.execute([first]))
                os.kill(old.pid, signal.SIGCONT)
                *_, reason = old.stdout.read().splitlines()
                assert same_bytes(new.execute([last]), worker.execute([last]))
        finally:
            old.kill()

    assert f"epoch {epoch}; allowed: {epoch + 1} or above" in reason


# What comes over a link.


BATCHES = Begin(VERSION, StageChannel.BATCHES)
WIRE = WireChunk([1, 2, 3], 0, [5], 1, 0)


@pytest.mark.parametrize(
    ("begin", "instance", "reason"),
    [
        pytest.param(
            Begin(VERSION + 1, StageChannel.BATCHES),
            D0,
            f"version {VERSION + 1}; allowed: {VERSION}",
            id="version",
        ),
        pytest.param(BATCHES, "d7", "instance 'd7'; allowed: 'd0'", id="instance"),
        pytest.param(
            Begin(VERSION, StageChannel.PAGES, 1 << 40),
            D0,
            f"session {1 << 40}; allowed: the one that is open, none",
            id="session",
        ),
        pytest.param(ReadPages(1, 1, [1]), D0, "a message out of turn: ReadPages", id="no begin"),
    ],
)
async def test_a_link_that_begins_wrongly_is_refused_by_name(
    config: Config,
    hosts: list[ForkedProcess],
    epoch: int,
    begin: Any,
    instance: str,
    reason: str,
) -> None:
    """The host serves others."""
    head_of(config, epoch=epoch).close()

    link, answer = await opened(config, epoch, begin, InstanceId(instance))
    link.stream.close()

    assert answer == StageRefused(reason)
    with closing(head_of(config, epoch=epoch)) as head:
        head.execute([chunks()[0]])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"epoch": -1}, "an order of epoch {below}; allowed: {epoch}, the session's"),
        ({"session": 1}, "an order of session {after}; allowed: {session}, the link's"),
        ({"chunks": [[[1] * 600, 0, list(range(38)), 1, 0]]}, "600 tokens; allowed: 1 to 256"),
        ({}, "8 bytes of rows; allowed: 8192"),
        ({"limit_s": 0.0}, "no message of a stage"),
    ],
)
async def test_a_batch_that_is_wrong_is_refused_by_name(
    config: Config,
    hosts: list[ForkedProcess],
    epoch: int,
    changed: dict[str, Any],
    reason: str,
) -> None:
    """The host lives on, with its ranks, and so do other sessions."""
    link, ready = await opened(config, epoch, BATCHES)
    order = ComputeStage(ready.session, epoch, 1, [WIRE], 60.0)
    moved = {key: getattr(order, key) + by for key, by in changed.items() if isinstance(by, int)}
    wrong = msgspec.to_builtins(order) | changed | moved
    names = {"epoch": epoch, "below": epoch - 1, "session": ready.session}
    names["after"] = ready.session + 1

    order = msgspec.convert(wrong | {"limit_s": 60.0}, ComputeStage)
    if "limit_s" in changed:
        msgspec.structs.force_setattr(order, "limit_s", changed["limit_s"])
    await link.send(order, torch.zeros(2))
    answer, _ = await link.receive(PATIENCE_S)
    link.stream.close()

    assert isinstance(answer, StageRefused)
    assert reason.format(**names) in answer.reason
    with closing(head_of(config, epoch=epoch)) as head:
        assert head.pids[1] == ready.now.pids[1]
        head.execute([chunks()[0]])


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (ReadPages(0, -1, [1]), "an order of epoch {below}; allowed: {epoch}, the session's"),
        (WritePages(1, 0, [1]), "an order of session {after}; allowed: {session}, the link's"),
        (EndRank(1, 0, 1, []), "an order of session {after}; allowed: {session}, the link's"),
        (ReadPages(0, 0, []), "0 pages []; allowed: 1 to"),
        (ReadPages(0, 0, [64]), "1 pages [64]; allowed: 1 to 256 of 0 to 63"),
        (ReadPages(0, 0, [1] * 257), "257 pages [1, 1, 1, 1, 1, 1, 1, 1]; allowed: 1 to 256 of"),
        (EndRank(0, 0, 1, [0]), "bases of 1 pages; allowed: 0 to 63 of none or 64"),
        (EndRank(0, 0, 1, [64] * 64), "bases of 64 pages; allowed: 0 to 63 of none or 64"),
        (
            WritePages(0, 0, [1], (0, 1), (0, 1)),
            "layers [0, 1] and heads [0, 1]; allowed: within [2, 4] and [0, 2]",
        ),
        (WritePages(0, 0, [1], (2, 3), (1, 1)), "layers [2, 3] and heads [1, 1]; allowed"),
        (Mended(0, 0), "a message out of turn: Mended"),
        (WritePages(0, 0, [1]), "8 bytes of pages; allowed: 16384"),
        (BATCHES, "a message out of turn: Begin"),
    ],
)
async def test_an_order_for_pages_that_is_wrong_is_refused_by_name(
    config: Config, hosts: list[ForkedProcess], epoch: int, order: Any, reason: str
) -> None:
    """`order`: session and epoch beside the right ones."""
    batches, ready = await opened(config, epoch, BATCHES)
    pages, answer = await opened(config, epoch, Begin(VERSION, StageChannel.PAGES, ready.session))
    assert answer == PagesDone()
    if not isinstance(order, Begin):
        order = msgspec.structs.replace(
            order, session=ready.session + order.session, epoch=epoch + order.epoch
        )
    names = {"epoch": epoch, "below": epoch - 1, "session": ready.session}
    names["after"] = ready.session + 1

    await pages.send(order, torch.zeros(2))
    answer, _ = await pages.receive(PATIENCE_S)
    with pytest.raises(TransferError):  # The links of a session end together.
        await batches.receive(PATIENCE_S)
    for link in (batches, pages):
        link.stream.close()

    assert isinstance(answer, StageRefused)
    assert reason.format(**names) in answer.reason
    with closing(head_of(config, epoch=epoch)) as head:
        assert head.pids[1] == ready.now.pids[1]


@pytest.mark.nightly
async def test_a_new_session_waits_for_the_last_batch_of_the_one_before(
    config: Config, hosts: list[ForkedProcess], epoch: int
) -> None:
    """Its pages may be written until then."""
    link, ready = await opened(config, epoch, BATCHES)
    (rank,) = ready.now.pids.values()
    os.kill(rank, signal.SIGSTOP)
    try:
        # A rank counts as hanging after 10 s; the host notices the closed link after a quarter.
        order = ComputeStage(ready.session, epoch, 1, [WIRE], 10.0)
        await link.send(order, torch.zeros(16 * 128))
        link.stream.close()
        beginning = asyncio.create_task(opened(config, epoch + 1, BATCHES))
        await asyncio.wait({beginning}, timeout=4.0)
        assert not beginning.done()
    finally:
        os.kill(rank, signal.SIGCONT)
    after, later = await beginning

    assert isinstance(later, StageReady)
    await after.send(ComputeStage(later.session, epoch + 1, 1, [WIRE], 60.0), torch.zeros(16 * 128))
    assert isinstance((await after.receive(PATIENCE_S))[0], StageComputed)
    after.stream.close()


@pytest.mark.nightly
def test_a_host_that_is_told_to_end_goes_on_until_its_session_is_over(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It begins no other; a host without a session ends at once."""
    config = config_of(tiny_model)
    with hosting(config, tmp_path) as host:
        with closing(head_of(config)) as head:
            host.terminate()
            for chunk in chunks():
                head.execute([chunk])
            with pytest.raises(TransferError):
                asyncio.run(opened(config, 2, BATCHES))
            head.execute([chunks()[0]])
        assert host.wait(PATIENCE_S) == 0

    with hosting(config, tmp_path) as host:
        host.terminate()
        assert host.wait(PATIENCE_S) == 0
