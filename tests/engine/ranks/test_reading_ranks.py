"""The rate at which ranks read weights from files."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrs.config.cluster import ElasticSettings, EngineSettings
from kvrs.transfer.shared_memory import Region
from kvrs_engine.elastic.plans import HOST, Move
from kvrs_engine.elastic.units import Unit, UnitKind
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.reading import WeightReading
from kvrs_engine.engine.models.unit_blocks import UnitBlocks
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.ranks import rank as ranks
from kvrs_engine.engine.ranks.processes import RankProcesses
from kvrs_engine.engine.ranks.rank import _Loaded
from kvrs_engine.engine.ranks.wire import FetchUnits, UnitMove

pytestmark = pytest.mark.engine

RATE = 12e6


def seat_of(rank: int, orders: list[Any]) -> Any:
    order = lambda order, descriptors: orders.append(order)  # noqa: E731
    return SimpleNamespace(rank=rank, pid=1000 + rank, units={}, has_died=False, order=order)


@pytest.fixture
def cells() -> Iterator[Region]:
    region = Region.anonymous("kvrs-cells", 1)
    yield region
    region.close()


@pytest.mark.parametrize("rate", [RATE, None])
def test_ranks_that_read_at_the_same_time_share_the_rate_of_the_disk(
    tiny_model: Path, cells: Region, rate: float | None
) -> None:
    """A rank that only copies from another one takes no part of it."""
    config = ModelConfig.from_directory(tiny_model)
    settings = EngineSettings(pages=8, disk_bytes_per_s=rate)
    processes = RankProcesses(tiny_model, settings, config, cells, ElasticSettings())
    orders: list[Any] = []
    processes.seats |= {rank: seat_of(rank, orders) for rank in range(3)}
    first, second = (Unit(UnitKind.MLP, 0, place) for place in range(2))

    moves = [Move(first, 0, 64, HOST, 0), Move(second, 0, 64, HOST, 1), Move(first, 0, 64, 0, 2)]
    processes.fetch(2, moves)
    processes.fetch(3, [Move(second, 0, 64, HOST, 2)])

    two, one = (None, None) if rate is None else (rate / 2, rate)
    assert [each.bytes_per_s for each in orders if each.moves] == [two, two, one]


def test_each_order_of_a_rank_is_read_at_its_rate(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time between two orders gives none of them a faster start."""
    now_s = [100.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    reading = partial(WeightReading, clock=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(ranks, "WeightReading", reading)
    config, weights = ModelConfig.from_directory(tiny_model), Weights(tiny_model)
    blocks, unit = UnitBlocks(config, weights), Unit(UnitKind.MLP, 0, 0)
    memory = torch.zeros(blocks.places([unit])[1], dtype=torch.uint8)
    loaded: Any = object.__new__(_Loaded)
    loaded._weights, loaded._unit_blocks, loaded._blocks = weights, blocks, {}

    took_s, read_bytes = [], []
    for epoch in (1, 2):
        loaded.fetching = epoch
        began_s = now_s[0]
        (answer,) = loaded.fetch(
            FetchUnits(epoch, [UnitMove(unit, 0, 0, 0, 0)], {}, bytes_per_s=1000.0), [memory]
        )
        took_s.append(now_s[0] - began_s)
        read_bytes.append(answer.read_bytes)
        now_s[0] += 3600.0

    assert took_s == pytest.approx([each / 1000.0 for each in read_bytes])
    assert read_bytes[0] > 0
