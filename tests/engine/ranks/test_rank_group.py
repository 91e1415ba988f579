"""Instances of several ranks: real processes, real SIGKILLs."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrs.config.cluster import ElasticSettings, EngineSettings, InstanceSettings
from kvrs.errors import KvrsError, RanksLostError, TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs_engine.elastic import waiting
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.nursery import AdoptedChild, Nursery
from kvrs_engine.engine.ranks import processes as started
from kvrs_engine.engine.ranks import stages
from kvrs_engine.engine.ranks.exchange import FormationMemory
from kvrs_engine.engine.ranks.formation import RankFormation
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.processes import RankProcesses
from kvrs_engine.engine.ranks.reformer import cells_of
from kvrs_engine.engine.ranks.seats import RankSeat
from kvrs_engine.engine.ranks.settings import layout_of
from kvrs_engine.engine.ranks.wire import Loaded
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from tests.cluster.launches import until

pytestmark = [pytest.mark.engine, pytest.mark.process]

SETTINGS = EngineSettings(pages=64)
TOKENS = [(7 * at * at + 3) % 500 for at in range(120)]
CUTS = [0, 50, 51, 67, 119, 120]


def group_of(model: Path, elastic: ElasticSettings | None = None, **ranks: object) -> RankGroup:
    instance = InstanceSettings.model_validate(
        {"id": InstanceId("d0"), "role": Role.DECODE, **ranks}
    )
    layout = layout_of(instance, ModelConfig.from_directory(model).units, elastic)
    assert layout is not None
    return RankGroup(model, SETTINGS, layout, elastic)


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[RankGroup]:
    group = group_of(tiny_model, tp=2)
    yield group
    group.close()


def chunks() -> list[Chunk]:
    return [
        Chunk(TOKENS[first:last], first, range(20, 30), logits=min(3, last - first))
        for first, last in pairwise(CUTS)
    ]


def compute_on(group: RankGroup, chunk: Chunk) -> None:
    while True:
        group.execute([chunk])


def unit_bytes(group: RankGroup) -> dict[int, int]:
    """Return the bytes of the units that each rank has."""
    seats, units = group.processes.seats, group.units
    return {rank: sum(map(units.bytes_of, seat.units)) for rank, seat in seats.items()}


def test_a_batch_beyond_the_slots_of_the_ranks_is_not_computed(pair: RankGroup) -> None:
    """They would write past their slots of the memory that they share."""
    most = SETTINGS.max_batch_tokens
    batch = [Chunk([1] * 16, 0, [page], logits=1) for page in range(most // 16 + 1)]
    with pytest.raises(AssertionError, match="room for no more"):
        pair.execute(batch)


@pytest.mark.nightly
def test_a_batch_is_given_up_if_cells_are_lost_meanwhile(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although all ranks have computed it: one may have read its cells when they were gone."""
    group = group_of(tiny_model, tp=2)
    try:
        compute = RankFormation.execute

        def losing(formation: RankFormation, *batch: Any) -> torch.Tensor:
            logits = compute(formation, *batch)
            group.pool.lose({0: [(0, 0)]})
            return logits

        monkeypatch.setattr(RankFormation, "execute", losing)
        with pytest.raises(RanksLostError, match="has lost cells meanwhile"):
            group.execute(chunks()[:1])
    finally:
        group.close()


