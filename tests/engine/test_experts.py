"""Rows find the same experts, and get the same bytes from them, whatever stands beside them."""

import json
import math
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs_engine.elastic.shares import Share
from kvrs_engine.engine.layers.exchange import ALONE
from kvrs_engine.engine.layers.experts import Experts, Router, Routing
from kvrs_engine.engine.layers.proofs import Proofs, same_bytes
from kvrs_engine.engine.layers.tiles import TILE_ROWS, padded_rows, pair_sum
from kvrs_engine.engine.layers.units import (
    CANONICAL,
    TALL,
    ColumnUnits,
    Form,
    Mlp,
    RowUnits,
    gated_silu,
)
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models import forms
from kvrs_engine.engine.models.loading import load_decoder
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.examples import examples
from kvrs_testkit.random_experts import ExpertsModel, write_experts_model
from kvrs_testkit.ranks_in_threads import ThreadRanks, random_layout

pytestmark = pytest.mark.engine

HIDDEN, WIDTH, COUNT, PARTS = 48, 20, 6, 2


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def router(chosen: int = 3, *, renormalise: bool = True) -> Router:
    return Router(noise(COUNT, HIDDEN, seed=1).t(), chosen, renormalise)


def units() -> Mlp:
    """Units of all experts, each of which has parts."""
    matrix = noise(COUNT * PARTS * 2 * WIDTH, HIDDEN, seed=2)
    down = [noise(HIDDEN, WIDTH, seed=3 + at) for at in range(COUNT * PARTS)]
    columns = ColumnUnits.of(matrix, [2 * WIDTH] * COUNT * PARTS)
    return Mlp(columns, gated_silu, RowUnits.of(down, None))


def padded(rows: Tensor) -> Tensor:
    """To whole tiles, with the first row, as batches are."""
    more = padded_rows(len(rows)) - len(rows)
    return torch.cat((rows, rows[:1].expand(more, -1)))


def total(rows: Tensor, form: Form = CANONICAL, chosen: int = 3) -> Tensor:
    block = Experts(router(chosen), PARTS)
    return block.total(units(), padded(rows), len(rows), 0, form, ALONE)[: len(rows)]


def routed(rows: Tensor, by: Router) -> Routing:
    found = by(padded(rows), CANONICAL)
    return Routing(found.experts[: len(rows)], found.weights[: len(rows)])


def test_a_row_takes_its_most_probable_experts_in_ascending_order() -> None:
    """Weights are those of a softmax over all experts, or divided by their sum."""
    rows = noise(40, HIDDEN)
    expected = torch.softmax(rows.double() @ noise(COUNT, HIDDEN, seed=1).double().t(), 1)

    plain, whole = routed(rows, router(renormalise=False)), routed(rows, router())

    best = expected.topk(3).indices.sort(1).values
    assert plain.experts.equal(best)
    assert whole.experts.equal(best)
    assert torch.allclose(plain.weights.double(), expected.gather(1, best), atol=1e-6)
    assert torch.allclose(whole.weights.sum(1), torch.ones(40), atol=1e-6)
    assert torch.allclose(whole.weights, plain.weights / plain.weights.sum(1, keepdim=True))


def test_of_equally_probable_experts_the_first_are_taken() -> None:
    """An order that is not stable is another one on another machine, or in another batch."""
    weight = noise(1, HIDDEN).expand(64, HIDDEN).contiguous()
    weight[5] = noise(1, HIDDEN, seed=9) * 50
    rows = noise(64, HIDDEN, seed=4)
    is_taken = rows @ weight[5] > rows @ weight[0]

    found = routed(rows, Router(weight.t(), 4, renormalise=True)).experts

    assert set(is_taken.tolist()) == {True, False}
    for row, taken in zip(found.tolist(), is_taken.tolist(), strict=True):
        assert row == ([0, 1, 2, 5] if taken else [0, 1, 2, 3])


def test_rows_that_are_no_numbers_have_experts_all_the_same() -> None:
    """A weight that overflows spoils results, and nothing else: no index is out of range."""
    rows = noise(20, HIDDEN)
    rows[3], rows[5, 7] = torch.nan, torch.inf
    weight = noise(COUNT, HIDDEN, seed=1)
    weight[2, 0] = torch.nan

    one = routed(rows, router()).experts
    all_of_them = routed(rows, Router(weight.t(), 3, renormalise=True)).experts

    for row in (*one.tolist(), *all_of_them.tolist()):
        assert row == sorted(set(row))
        assert set(row) <= set(range(COUNT))
    assert one[[0, 1, 2, 4, *range(6, 20)]].equal(
        routed(noise(20, HIDDEN), router()).experts[[0, 1, 2, 4, *range(6, 20)]]
    )


