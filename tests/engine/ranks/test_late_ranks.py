"""A rank that hangs and runs again, before or after the others have gone on without it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from kvrs.errors import RanksLostError
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks import stages
from kvrs_engine.engine.ranks.formation import HangWatch, RankFormation
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.seats import Ended
from kvrs_engine.engine.worker import Worker
from kvrs_testkit.layouts import even
from kvrs_testkit.ranks_in_threads import ThreadRanks
from tests.engine.ranks.test_rank_group import (
    SETTINGS,
    chunks,
    compute_again,
    group_of,
    soon_given_up,
)

pytestmark = [pytest.mark.engine, pytest.mark.process]


def formation_of(group: RankGroup) -> RankFormation:
    formation = group.formation
    assert formation is not None
    return formation


def until(holds: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


@contextmanager
def stopped_in_a_batch(group: RankGroup, rank: int) -> Iterator[threading.Thread]:
    """A rank stands still and the others wait for it, in a batch that a thread computes, until it
    is lost; which it may be already, where this thread is late.
    """
    lines = formation_of(group).memory.lines

    def compute() -> None:
        with pytest.raises(RanksLostError):
            group.execute([chunks()[0]])

    computing = threading.Thread(target=compute)
    os.kill(group.pids[rank], signal.SIGSTOP)
    computing.start()
    until(
        lambda: (
            all(lines[other].awaits.value for other in lines if other != rank)
            or not computing.is_alive()
        )
    )
    yield computing
    computing.join()


@pytest.mark.nightly
def test_a_rank_that_wakes_while_the_others_re_form_leaves_its_batch_and_joins(
    tiny_model: Path,
) -> None:
    """Another one was killed meanwhile: the batch in which it stood still is of no formation."""
    group, worker = group_of(tiny_model, tp=3), Worker(tiny_model, SETTINGS)
    pids = group.pids
    try:
        compute_again(group, worker)
        with stopped_in_a_batch(group, 2) as computing:
            os.kill(pids[1], signal.SIGKILL)
            computing.join()
            until(lambda: group.reforming is not None)
            os.kill(pids[2], signal.SIGCONT)
        group.on_lost()
        compute_again(group, worker)

        assert {0: pids[0], 2: pids[2]}.items() <= group.pids.items()
    finally:
        group.close()


@pytest.mark.nightly
def test_a_rank_that_is_slow_is_kept(tiny_model: Path) -> None:
    """A batch may take longer than a hang lasts, as long as its ranks come further: three pauses of
    2.5 s, where a rank is lost after 6.4 s in which it comes no further.
    """
    group, worker = group_of(tiny_model, tp=2), Worker(tiny_model, SETTINGS)
    slow, ended, pauses = group.pids[1], threading.Event(), 0
    line = formation_of(group).memory.lines[1]

    def pause() -> None:
        nonlocal pauses
        while not ended.is_set() and pauses < 3:
            seen = line.summed.value
            os.kill(slow, signal.SIGSTOP)
            pauses += not ended.wait(2.5)
            os.kill(slow, signal.SIGCONT)
            while line.summed.value == seen and not ended.is_set():
                time.sleep(0.001)

    pausing = threading.Thread(target=pause)
    try:
        with soon_given_up(group, 0.8):
            pausing.start()
            try:
                logits = group.execute([chunks()[0]])
            finally:
                ended.set()
                pausing.join()

        assert pauses == 3
        assert same_bytes(logits, worker.execute([chunks()[0]]))
        assert group.pids[1] == slow
    finally:
        group.close()


def test_a_rank_without_others_shows_that_it_comes_further(tiny_model: Path) -> None:
    """At each sum, though it waits for none."""
    units = ModelConfig.from_directory(tiny_model).units_of_ranks
    ranks = ThreadRanks(tiny_model, SETTINGS, even(units, 1))
    ranks.execute([chunks()[0]])

    assert ranks.memory.lines[0].summed.value == 2 * units.layers


def test_ranks_hang_that_come_no_further() -> None:
    watch = HangWatch(limit_s=1.0, now_s=0.0)
    still = [watch.look([1, 0], at / 100) for at in range(1, 101)]
    further = [watch.look([2, 0], 1.0 + at / 100) for at in range(1, 101)]

    assert not any(still + further)
    assert not watch.look([2, 0], 2.005)
    assert watch.look([2, 0], 2.02)


def test_ranks_do_not_hang_while_the_watch_itself_stood_still() -> None:
    watch = HangWatch(limit_s=1.0, now_s=0.0)
    late = [watch.look([1], 60.0 * at) for at in range(1, 11)]

    assert not any(late)
    assert watch.look([1], 700.0) or watch.look([1], 760.0)


@pytest.mark.nightly
def test_a_rank_that_hangs_in_the_probe_is_killed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe has the limit of batches that are not predicted."""
    group, worker = group_of(tiny_model, tp=3), Worker(tiny_model, SETTINGS)
    monkeypatch.setattr(stages, "UNPREDICTED_S", 3.0)
    pids, probe = group.pids, group.probe

    def stopping(formation: RankFormation) -> torch.Tensor:
        monkeypatch.setattr(group, "probe", probe)
        os.kill(pids[1], signal.SIGSTOP)
        return probe(formation)

    try:
        compute_again(group, worker)
        monkeypatch.setattr(group, "probe", stopping)
        os.kill(pids[2], signal.SIGKILL)
        compute_again(group, worker)

        assert not Path(f"/proc/{pids[1]}").exists()
        assert group.pids[0] == pids[0]
        assert group.reformer.done[0].degree == 1
    finally:
        group.close()