@pytest.mark.nightly
def test_a_rank_that_hangs_at_the_start_is_named_and_ends_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance does not start, and leaves no process."""
    monkeypatch.setattr(stages, "start_limit_s", lambda took_s: 1.0 if took_s else None)
    pids: list[int] = []
    start = RankProcesses.start

    def stopping(processes: RankProcesses, rank: int, *order: Any, **how: Any) -> RankSeat:
        seat = start(processes, rank, *order, **how)
        pids.append(seat.pid)
        if rank == 1:
            os.kill(seat.pid, signal.SIGSTOP)
        return seat

    monkeypatch.setattr(RankProcesses, "start", stopping)

    with pytest.raises(RanksLostError, match="rank 1 said nothing for 1 s as it started"):
        group_of(tiny_model, tp=2)

    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_two_ranks_have_the_bytes_of_one_process(tiny_model: Path, pair: RankGroup) -> None:
    """Logits, and the fingerprint under which pages move between degrees."""
    worker = Worker(tiny_model, SETTINGS)

    assert pair.fingerprint == worker.fingerprint
    for chunk in chunks():
        assert same_bytes(pair.execute([chunk]), worker.execute([chunk]))


def test_stages_compute_different_batches_at_a_time(tiny_model: Path) -> None:
    """The first stage is through with a second batch while the second one has not begun the first,
    and each batch has the bytes of one process.
    """
    worker = Worker(tiny_model, SETTINGS)
    others = [Chunk(TOKENS[at : at + 9], 0, [40 + at], logits=3) for at in range(6)]
    expected = [[worker.execute([chunk]) for chunk in own] for own in (chunks(), others)]
    group = group_of(tiny_model, pp=2)
    first, second = (group.layout.stages[at].ranks[0] for at in range(2))
    assert group.formation is not None
    lines, before = group.formation.memory.lines, group.formation._batch
    try:
        with ThreadPoolExecutor(2) as threads:
            os.kill(group.pids[second], signal.SIGSTOP)
            results = [
                threads.submit(lambda own: [group.execute([chunk]) for chunk in own], own)
                for own in (chunks(), others)
            ]
            until(lambda: lines[first].done.has_reached(before + 2))
            assert not lines[second].done.has_reached(before + 1)
            assert group.streams == 2
            os.kill(group.pids[second], signal.SIGCONT)
            found = [result.result() for result in results]
    finally:
        group.close()

    for mine, theirs in zip(found, expected, strict=True):
        assert all(same_bytes(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_result_that_is_not_read_yet_is_not_overwritten(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch has its own result, although another thread computes two more before it is read.

    Two stages share two sets of areas: the third batch takes those of the first one.
    """
    worker = Worker(tiny_model, SETTINGS)
    batches = [Chunk(TOKENS[at : at + 9], 0, [at], logits=3) for at in range(3)]
    group = group_of(tiny_model, pp=2)
    assert group.formation is not None
    first, logits = group.formation._batch + 1, FormationMemory.logits
    computed, may_read = threading.Event(), threading.Event()

    def late(memory: FormationMemory, rows: int, batch: int) -> torch.Tensor:
        if batch == first:
            computed.set()
            assert may_read.wait(60)
        return logits(memory, rows, batch)

    monkeypatch.setattr(FormationMemory, "logits", late)
    try:
        with ThreadPoolExecutor(2) as threads:
            results = [threads.submit(group.execute, batches[:1])]
            assert computed.wait(60)
            results.append(threads.submit(group.execute, batches[1:2]))
            results[1].result()
            results.append(threads.submit(group.execute, batches[2:]))
            wait(results[2:], timeout=0.5)  # It would overwrite by then.
            may_read.set()
            found = [result.result() for result in results]
    finally:
        may_read.set()
        group.close()

    for chunk, result in zip(batches, found, strict=True):
        assert same_bytes(result, worker.execute([chunk]))


def test_a_freeze_waits_for_all_batches_and_lets_no_other_begin(tiny_model: Path) -> None:
    """Ranks are taken only from batches that have ended."""
    group = group_of(tiny_model, pp=2)
    second = group.pids[group.layout.stages[1].ranks[0]]
    assert group.formation is not None
    line, before = group.formation.memory.lines[0], group.formation._batch
    try:
        with ThreadPoolExecutor(3) as threads:
            os.kill(second, signal.SIGSTOP)
            pages = [[1], [2]]
            batches = [
                threads.submit(group.execute, [Chunk(TOKENS[:9], 0, own, logits=1)])
                for own in pages
            ]
            until(lambda: line.done.has_reached(before + 2))
            frozen = threads.submit(group.freeze, at_once=False)
            until(lambda: group.formation is None)

            with pytest.raises(RanksLostError):
                group.execute([Chunk(TOKENS[:9], 0, [3], logits=1)])
            assert not frozen.done()
            os.kill(second, signal.SIGCONT)
            frozen.result()
            assert all(batch.done() for batch in batches)
            assert same_bytes(*(batch.result() for batch in batches))
    finally:
        group.close()