def test_a_row_is_the_weighted_sum_of_its_experts_by_their_numbers() -> None:
    """Parts of an expert are added as a tree, then weighted, then experts are: this is the order
    that ranks keep to.
    """
    rows, mlp = noise(1, HIDDEN, seed=8), units()
    found, tile = routed(rows, router()), padded(rows)
    weighted = []
    for expert, weight in zip(found.experts[0].tolist(), found.weights[0], strict=True):
        places = range(expert * PARTS, (expert + 1) * PARTS)
        inner = [mlp.down.unit(mlp.inner(tile, at, CANONICAL), at, CANONICAL) for at in places]
        weighted.append(pair_sum(torch.stack(inner, 1))[:1] * weight)

    assert same_bytes(total(rows), pair_sum(torch.stack(weighted, 1)))


def test_experts_compute_what_their_formula_says() -> None:
    """In double precision, by the definition."""
    rows, mlp = noise(50, HIDDEN, seed=6), units()
    found = routed(rows, router())
    expected = torch.zeros(50, HIDDEN, dtype=torch.double)
    for at, row in enumerate(rows.double()):
        for expert, weight in zip(found.experts[at].tolist(), found.weights[at], strict=True):
            for unit in range(expert * PARTS, (expert + 1) * PARTS):
                inner = gated_silu((row @ mlp.up.weights[unit].double())[None])
                expected[at] += float(weight) * (inner @ mlp.down.weights[unit].double())[0]

    assert torch.allclose(total(rows).double(), expected, rtol=1e-4, atol=1e-3)