@pytest.mark.nightly
def test_no_thread_is_left_of_ranks_that_have_ended(tiny_model: Path) -> None:
    """A computing rank has two threads: one reads its answers, the other awaits its end."""
    before = set(threading.enumerate())

    def of_ranks() -> int:
        own = set(threading.enumerate()) - before
        return sum(thread.name.startswith("rank-") for thread in own)

    group = group_of(tiny_model, tp=2)
    try:
        for _ in range(3):
            assert group.reformer.order(1, leaves=True).result() is None
            until(lambda: group.layout.ranks == (0,) and of_ranks() == 2)
            assert group.reformer.order(1, leaves=False).result() is None
            until(lambda: group.layout.ranks == (0, 1) and group.reforming is None)
        killed = group.pids[1]
        os.kill(killed, signal.SIGKILL)
        until(lambda: group.pids.get(1) not in (None, killed) and group.layout.ranks == (0, 1))
        until(lambda: of_ranks() == 4)
    finally:
        group.close()  # With time for them to end by themselves.

    assert of_ranks() == 0


@pytest.mark.nightly
def test_what_a_late_rank_writes_is_of_its_own_formation(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that SIGKILL does not reach at once, as in a device's driver: when it wakes it goes
    on with its batch, in memory that nothing reads any more, until it waits for a rank that has
    left the batch. Its socket is closed, so it ends. This one has no KV heads: what keeps cells
    is that a rank is dead before others go on.
    """
    group, worker = group_of(tiny_model, tp=3), Worker(tiny_model, SETTINGS)
    (bare,) = (rank for rank in group.layout.ranks if not group.layout.cells(rank, 0))
    late = group.processes.seats[bare]
    try:
        compute_again(group, worker)
        old = formation_of(group)
        summed = old.memory.lines[bare].summed.value
        with monkeypatch.context() as unkillable:
            unkillable.setattr(late.process, "kill", lambda: None)
            unkillable.setattr(late.process, "wait", lambda patience_s=None: True)
            with soon_given_up(group), stopped_in_a_batch(group, bare):
                pass
            group.processes.told.put(Ended(late))
            group.on_lost()
            # It would join again.
            assert group.reformer.order(bare, leaves=True).result() is None
        new = formation_of(group)
        before = new.memory._floats.view(torch.int32).clone()

        os.kill(late.pid, signal.SIGCONT)
        until(lambda: os.waitid(os.P_PID, late.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

        ended = os.waitid(os.P_PID, late.pid, os.WEXITED)
        assert ended is not None
        assert (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
        assert old.memory.lines[bare].summed.value > summed
        assert formation_of(group) is new
        assert torch.equal(new.memory._floats.view(torch.int32), before)
        compute_again(group, worker)
    finally:
        with suppress(ProcessLookupError):
            os.kill(late.pid, signal.SIGKILL)
        group.close()
