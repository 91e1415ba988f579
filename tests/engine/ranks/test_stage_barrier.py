"""Batches that are given up: their pages are nobody else's while a rank may write into them."""

import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest
from torch import Tensor

from kvrs.errors import RanksLostError
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.ranks.connection import StageConnection
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from tests.cluster.launches import until
from tests.engine.ranks.on_nodes import chunks, config_of, head_of, hosting

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.process, pytest.mark.nightly]


def stopped_ranks(pids: Iterable[int]) -> None:
    """Return when they stand still."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        while state_of(pid) != "T":
            time.sleep(0.01)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_batch_is_given_up_only_when_no_stage_computes_it_any_more(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The second stage loses a rank; the first one still writes into the pages of a batch."""
    config = config_of(tiny_model, hosts=2)
    worker = Worker(tiny_model, config.cluster.engine)
    first, second, *_ = chunks()
    with (
        hosting(config, tmp_path, 0),
        hosting(config, tmp_path, 1),
        ThreadPoolExecutor(2) as threads,
    ):
        head = head_of(config)
        try:
            head.execute([first])
            writing, lost = head.pids[0], head.pids[1]
            stage = connection_of(head)
            stopped_ranks([lost])
            ahead = threads.submit(head.execute, [first])
            until(lambda: stage._answer is not None and not stage._answer.done())
            stopped_ranks([writing])
            behind = threads.submit(head.execute, [second])
            os.kill(lost, signal.SIGKILL)
            with pytest.raises(RanksLostError):
                ahead.result()
            wait({behind}, timeout=2.0)
            assert not behind.done()
            os.kill(writing, signal.SIGCONT)
            with suppress(RanksLostError):  # The rank may be back by then.
                behind.result()
            head.on_lost()
            assert same_bytes(head.execute([second]), worker_after(worker, first, second))
        finally:
            head.close()


def worker_after(worker: Worker, *batches: Chunk) -> Tensor:
    """The last result of these batches."""
    return [worker.execute([chunk]) for chunk in batches][-1]


def test_a_stage_computes_again_when_none_of_its_ranks_computes_an_earlier_batch(
    tiny_model: Path, tmp_path: Path
) -> None:
    """One of two ranks is killed in a batch in which the other one still writes. The batch is told
    to be given up at once; its pages are nobody else's before the other one has joined the next
    formation.
    """
    config = config_of(tiny_model, tp=2)
    worker = Worker(tiny_model, config.cluster.engine)
    first, second, *_ = chunks()
    with hosting(config, tmp_path), ThreadPoolExecutor(2) as threads:
        head = head_of(config)
        try:
            head.execute([first])
            head.predict = lambda chunks: 1.0
            writing, lost = head.pids[2], head.pids[3]
            stopped_ranks([writing, lost])
            given_up = threads.submit(head.execute, [second])
            stage = connection_of(head)
            until(lambda: stage._is_heard)  # A word that the host sends of this batch.
            os.kill(lost, signal.SIGKILL)
            with pytest.raises(RanksLostError, match="has died"):
                given_up.result()
            serving = threads.submit(head.on_lost)
            wait({serving}, timeout=2.0)
            assert not serving.done()
            os.kill(writing, signal.SIGCONT)
            serving.result()
            assert same_bytes(head.execute([second]), worker_after(worker, first, second))
        finally:
            head.close()


def connection_of(head: RanksOnNodes) -> StageConnection:
    """That of the last stage."""
    stage = head.groups[-1]
    assert isinstance(stage, RemoteStage)
    return stage._hosted.connection
