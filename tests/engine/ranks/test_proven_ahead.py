"""A re-forming waits for no proof: what the losses of ranks leave to the others was proven when
they were loaded.
"""

import mmap
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrs.config.cluster import Planner
from kvrs_engine.elastic.layouts import SPREAD, Layout, staged, uneven
from kvrs_engine.elastic.on_demand import survivors
from kvrs_engine.elastic.shares import Share
from kvrs_engine.elastic.units import Unit, Units
from kvrs_engine.elastic.ways import PLANNERS
from kvrs_engine.engine.layers import proofs
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.loading import proven
from kvrs_engine.engine.models.unit_blocks import UnitBlock, assemble
from kvrs_engine.engine.ranks.cells import memory_bytes
from kvrs_engine.engine.ranks.futex import Life
from kvrs_engine.engine.ranks.rank import _Loaded
from kvrs_engine.engine.ranks.wire import Load
from kvrs_engine.engine.worker import geometry_of
from tests.engine.ranks.test_rank_group import SETTINGS

pytestmark = pytest.mark.engine

# A thread that holds a robust mutex has it in a list, into which the next one is written.
_LIVES: list[mmap.mmap] = []


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("stages", [1, 2], ids=["one stage", "two stages"])
def test_what_two_losses_need_is_proven_before(
    dense_or_experts: Path, monkeypatch: pytest.MonkeyPatch, stages: int, planner: Planner
) -> None:
    config = ModelConfig.from_directory(dense_or_experts)
    units = config.units_of_ranks
    groups = [range(4)] if stages == 1 else [range(3), range(3, 6)]
    layout = uneven(units, staged(units.layers, groups))
    loaded = loaded_rank(dense_or_experts, config, layout, planner)
    forbid_new_proofs(monkeypatch)

    after = lost_twice(layout, units, planner, spread=False)
    assert_proven(loaded, config, after, spread=False)


@pytest.mark.parametrize("planner", PLANNERS)
def test_heads_that_losses_spread_are_proven_before(
    random_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, planner: Planner
) -> None:
    """Seven ranks have two heads each; of five each has two, and four are spread."""
    model = random_model(
        "llama",
        hidden_size=224,
        num_attention_heads=14,
        num_key_value_heads=14,
        head_dim=16,
        intermediate_size=512,
        vocab_size=512,
        num_hidden_layers=1,
    )
    config = ModelConfig.from_directory(model)
    units = config.units_of_ranks
    layout = uneven(units, staged(units.layers, [range(7)]))
    loaded = loaded_rank(model, config, layout, planner, spreads=True)
    forbid_new_proofs(monkeypatch)

    after = lost_twice(layout, units, planner, spread=True)
    assert any(SPREAD in owners for each in after for owners in each.attention)
    assert_proven(loaded, config, after, spread=True)


def lost_twice(layout: Layout, units: Units, planner: Planner, *, spread: bool) -> list[Layout]:
    """Layouts after the loss of one rank and then another, or of two at once; not the first."""
    found, reshaped = [], PLANNERS[planner]
    for one in layout.stages[0].ranks[1:]:
        left = reshaped(layout, units, survivors(layout, [one]), spread=spread)
        found.append(left)
        for more in left.stages[0].ranks[1:]:
            found.append(reshaped(left, units, survivors(left, [more]), spread=spread))
            both = survivors(layout, [one, more])
            found.append(reshaped(layout, units, both, spread=spread))
    return found


def assert_proven(
    loaded: _Loaded, config: ModelConfig, layouts: Iterable[Layout], *, spread: bool
) -> None:
    for each in layouts:
        share = Share.of(each, each.ranks[0])
        for part in (share, share.spread_heads) if spread else (share,):
            whole = assemble(loaded._common, part, config, blocks_of(loaded))
            assert proven(whole, loaded._proofs).forms


def loaded_rank(
    model: Path, config: ModelConfig, layout: Layout, planner: Planner, *, spreads: bool = False
) -> _Loaded:
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
        spreads=spreads,
        planner=planner,
    )
    cells = memory_bytes(geometry_of(config, SETTINGS), SETTINGS.pages)
    lives = mmap.mmap(-1, Life.BYTES)
    _LIVES.append(lives)
    return _Loaded(order, Life(lives, 0), mmap.mmap(-1, cells))


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
