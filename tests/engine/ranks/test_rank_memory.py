"""Memory and descriptors of ranks, in the process of their instance and in their own."""

import errno
import mmap
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrs.config.cluster import ElasticSettings, EngineSettings
from kvrs.transfer.shared_memory import Region
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.plans import HOST, Move
from kvrs_engine.elastic.units import Unit, UnitKind
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.unit_blocks import UnitBlocks
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.nursery import Nursery
from kvrs_engine.engine.ranks.cells import memory_bytes
from kvrs_engine.engine.ranks.exchange import Areas
from kvrs_engine.engine.ranks.futex import Life
from kvrs_engine.engine.ranks.processes import RankProcesses
from kvrs_engine.engine.ranks.rank import _Loaded, _Rank
from kvrs_engine.engine.ranks.seats import RankSeat, UnitAt
from kvrs_engine.engine.ranks.wire import (
    Attach,
    Fetched,
    FetchUnits,
    Join,
    Load,
    Settle,
    UnitMove,
    UnitPlace,
)
from kvrs_engine.engine.ranks.yielding import COPY_NICE
from kvrs_engine.engine.worker import geometry_of
from kvrs_testkit.layouts import even

pytestmark = pytest.mark.engine

SETTINGS = EngineSettings(pages=8)


def descriptors(name: str) -> list[int]:
    """Inodes of memory of that name, one for each descriptor that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # That of the directory itself.
            if f"memfd:{name}" in os.readlink(entry):
                found.append(entry.stat().st_ino)
    return found


def seat_of(rank: int, *, has_died: bool = False) -> Any:
    return SimpleNamespace(
        rank=rank,
        pid=1000 + rank,
        units={},
        has_died=has_died,
        order=lambda order, descriptors: None,
    )


@pytest.fixture
def processes(tiny_model: Path) -> Iterator[RankProcesses]:
    config, cells = ModelConfig.from_directory(tiny_model), Region.anonymous("kvrs-cells", 1)
    yield RankProcesses(tiny_model, SETTINGS, config, cells, ElasticSettings())
    cells.close()


def test_a_unit_that_comes_twice_is_kept_once(processes: RankProcesses) -> None:
    """It came from a plan that a further loss broke off, and is in the next plan too."""
    seat = processes.seats[0] = seat_of(0)
    unit, before = Unit(UnitKind.MLP, 0, 0), set(descriptors("kvrs-units-0"))
    for epoch in (2, 3):
        processes.fetch(epoch, [Move(unit, 0, 64, HOST, 0)])
    for epoch in (2, 3):
        assert processes.fetched(seat, Fetched(epoch, unit, b"", 0))

    assert len(set(descriptors("kvrs-units-0")) - before) == 1
    RankSeat.release(seat, [unit])
    assert not set(descriptors("kvrs-units-0")) - before


def test_what_is_fetched_yields_where_it_may(processes: RankProcesses) -> None:
    """The next order, for which others wait, does not."""
    orders: list[Any] = []
    seat = processes.seats[0] = seat_of(0)
    seat.order = lambda order, descriptors: orders.append(order)
    for epoch, nice in ((2, COPY_NICE), (3, 0)):
        processes.fetch(epoch, [Move(Unit(UnitKind.MLP, 0, 0), 0, 64, HOST, 0)], nice=nice)
    processes.drop_coming()

    assert [order.nice for order in orders] == [COPY_NICE, 0]


def test_a_unit_that_comes_twice_from_where_a_lost_rank_had_it_stays_there(
    processes: RankProcesses,
) -> None:
    seat, lost = seat_of(0), seat_of(1, has_died=True)
    processes.seats |= {0: seat, 1: lost}
    unit = Unit(UnitKind.MLP, 0, 0)
    memory = Region.anonymous("kvrs-lost", 64)
    memory.memory[:4] = b"unit"
    lost.units[unit] = UnitAt(memory, 0, mmap.PAGESIZE)
    for epoch in (2, 3):
        processes.fetch(epoch, [Move(unit, 0, 64, 1, 0)])
    before = len(descriptors("kvrs-lost"))
    for epoch in (2, 3):
        assert processes.fetched(seat, Fetched(epoch, unit, b"", 0))

    assert len(descriptors("kvrs-lost")) == before - 1
    assert seat.units[unit].memory.memory[:4] == b"unit"
    for each in (seat, lost):
        RankSeat.release(each, [unit])
    memory.memory.close()
    assert descriptors("kvrs-lost") == []


def test_a_rank_that_cannot_be_started_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start fails where no descriptor is left for the rank's socket."""
    before = len(descriptors("kvrs-life"))

    def fail() -> None:
        raise OSError(errno.EMFILE, "none is left")

    monkeypatch.setattr(socket, "socketpair", fail)
    with pytest.raises(OSError, match="none is left"):
        RankSeat(0, Nursery([]), lambda told: None)

    assert len(descriptors("kvrs-life")) == before


