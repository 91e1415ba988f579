"""A re-forming waits for no proof: what the loss of a rank leaves to the others was proven when
they were loaded.
"""

import mmap
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrs.elastic.layouts import Layout, even, staged, uneven
from kvrs.elastic.on_demand import reshaped, survivors
from kvrs.elastic.shares import Share
from kvrs.elastic.units import Unit
from kvrs.engine.layers import proofs
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.models.loading import proven
from kvrs.engine.models.unit_blocks import UnitBlock, assemble
from kvrs.engine.ranks.cells import memory_bytes
from kvrs.engine.ranks.futex import Life
from kvrs.engine.ranks.rank import _Loaded
from kvrs.engine.ranks.wire import Load
from kvrs.engine.worker import geometry_of
from tests.engine.ranks.test_rank_group import SETTINGS

pytestmark = pytest.mark.engine

# A thread that holds a robust mutex has it in a list, into which the next one is written.
_LIVES: list[mmap.mmap] = []


@pytest.mark.parametrize("stages", [1, 2], ids=["one stage", "two stages"])
def test_what_a_loss_needs_is_proven_before(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    config = ModelConfig.from_directory(tiny_model)
    units = config.units_of_ranks
    layout = even(units, 2, 2) if stages == 2 else uneven(units, staged(units.layers, [range(4)]))
    loaded = loaded_rank(tiny_model, config, layout)
    forbid_new_proofs(monkeypatch)

    left = [survivors(layout, [rank]) for rank in layout.ranks[1:]]
    for each in (layout, *(reshaped(layout, units, one, spread=False) for one in left)):
        share = Share.of(each, layout.ranks[0])
        whole = assemble(loaded._common, share, config, blocks_of(loaded))
        assert proven(whole, loaded._proofs).forms


def loaded_rank(model: Path, config: ModelConfig, layout: Layout) -> _Loaded:
    rank, stage = layout.ranks[0], layout.stages[0]
    order = Load(
        rank=rank,
        model=str(model),
        settings=SETTINGS.model_dump(mode="json"),
        first=stage.first,
        last=stage.last,
        is_first=True,
        is_last=len(layout.stages) == 1,
        layout=layout,
    )
    cells = memory_bytes(geometry_of(config, SETTINGS), SETTINGS.pages)
    lives = mmap.mmap(-1, Life.BYTES)
    _LIVES.append(lives)
    Life(lives, 0).prepare()
    return _Loaded(order, lives, mmap.mmap(-1, cells))


def blocks_of(loaded: _Loaded) -> Callable[[Unit], UnitBlock]:
    def block_of(unit: Unit) -> UnitBlock:
        size = loaded._unit_blocks.places([unit])[1]
        return loaded._unit_blocks.block(unit, torch.rand(size // 4).view(torch.uint8), 0)

    return block_of


def forbid_new_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(weights: Iterable[Tensor]) -> None:
        assert not list(weights), "units are proven late"

    def heights(weights: Iterable[Tensor]) -> tuple[int, ...]:
        raise AssertionError("heights are proven late")

    def holds(known: proofs.Proofs, what: Hashable, prove: Callable[[], bool]) -> bool:
        assert what in known._blocks, "a block is proven late"
        return known._blocks[what]

    monkeypatch.setattr(proofs, "check_unit_products", products)
    monkeypatch.setattr(proofs, "proven_heights", heights)
    monkeypatch.setattr(proofs.Proofs, "holds", holds)