async def test_a_page_is_gathered_and_scattered_as_one_process_has_it(
    tiny_model: Path, pair: RankGroup
) -> None:
    """A page that was written at one degree is read at another."""
    worker, (first, *rest) = Worker(tiny_model, SETTINGS), chunks()
    pages = list(first.pages)
    for chunk in (first, *rest[:-1]):
        worker.execute([chunk])
    theirs = worker.pool.stage(pages)
    ours = pair.pool.stage(pages)
    for view, other in zip(ours.views, theirs.views, strict=True):
        view[:] = other

    await ours.restore(len(pages))

    assert same_bytes(pair.execute([rest[-1]]), worker.execute([rest[-1]]))
    again = pair.pool.stage(pages)
    await again.save()
    assert list(map(bytes, again.views)) == list(map(bytes, theirs.views))


@pytest.mark.nightly
def test_a_restart_is_predicted_without_what_the_start_did_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of a process waits for a nursery to begin, and all ranks prove what they may
    need after losses: the next one, for which the others wait, does neither.
    """
    nursery = Nursery(["kvrs_engine.engine.ranks.rank"])
    begun_s: list[float] = []
    fork = nursery.fork

    def late(*arguments: Any) -> AdoptedChild:
        child = fork(*arguments)
        begun_s.append(time.monotonic())
        return child

    monkeypatch.setattr(nursery, "fork", late)
    monkeypatch.setattr(started, "RANKS", nursery)
    with closing(nursery), closing(group_of(tiny_model, tp=2)) as group:
        seats, costs = group.processes.seats, group._machine.costs
        assert [seats[rank].began_s >= done for rank, done in enumerate(begun_s)] == [True, True]
        assert 0 < costs.restart_s < costs.back_s - waiting.AGAIN_S


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Loaded(b"another", {}), "rank 1 computes with other results than the others"),
        (
            Loaded(b"one", {"norm": b"another"}),
            "rank 1 has read other weights than the others: norm",
        ),
    ],
    ids=["arithmetic", "weights"],
)
def test_a_rank_that_differs_from_the_others_is_refused(
    monkeypatch: pytest.MonkeyPatch, pair: RankGroup, answer: Loaded, said: str
) -> None:
    processes = pair.processes
    monkeypatch.setattr(processes, "arithmetic", b"one")
    monkeypatch.setattr(processes, "hashes", {"norm": b"one"})

    with pytest.raises(KvrsError, match=said):
        processes.loaded(processes.seats[1], answer)


def test_the_units_are_resident_once(tiny_model: Path, pair: RankGroup) -> None:
    """No rank has what another one computes."""
    model = ModelConfig.from_directory(tiny_model)
    units = model.units

    assert sum(unit_bytes(pair).values()) == units.total_bytes - units.common_bytes
    assert len(set(unit_bytes(pair).values())) == 1


def compute_again(group: RankGroup, worker: Worker) -> None:
    """All chunks, each as often as ranks are lost, against one process."""
    for chunk in chunks():
        while True:
            try:
                logits = group.execute([chunk])
            except RanksLostError:
                group.on_lost()
            else:
                assert same_bytes(logits, worker.execute([chunk]))
                break


@contextmanager
def soon_given_up(group: RankGroup, predicted_s: float = 0.4) -> Iterator[None]:
    """A rank that hangs in a batch is lost after eight times what is predicted; a busy machine has
    longer for other batches.
    """
    group.predict = lambda chunks: predicted_s
    try:
        yield
    finally:
        group.predict = None


@pytest.mark.parametrize("stopped", [False, True])
def test_the_other_ranks_go_on_and_the_lost_one_comes_back(tiny_model: Path, stopped: bool) -> None:
    """One that is killed at once; one that hangs when a batch takes too long, and it is killed
    then, so that it computes nothing any more. The others stay the processes that they are, use
    what the lost one had where it lies, with nothing read, and give it to the new one.
    """
    group, worker = group_of(tiny_model, tp=2), Worker(tiny_model, SETTINGS)
    survivor, lost = group.pids[0], group.pids[1]
    half = unit_bytes(group)[1]
    try:
        compute_again(group, worker)
        os.kill(lost, signal.SIGSTOP if stopped else signal.SIGKILL)
        with soon_given_up(group), pytest.raises(RanksLostError):
            compute_on(group, chunks()[0])
        group.on_lost()
        while Path(f"/proc/{lost}").exists():  # Its memory is freed while the others compute.
            time.sleep(0.01)
        pids = group.pids
        assert pids[0] == survivor
        assert lost not in pids.values()
        compute_again(group, worker)
        while len(group.layout.ranks) < 2:
            compute_again(group, worker)
        compute_again(group, worker)

        assert group.pids.keys() == {0, 1}
        assert group.pids[0] == survivor
        assert unit_bytes(group) == {0: half, 1: half}
        reshard, resize = group.reformer.done
        assert (reshard.way, resize.way) == (Way.RESHARD, Way.RESIZE)
        assert reshard.moved == {"kept": half, "read": 0}
        assert (reshard.host_bytes, reshard.peer_bytes) == (0, half)
        assert resize.moved == {"peer": half, "read": 0}
        assert (resize.host_bytes, resize.peer_bytes) == (0, half)
    finally:
        group.close()


def test_without_elastic_a_lost_rank_is_the_end(tiny_model: Path) -> None:
    group = group_of(tiny_model, ElasticSettings(enabled=False), tp=2)
    ended: list[RanksLostError] = []
    group.on_end = ended.append
    try:
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(RanksLostError) as lost:
            compute_on(group, chunks()[0])
        with pytest.raises(RanksLostError, match="rank 1 has died"):
            group.on_lost()
        assert lost.value.ranks in ((1,), ())
        assert list(group.lost) == [1]
        assert [each.ranks for each in ended] == [(1,)]
    finally:
        group.close()


def test_a_lost_device_had_the_cells_of_the_layout_before(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the survivors have theirs before its cells are dropped."""
    group = group_of(tiny_model, tp=2)
    kill = RankSeat.kill

    def kill_and_reform(seat: RankSeat, *, with_device: bool = False) -> None:
        kill(seat, with_device=with_device)
        if threading.current_thread() is threading.main_thread():  # The ranks re-form in another.
            until(lambda: not cells_of(group.layout, 1, base=0))

    try:
        expected = cells_of(group.layout, 1, base=0)
        assert expected
        with monkeypatch.context() as patched:
            patched.setattr(RankSeat, "kill", kill_and_reform)
            assert group.lose_device(1) == {0: expected}
    finally:
        group.close()


