"""Instances of several ranks: real processes, real SIGKILLs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvrs.config.cluster import InstanceSettings
from kvrs.config.engine import EngineSettings
from kvrs.engine.layers.proofs import same_bytes
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.ranks.group import RankGroup
from kvrs.engine.ranks.settings import layout_of
from kvrs.engine.worker import Worker
from kvrs.errors import RanksLostError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs.scheduling.sequences import Chunk

pytestmark = [pytest.mark.engine, pytest.mark.process]

SETTINGS = EngineSettings(pages=64)
TOKENS = [(7 * at * at + 3) % 500 for at in range(120)]
CUTS = [0, 50, 51, 67, 119, 120]


def group_of(model: Path, **ranks: object) -> RankGroup:
    instance = InstanceSettings.model_validate(
        {"id": InstanceId("d0"), "role": Role.DECODE, **ranks}
    )
    layout = layout_of(instance, ModelConfig.from_directory(model).units)
    assert layout is not None
    return RankGroup(model, SETTINGS, layout)


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[RankGroup]:
    group = group_of(tiny_model, tp=2)
    yield group
    group.close()


def chunks() -> list[Chunk]:
    return [
        Chunk(TOKENS[first:last], first, range(20, 30), wants_logits=True)
        for first, last in pairwise(CUTS)
    ]


def compute_on(group: RankGroup, chunk: Chunk) -> None:
    while True:
        group.execute([chunk])


def test_two_ranks_have_the_bytes_of_one_process(tiny_model: Path, pair: RankGroup) -> None:
    """Logits, and the fingerprint under which pages move between degrees."""
    worker = Worker(tiny_model, SETTINGS)

    assert pair.fingerprint == worker.fingerprint
    for chunk in chunks():
        assert same_bytes(pair.execute([chunk]), worker.execute([chunk]))


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


def test_the_units_are_resident_once(tiny_model: Path, pair: RankGroup) -> None:
    """No rank has what another one computes."""
    model = ModelConfig.from_directory(tiny_model)
    units = model.units

    assert sum(pair.unit_bytes.values()) == units.total_bytes - units.common_bytes
    assert len(set(pair.unit_bytes.values())) == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_a_lost_rank_is_told_by_its_number(tiny_model: Path, stopped: bool) -> None:
    """One that is killed at once; one that hangs when a batch takes too long, and it is killed
    then, so that it computes nothing any more.
    """
    group = group_of(tiny_model, tp=2)
    group.predict = lambda chunks: 0.01
    (first, *_) = chunks()
    try:
        group.execute([first])
        os.kill(group.pids[1], signal.SIGSTOP if stopped else signal.SIGKILL)
        with pytest.raises(RanksLostError) as lost:
            compute_on(group, first)
        assert lost.value.ranks == (1,)
        assert list(group.lost) == [1]
    finally:
        group.close()


async def test_a_lost_device_is_a_lost_rank_without_its_memory(tiny_model: Path) -> None:
    """What it had of a page is gone, and what others had is there."""
    group = group_of(tiny_model, tp=2)
    (first, *_) = chunks()
    try:
        group.execute([first])
        group.lose_device(1)
        with pytest.raises(RanksLostError):
            compute_on(group, first)
        staged = group.pool.stage([first.pages[0]])
        await staged.save()
        cells = torch.frombuffer(staged.views[0], dtype=torch.float32).view(4, 2, -1)
        assert cells[:, 0].count_nonzero() > 0
        assert cells[:, 1].count_nonzero() == 0
        assert group.lost_devices == {1}
    finally:
        group.close()


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