def test_a_unit_that_comes_late_disturbs_no_rank_that_settles(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are moved by a thread of its own, which may still be at one of an older order."""
    config = ModelConfig.from_directory(tiny_model)
    layout, layers = even(config.units_of_ranks, 2), config.layers
    order = Load(
        rank=0,
        model=str(tiny_model),
        settings=SETTINGS.model_dump(mode="json"),
        first=0,
        last=layers,
        is_first=True,
        is_last=True,
        layout=None,
    )
    lives = mmap.mmap(-1, Life.BYTES)
    Life(lives, 0).prepare()
    cells = mmap.mmap(-1, memory_bytes(geometry_of(config, SETTINGS), SETTINGS.pages))
    all_units = [unit for unit in config.units_of_ranks.all() if unit.kind != UnitKind.COMMON]
    held = layout.held(0)
    own = [unit for unit in all_units if unit in held]
    late = next(unit for unit in all_units if unit not in held)
    places, size = UnitBlocks(config, Weights(tiny_model)).places(own)
    areas = Areas(
        layout,
        config=config,
        batch_tokens=SETTINGS.max_batch_tokens,
    )

    def join() -> None:
        loaded = _Loaded(order, Life(lives, 0), cells)
        memory = torch.zeros(size, dtype=torch.uint8)
        loaded.fetching = 1
        loaded.attach(Attach([UnitPlace(unit, at) for unit, at in places.items()]), memory)

        class Held(frozenset[Unit]):
            def __contains__(self, unit: object) -> bool:
                come()
                return super().__contains__(unit)

            def __iter__(self) -> Iterator[Unit]:
                for unit in super().__iter__():
                    come()
                    yield unit

        def come() -> None:
            loaded._blocks[late] = next(iter(loaded._blocks.values()))

        monkeypatch.setattr(Layout, "held", lambda layout, rank: Held(held))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            rank = _Rank(theirs)
            rank._loaded, rank._orders.descriptors = loaded, [os.memfd_create("formation")]
            os.ftruncate(rank._orders.descriptors[0], areas.size_bytes)
            for obeyed in (Join(2, layout, (0, 1)), Settle()):
                rank._obey(obeyed)
        assert loaded._blocks.keys() - {late} == set(own)
        older = FetchUnits(1, [UnitMove(own[0], 0, 0, 0, 0)], {})
        assert list(loaded.fetch(older, [memory])) == [], "nothing more is moved for it"

    # The memory of its life belongs to a thread that ends before it.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(join).result()


def test_batches_of_all_stages_have_areas_of_their_own(tiny_model: Path) -> None:
    """Rows and logits lie where no other batch under way has its own."""
    config = ModelConfig.from_directory(tiny_model)
    layout = even(config.units, tp=1, pp=2)
    areas = Areas(layout, config=config, batch_tokens=20)
    batches = range(5, 7)

    found = sorted(
        [
            *((areas.rows(0, n), areas.rows_bytes) for n in batches),
            *((areas.logits(n), areas.logit_rows * areas.vocabulary * 4) for n in batches),
        ]
    )

    assert areas.depth == 2
    assert len(found) == 4
    assert all(at + size <= after for (at, size), (after, _) in pairwise(found))
    assert sum(found[-1]) <= areas.size_bytes
    assert areas.rows(0, 5) == areas.rows(0, 7)