@pytest.mark.nightly
async def test_a_lost_device_is_a_lost_rank_without_its_memory(tiny_model: Path) -> None:
    """No page is sent before the books know that its cells are gone. Then all is computed again."""
    group, worker = group_of(tiny_model, tp=2), Worker(tiny_model, SETTINGS)
    try:
        compute_again(group, worker)
        staged = group.pool.stage([chunks()[0].pages[0]])
        group.lose_device(1)
        with pytest.raises(TransferError):
            await staged.save()
        staged = group.pool.stage([chunks()[0].pages[0]])
        with pytest.raises(TransferError):
            await staged.save()
        group.on_restart()
        with pytest.raises(TransferError):
            await staged.save()
        again = group.pool.stage([chunks()[0].pages[0]])
        await again.save()
        cells = torch.frombuffer(again.views[0], dtype=torch.float32).view(4, 2, -1)
        assert cells[:, 0].count_nonzero() > 0
        assert cells[:, 1].count_nonzero() == 0
        with pytest.raises(RanksLostError):
            compute_on(group, chunks()[0])
        group.on_lost()
        compute_again(group, worker)
    finally:
        group.close()


@pytest.mark.nightly
def test_ranks_end_with_the_process_of_their_instance(tiny_model: Path) -> None:
    """Also when that is killed, and also one that is stopped."""
    script = (
        "import sys, time; from pathlib import Path; from tests.engine.ranks import "
        "test_rank_group as t; group = t.group_of(Path(sys.argv[1]), tp=2); "
        "print(*group.pids.values(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tiny_model)], stdout=subprocess.PIPE
    ) as head:
        assert head.stdout is not None
        pids = list(map(int, head.stdout.readline().split()))
        os.kill(pids[0], signal.SIGSTOP)

        head.kill()

    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)