@examples(60)
@given(data=st.data(), chosen=st.integers(1, COUNT), tall=st.booleans())
def test_a_row_has_the_bytes_that_it_has_alone(
    data: st.DataObject, chosen: int, tall: bool
) -> None:
    """In batches of any rows in any order, also of equal ones, which fill an expert's tiles."""
    every = noise(90, HIDDEN, seed=5)
    picked = data.draw(st.lists(st.integers(0, 89), min_size=1, max_size=300))
    form = Form(TALL, together=False) if tall else CANONICAL

    together = total(every[picked], form, chosen)

    for at in {0, len(picked) // 2, len(picked) - 1}:
        assert same_bytes(
            together[at : at + 1], total(every[picked[at] : picked[at] + 1], chosen=chosen)
        )


def test_rows_of_padding_are_zeros_and_are_computed_by_no_expert() -> None:
    """They repeat a row, whose experts would have tiles of them."""
    rows = noise(17, HIDDEN)
    block = Experts(router(), PARTS)

    found = block.total(units(), padded(rows), 17, 0, CANONICAL, ALONE)

    assert not found[17:].any()
    assert block.tiles.computed == tiles_of(routed(rows, router()).experts) * PARTS


def tiles_of(experts: Tensor) -> int:
    return sum(math.ceil(rows / TILE_ROWS) for rows in torch.bincount(experts.flatten()).tolist())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_only_experts_that_were_chosen_are_computed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of a model: as many tiles as the rows of its experts fill, and no more."""
    write_experts_model(tmp_path / "model", ExpertsModel.tiny(family, experts=16, skew=0.5), 0)
    worker = Worker(tmp_path / "model", EngineSettings(pages=256))
    choose, ids = random.Random(3), range(worker.vocab_size)
    routings: list[Tensor] = []
    route = Router.__call__

    def noted(self: Router, rows: Tensor, form: Form) -> Routing:
        found = route(self, rows, form)
        routings.append(found.experts)
        return found

    monkeypatch.setattr(Router, "__call__", noted)
    expected = 0
    for sizes in ([1], [1] * 12, [40, 1, 7], [130]):
        chunks = [
            Chunk(choose.choices(ids, k=size), 0, range(at * 16, (at + 1) * 16), logits=0)
            for at, size in enumerate(sizes)
        ]
        routings.clear()
        worker.execute(chunks)
        expected += sum(tiles_of(experts[: sum(sizes)]) for experts in routings)

    blocks = [layer.experts for layer in worker.model.layers if layer.experts is not None]
    assert sum(block.tiles.computed for block in blocks) == expected


def test_another_order_of_experts_would_be_seen() -> None:
    """The comparison of bytes is one: added by their weights they are other bytes."""
    rows, mlp = noise(64, HIDDEN, seed=11), units()
    found = routed(rows, router())
    by_weight = found.weights.argsort(1, descending=True)
    slots = torch.empty(3, 64, HIDDEN)
    Experts(router(), PARTS)._fill(slots, mlp, rows, found.experts, 0, CANONICAL, ALONE)
    weighted = (slots * found.weights.t().unsqueeze(-1)).transpose(0, 1)
    order = by_weight.unsqueeze(-1).expand(-1, -1, HIDDEN)

    assert same_bytes(pair_sum(weighted), total(rows))
    assert not same_bytes(pair_sum(weighted.gather(1, order)), total(rows))


def test_a_rank_without_experts_proves_its_router_all_the_same(
    tiny_experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It routes as the others do, and refuses a machine on which it would route otherwise."""
    config, weights = ModelConfig.from_directory(tiny_experts), Weights(tiny_experts)
    nothing = Share.nothing(range(config.layers), is_first=False, is_last=False)
    mm = torch.mm

    def by_height(rows: Tensor, weight: Tensor, **more: Tensor) -> Tensor:
        found = mm(rows, weight, **more)
        return found.add_(1e-3) if len(rows) == 64 else found

    monkeypatch.setattr(forms, "PROVEN", Proofs())  # Of this machine, not of the real one.
    monkeypatch.setattr(torch, "mm", by_height)
    decoder = load_decoder(config, weights, 64, torch.device("cpu"), nothing)

    assert decoder.forms.experts.heights == (256, 128, 32, 16)


def test_experts_that_are_not_here_leave_their_slots_alone() -> None:
    """Another rank writes those."""
    rows, mlp, found = noise(32, HIDDEN), units(), routed(noise(32, HIDDEN), router())
    places = [place for place in range(COUNT * PARTS) if place // PARTS in (1, 4)]
    own = replace(
        mlp,
        up=ColumnUnits.apart([mlp.up.weights[at].t() for at in places], []),
        down=RowUnits.of(
            [mlp.down.weights[at].t() for at in places], None, places=places, count=COUNT * PARTS
        ),
    )
    whole, part = torch.full((3, 32, HIDDEN), -7.0), torch.full((3, 32, HIDDEN), -7.0)

    Experts(router(), PARTS)._fill(whole, mlp, rows, found.experts, 0, CANONICAL, ALONE)
    Experts(router(), PARTS)._fill(part, own, rows, found.experts, 0, CANONICAL, ALONE)

    is_own = torch.isin(found.experts, torch.tensor([1, 4])).t()
    assert same_bytes(part[is_own], whole[is_own])
    assert bool((part[~is_own] == -7.0).all())


def test_equal_rows_of_a_router_choose_alike_on_any_ranks(tmp_path: Path) -> None:
    """Two experts of each layer are as probable as each other for every row; with another expert
    taken for the first one other bytes would come.
    """
    write_experts_model(tmp_path, ExpertsModel.tiny("mixtral"), seed=5)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, rows in tensors.items():
        if name.endswith("block_sparse_moe.gate.weight"):
            rows[:, -1] = 0.0
            rows[5] = rows[2] = 3 * rows[2]
    save_file(tensors, path)
    settings, choose = EngineSettings(pages=16), random.Random(2)
    config = ModelConfig.from_directory(tmp_path)
    chunk = Chunk(choose.choices(range(config.vocab), k=120), 0, range(8), logits=120)
    expected = Worker(tmp_path, settings).execute([chunk])

    for _ in range(4):
        layout = random_layout(config.grain, config.layers, choose)
        ranks = ThreadRanks(tmp_path, settings, layout)
        assert same_bytes(ranks.execute([chunk]), expected)
        # Rows take both, or the first of them.
        counts = ranks.memory.tiles.sum(0)
        assert counts[2] > counts[5] > 0
        ranks.close()


def test_a_row_takes_the_cpu_time_of_the_experts_that_it_chooses(tmp_path: Path) -> None:
    """Two of eight, beside all eight of the same weights: by time of this process, in turns. Where
    all were computed and then left out, both would take as long.
    """
    two, eight = tmp_path / "two", tmp_path / "eight"
    model = ExpertsModel("mixtral", 2, 256, 8, 4, 32, 8, 2, 2048, 0.0)
    write_experts_model(two, model, seed=1)
    shutil.copytree(two, eight)
    config = json.loads((eight / "config.json").read_text())
    (eight / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 8}))
    workers = [Worker(each, EngineSettings(pages=16)) for each in (two, eight)]
    chunk = Chunk([(7 * at * at + 3) % 500 for at in range(240)], 0, range(16), logits=1)
    took_s: list[list[float]] = [[], []]

    for _ in range(6):
        for worker, own_s in zip(workers, took_s, strict=True):
            began_s = time.process_time()
            worker.execute([chunk])
            own_s.append(time.process_time() - began_s)

    few_s, all_s = (sum(own_s[1:]) for own_s in took_s)  # Without the first batch of each.
    assert few_s < 0.6 * all_s
