"""KV heads that are spread over the ranks by sequences: real ranks, real SIGKILLs."""

import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvrs.config.cluster import ElasticSettings, InstanceSettings, Planner
from kvrs.errors import RanksLostError
from kvrs.ids import InstanceId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import Role
from kvrs_engine.elastic.layouts import SPREAD, Layout, hybrid, staged
from kvrs_engine.elastic.units import Units
from kvrs_engine.elastic.ways import PLANNERS, Way
from kvrs_engine.engine.instance import PrefillShares
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.settings import layout_of
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_engine.scheduling.shares import Waiting, prefill_cost
from kvrs_testkit.layouts import even
from tests.engine.ranks.test_in_place import answers_of, kill, when_moving
from tests.engine.ranks.test_rank_group import SETTINGS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.usefixtures("patient"),
]

KV_HEADS = 5
BASES = (0, 1, 2, 5)
PAGES = 6
LENGTH = 90
CUTS = [0, 40, 41, 57, 89, 90]
SPREADS = ElasticSettings(spread_heads=True)


@pytest.fixture(scope="module")
def model(
    tiny_model: Path, random_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny model with five KV heads."""
    directory = tmp_path_factory.mktemp("spread") / "tiny"
    shutil.copytree(tiny_model, directory)
    random = random_model(
        "llama",
        hidden_size=80,
        num_attention_heads=2 * KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=16,
        intermediate_size=512,
        vocab_size=512,
        num_hidden_layers=4,
        max_position_embeddings=8192,
        initializer_range=0.2,
    )
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(random / name, directory / name)
    return directory


def group_of(model: Path, tp: int, pp: int = 1) -> RankGroup:
    settings = InstanceSettings(id=InstanceId("d0"), role=Role.DECODE, tp=tp, pp=pp)
    layout = layout_of(
        settings, ModelConfig.from_directory(model).units, ElasticSettings(spread_heads=True)
    )
    assert layout is not None
    return RankGroup(model, SETTINGS, layout, SPREADS)


def batches() -> Iterator[list[Chunk]]:
    """Sequences of several bases, all in each batch."""
    for first, last in pairwise(CUTS):
        yield [
            Chunk(
                [(11 * place * place + 5 + at) % 500 for place in range(first, last)],
                first,
                range(at * PAGES, (at + 1) * PAGES),
                logits=min(3, last - first),
                base=base,
            )
            for at, base in enumerate(BASES)
        ]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[torch.Tensor]:
    """Results of one process, sequence by sequence."""
    worker = Worker(model, SETTINGS)
    return [torch.cat([worker.execute([chunk]) for chunk in batch]) for batch in batches()]


def base_of(group: RankGroup, *others: tuple[int, int]) -> int:
    """The base of a new sequence beside others, of each its base and its tokens to compute."""
    new: Any = SimpleNamespace(base=0)
    beside: Any = [SimpleNamespace(base=base, uncomputed_tokens=left) for base, left in others]
    group.place(new, beside)
    base: int = new.base
    return base


def compute(
    group: RankGroup,
    expected: list[torch.Tensor],
    between: Callable[[], object] = lambda: None,
) -> None:
    """All batches, each as often as ranks are lost in it; `between` the second and the third."""
    for number, (batch, logits) in enumerate(zip(batches(), expected, strict=True)):
        if number == 2:
            between()
        while True:
            try:
                found = group.execute(batch)
            except RanksLostError:
                group.on_lost()
            else:
                assert same_bytes(found, logits)
                break


def spread_heads(layout: Layout) -> int:
    return layout.attention[0].count(SPREAD)


@pytest.mark.nightly
def test_what_a_rank_leaves_becomes_the_memory_of_each(
    model: Path, expected: list[torch.Tensor]
) -> None:
    """A killed rank's own head is spread over the others: one of them uses it where it is, the
    others have copies of theirs, so that a lost device takes nothing from them. What was on that
    device alone is read once, also where it is spread. The cells of other heads are where they
    were, so sequences go on. The ranks grow back to the layout that they had.
    """
    group = group_of(model, tp=4)
    try:
        assert spread_heads(group.layout) == 1
        compute(group, expected, lambda: kill(group, 3))
        first = group.reformer.done[0]
        assert (first.way, first.degree) == (Way.RESHARD, 3)
        assert first.moved["read"] == 0
        assert first.moved["kept"] > 0 < first.moved["peer"]
        layout = group.layout
        others = set().union(*(layout.held(rank) for rank in layout.ranks if rank != 0))
        once = sum(map(group.units.bytes_of, layout.held(0) - others))
        group.lose_device(0)
        group.on_restart()
        compute(group, expected)
        lost = next(each for each in group.reformer.done[1:] if each.way is Way.RESHARD)
        assert lost.moved["read"] == lost.moved["host"] == lost.host_bytes
        assert 0 < lost.host_bytes <= once  # Less if a rank that comes back has some already.
        assert lost.moved["peer"] == lost.peer_bytes > 0
        while group.reforming is not None or len(group.layout.ranks) < 4:
            compute(group, expected)
        assert spread_heads(group.layout) == 1
    finally:
        group.close()


def test_ranks_are_lost_in_mid_move(model: Path, expected: list[torch.Tensor]) -> None:
    """Turns are mended twice, then heads are whole again."""
    group = group_of(model, tp=4)
    try:
        when_moving(group, lambda: kill(group, 1))
        compute(group, expected, lambda: kill(group, 2))
        while group.reforming is not None or len(group.layout.ranks) < 4:
            compute(group, expected)
        compute(group, expected)
    finally:
        group.close()


@pytest.mark.nightly
def test_stages_spread_heads_over_their_own_ranks(
    model: Path, expected: list[torch.Tensor]
) -> None:
    group = group_of(model, tp=2, pp=2)
    try:
        compute(group, expected, lambda: kill(group, 3))
    finally:
        group.close()


@pytest.mark.nightly
def test_a_device_takes_the_cells_of_its_turns_only(
    model: Path, expected: list[torch.Tensor]
) -> None:
    """Each page loses the cells of the rank's own heads and the spread cells of the page's base; a
    batch's base is that of the sequences with fewest tokens to compute.
    """
    group = group_of(model, tp=4)
    try:
        assert base_of(group) == 0
        assert base_of(group, (0, 300), (1, 20), (2, 25), (3, 20)) == 1
        assert base_of(group, (0, 1), (1, 20), (2, 25), (3, 20), (4, 30)) == 1
        compute(group, expected)
        layout, whole = group.layout, group.pool.memory.clone()
        bases = [BASES[page // PAGES] if page < len(BASES) * PAGES else 0 for page in range(64)]

        assert group.lose_device(1, bases)

        found = group.pool.memory.clone()
        for page, base in enumerate(bases):
            lost = {layer * KV_HEADS + head for layer, head in layout.cells(1, base)}
            assert 4 <= len(lost) < 4 * KV_HEADS
            for cell in range(4 * KV_HEADS):
                kept = bytes(whole[cell, page].numpy())
                assert bytes(found[cell, page].numpy()) == (
                    bytes(len(kept)) if cell in lost else kept
                )
    finally:
        group.close()


def test_a_prompt_costs_the_rank_of_its_base_what_the_others_do_not_have() -> None:
    """At 3 ranks of 4 heads one is spread: a quarter of the attention, whole on one rank."""
    units = Units(1, (100,) * 4, (100,) * 4, (64,) * 4, 0)
    table = PrefillTable("", "", 64, (0.01, 0.074, 0.138))
    layout = hybrid(units, staged(1, [range(3)]))

    cost = prefill_cost(layout, units, table)

    assert cost is not None
    assert (cost.step_ps, cost.base_ps) == (10**10, 10**9 * 3 // 8)
    assert cost.dense_ps == 10**9 * 7 // 8
    assert prefill_cost(even(units, 2), units, table) is None
    waiting = [Waiting(rank=base, first=0, tokens=20) for base in (4, 1, 2)]
    for of, shares in ((layout, [4, 0, 4]), (even(units, 2), [8, 0, 0])):
        share = PrefillShares(cast(Any, SimpleNamespace(units=units, layout=of)), table)
        assert share(waiting, 8) == shares


@pytest.mark.nightly
@pytest.mark.parametrize("planner", PLANNERS)
async def test_streams_go_on_in_their_attempts(model: Path, planner: Planner) -> None:
    """Greedy and drawn ones, through a SIGKILL, a lost device and a rank that leaves."""
    alone = await answers_of(model, {}, [])

    faults = ["kill", "lose_device", "leave"]
    elastic = {"spread_heads": True, "planner": planner}
    through = await answers_of(model, {"tp": 4}, faults, elastic=elastic)

    assert through == alone
