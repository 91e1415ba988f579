"""Instances that lose the host of a stage and wait for the next one: real processes."""

import asyncio
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kvrs.errors import RanksLostError, TransferError
from kvrs.profiles import catalog
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.ranks.host import StageHost
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.engine.worker import Worker
from tests.cluster.launches import until
from tests.engine.ranks.on_nodes import (
    D0,
    SECRET,
    chunks,
    closing,
    config_of,
    head_of,
    hosting,
)

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.process]


class Books:
    """Stand-in for the books of an instance, which mend lost cells when they are told to."""

    def __init__(self, head: RanksOnNodes) -> None:
        self.head = head
        self.lost: list[tuple[RemoteStage, int]] = []
        self.ended = threading.Event()
        for stage in head.remote:
            stage.on_cells = partial(self._lose, stage)
        head.on_end = lambda lost: self.ended.set()

    def _lose(self, stage: RemoteStage, loss: int) -> None:
        self.lost.append((stage, loss))

    def mend(self) -> None:
        for stage, loss in self.lost:
            stage.noted(loss)
        self.head.on_restart()


@pytest.mark.nightly
async def test_nothing_is_computed_or_sent_while_a_stage_waits_for_its_host(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Nor before the books know of the lost cells, also where the next host is there. What is to be
    written waits as well, and is not lost.
    """
    config = config_of(tiny_model)
    first, second, *_ = chunks()
    with hosting(config, tmp_path) as host:
        head = head_of(config)
        books = Books(head)
        head.execute([first])
        page = head.pool.stage([20])
        await page.save()
        host.kill()
        until(lambda: bool(books.lost))
    with closing(head), ThreadPoolExecutor(1) as threads:
        with pytest.raises(RanksLostError):
            head.execute([second])
        with pytest.raises(TransferError):
            await head.pool.stage([20]).save()
        back = threads.submit(head.on_lost)
        writing = asyncio.create_task(page.restore(1))
        await asyncio.wait({writing}, timeout=0.5)
        assert not back.done()
        assert not writing.done()

        with hosting(config, tmp_path):
            await asyncio.wrap_future(back)
            await writing
            with pytest.raises(RanksLostError, match="rank 1 has lost cells"):
                head.execute([second])
            with pytest.raises(TransferError, match="cells of these pages are lost"):
                await head.pool.stage([20]).save()
            books.mend()
            again = head.pool.stage([20])
            await again.save()
    assert again.views[0] == page.views[0]


def test_a_lost_host_is_waited_for_beside_the_other_stages(
    tiny_model: Path, tmp_path: Path
) -> None:
    """These keep their ranks; batches that are computed again have the bytes of one process."""
    config = config_of(tiny_model, hosts=2)
    worker = Worker(tiny_model, config.cluster.engine)
    first, second, *_ = chunks()
    with hosting(config, tmp_path, 0):
        with hosting(config, tmp_path, 1) as host:
            head = head_of(config)
            books = Books(head)
            head.execute([first])
            before = head.now
            host.kill()
            until(lambda: bool(books.lost))
        with closing(head):
            now = head.now
            with hosting(config, tmp_path, 1):
                head.on_lost()
                books.mend()
                for chunk in (first, second):
                    assert same_bytes(head.execute([chunk]), worker.execute([chunk]))
                after = head.now

    assert now.reforming is not None
    assert (now.reforming.way, now.reforming.lost) == (Way.WAIT, (1,))
    assert (now.pids, now.deaths) == ({0: before.pids[0]}, 1)
    assert books.lost[0][0].cells == {(layer, at) for layer in (2, 3) for at in (0, 1)}
    assert not books.ended.is_set()
    assert after.reforming is None
    assert after.pids[0] == before.pids[0]
    assert after.pids[1] != before.pids[1]
    assert after.number == now.number + 1
    assert after.layout.number > before.layout.number


@pytest.mark.nightly
def test_a_loss_that_the_books_do_not_know_yet_is_not_mended(
    tiny_model: Path, tmp_path: Path
) -> None:
    """They may mend an earlier one at that moment."""
    config = config_of(tiny_model)
    with hosting(config, tmp_path) as host:
        head = head_of(config)
        books = Books(head)
        host.kill()
        until(lambda: bool(books.lost))
    with closing(head), hosting(config, tmp_path):
        head.on_restart()
        head.on_lost()
        with pytest.raises(RanksLostError, match="rank 1 has lost cells"):
            head.execute([chunks()[0]])
        books.mend()
        head.execute([chunks()[0]])


@pytest.mark.nightly
@pytest.mark.parametrize("other", ["weights", "epoch"])
def test_a_host_that_does_not_go_on_ends_the_instance(
    tiny_model: Path, tmp_path: Path, other: str
) -> None:
    """One with other weights, or one that serves a later process of the instance."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = config_of(model)
    with hosting(config, tmp_path) as host:
        head = head_of(config)
        books = Books(head)
        if other == "epoch":
            with closing(head_of(config, epoch=2)) as later:
                assert books.ended.wait(60)
                later.execute([chunks()[0]])
        else:
            os.kill(host.pid, signal.SIGKILL)
            until(lambda: bool(books.lost))
    if other == "weights":
        shutil.rmtree(model)
        write_tiny_model(model, seed=1)
        with hosting(config, tmp_path):
            assert books.ended.wait(60)
    with closing(head):
        reason = "other weights" if other == "weights" else "epoch 1; allowed: 2 or above"
        with pytest.raises(RanksLostError, match=reason):
            head.on_lost()


@pytest.mark.nightly
@pytest.mark.parametrize("pace", [None, "llama-3.1-70b-a100-vllm-tp4"])
def test_a_host_reads_its_part_of_the_weights_at_the_rate_of_the_disk(
    tiny_model: Path, pace: str | None
) -> None:
    """With a pace, its part of that model's; a stage that is lost is predicted to take as long."""
    weights = sum(path.stat().st_size for path in tiny_model.glob("*.safetensors"))
    total = weights if pace is None else catalog.load(pace).weight_bytes
    config = config_of(tiny_model, hosts=2, disk_bytes_per_s=total / 20.0, pace=pace)

    loads_s = []
    for stage in (0, 1):
        host = StageHost(config, D0, stage, SECRET)
        host.group.close()
        loads_s.append(host._load_s)

    assert sum(loads_s) > 19.0, "the head of the file is not read"
    assert min(loads_s) > 5.0
