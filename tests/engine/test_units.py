"""Products of units, their forms, and what is proven of them at a start."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs.errors import KvrsError
from kvrs_engine.elastic.trees import Node, combine, cover
from kvrs_engine.engine.layers import proofs
from kvrs_engine.engine.layers.proofs import (
    Proofs,
    check_unit_products,
    is_exact,
    proven_heights,
    same_bytes,
    sample,
)
from kvrs_engine.engine.layers.tiles import TILE_ROWS, pair_sum
from kvrs_engine.engine.layers.units import (
    CANONICAL,
    TALL,
    ColumnUnits,
    Form,
    Mlp,
    RowUnits,
    gated_silu,
    product,
)
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models import forms
from kvrs_engine.engine.models.loading import load_decoder
from kvrs_engine.engine.models.probe import probe_digest
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.worker import Worker

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
HIDDEN, UNITS, WIDTH = 72, 5, 20


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp(units: int = UNITS, width: int = WIDTH) -> Mlp:
    matrix = noise(units * 2 * width, HIDDEN)
    return Mlp(
        ColumnUnits.of(matrix, [2 * width] * units, noise(units * 2 * width, seed=1)),
        gated_silu,
        RowUnits.of([noise(HIDDEN, width, seed=2 + at) for at in range(units)], noise(HIDDEN)),
    )


def whole(block: Mlp, rows: Tensor, form: Form = CANONICAL) -> Tensor:
    (total,) = block.sums(rows, form)
    return block.down.biased(total)


def test_same_bytes_tells_the_zeros_apart() -> None:
    """A comparison that takes -0.0 for 0.0 hides a zero that was added."""
    zero = torch.zeros(4)

    assert torch.equal(zero, -zero)
    assert not same_bytes(zero, -zero)
    assert same_bytes(noise(8, 8).t(), noise(8, 8).t().contiguous())


def test_a_block_is_the_tree_of_its_units() -> None:
    """The order of additions is that of the units' numbers, neighbours first, and the bias comes
    last.
    """
    block, rows = mlp(), noise(TILE_ROWS, HIDDEN)
    summands = [
        block.down.unit(block.inner(rows, unit, CANONICAL), unit, CANONICAL)
        for unit in range(UNITS)
    ]
    assert block.down.bias is not None

    assert same_bytes(whole(block, rows), pair_sum(torch.stack(summands, 1)) + block.down.bias)


@pytest.mark.parametrize("together", [False, True])
def test_every_form_has_the_canonical_bytes(together: bool) -> None:
    """Here as at every start of an engine: a form that has not is not used."""
    block, heights = mlp(), proven_heights([*mlp().up.weights, *mlp().down.weights])
    rows = noise(21 * TILE_ROWS, HIDDEN)

    assert heights == TALL
    assert same_bytes(whole(block, rows, Form(heights, together)), whole(block, rows))


def test_units_of_different_widths_are_the_sum_of_all_columns() -> None:
    """The last tile of an odd size has the rest."""
    whole, rows = noise(HIDDEN, 131), noise(32, 131)
    units = RowUnits.of([whole[:, :64], whole[:, 64:]], None)
    parts = [rows[:, :64], rows[:, 64:]]

    (result,) = units.by_unit(lambda unit: parts[unit], CANONICAL)

    assert units.stacked is None
    assert torch.allclose(result, rows @ whole.t(), rtol=1e-4, atol=1e-3)


def test_owners_of_any_units_make_the_same_bytes() -> None:
    """Each sums its largest subtrees; the order in which these arrive does not matter."""
    block, rows, form = mlp(), noise(48, HIDDEN), Form(TALL, together=False)
    assert block.down.bias is not None
    arrived: dict[Node, Tensor] = {}
    for owned in ([1, 4], [0, 2, 3]):
        down = RowUnits.of(
            [block.down.weights[at].t() for at in owned], None, places=owned, count=UNITS
        )
        own = [block.inner(rows, at, form) for at in owned]
        sums = down.by_unit(own.__getitem__, form)
        arrived |= dict(zip(cover(owned, UNITS), sums, strict=True))

    total = combine(arrived, UNITS, torch.add) + block.down.bias

    assert same_bytes(total, whole(block, rows))


def test_a_height_that_changes_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may take another kernel from some number of rows on."""
    weight = noise(WIDTH, HIDDEN).t()

    def by_height(rows: Tensor, weight: Tensor, heights: tuple[int, ...]) -> Tensor:
        return product(rows, weight, heights) + (1e-3 if heights[0] == 64 else 0)

    monkeypatch.setattr(proofs, "product", by_height)

    assert proven_heights([weight]) == (256, 128, 32, 16)


def test_a_form_of_a_whole_block_is_compared_byte_by_byte() -> None:
    """Also where only one count of rows differs."""

    def block(rows: Tensor, form: Form) -> Tensor:
        return rows + (1e-6 if form.together and rows.shape[0] == 3 * TILE_ROWS else 0)

    assert is_exact(block, Form(TALL, together=False), 8, CPU)
    assert not is_exact(block, Form(TALL, together=True), 8, CPU)


def test_what_was_proven_is_not_proven_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof is one of shapes; of another shape nothing is known."""
    known, block, calls = Proofs(), mlp(), 0
    weights = [*block.up.weights, *block.down.weights]
    known.check_units(weights)
    heights = known.heights(weights)
    assert known.holds("a block", lambda: False) is known.holds("a block", lambda: True) is False
    mm = torch.mm

    def counted(*given: Tensor, **more: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return mm(*given, **more)

    monkeypatch.setattr(torch, "mm", counted)
    known.check_units([weight.clone(memory_format=torch.preserve_format) for weight in weights])
    assert known.heights(weights) == heights == TALL
    assert calls == 0

    known.check_units([noise(WIDTH + 16, HIDDEN).t()])
    assert calls > 0


def test_a_model_of_known_shapes_is_not_proven_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same process: a draft may have shapes of the model. A block is another one with
    another activation.
    """
    config, weights = ModelConfig.from_directory(tiny_model), Weights(tiny_model)
    monkeypatch.setattr(forms, "PROVEN", Proofs())
    first = load_decoder(config, weights, 64, CPU)
    compared: list[Form] = []

    def counted(_: object, form: Form, *of: object) -> bool:
        compared.append(form)
        return True

    monkeypatch.setattr(forms, "is_exact", counted)
    monkeypatch.setattr(proofs, "proven_heights", None)
    assert load_decoder(config, weights, 64, CPU).forms == first.forms
    assert not compared

    others = [replace(each, mlp=replace(each.mlp, activation=torch.relu)) for each in first.layers]
    forms.choose_forms(others, first.head)
    assert compared == [first.forms.mlp]


@pytest.mark.parametrize("what", ["address", "width"])
def test_a_machine_that_computes_by_address_or_width_is_refused(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two owners of a unit have it at different places, and rows of different widths around it."""
    weight, mm = noise(WIDTH, HIDDEN).t(), torch.mm
    check_unit_products([weight])
    home = weight.data_ptr() % 128

    def by_place(rows: Tensor, weight: Tensor, **more: Tensor) -> Tensor:
        moved = {"address": weight.data_ptr() % 128 != home, "width": rows.stride(0) != HIDDEN}
        return mm(rows, weight, **more) + (1e-3 if moved[what] else 0)

    monkeypatch.setattr(torch, "mm", by_place)
    with pytest.raises(KvrsError, match=f"computes by the {what}"):
        check_unit_products([weight])


def test_samples_are_numbers_without_a_pattern() -> None:
    """Different orders of additions could give a regular sample the same sum."""
    values = sample(100, 200, CPU)

    assert len(set(values.flatten().tolist())) > 19_900
    assert abs(float(values.mean())) < 0.01
    assert -0.5 <= float(values.min()) < float(values.max()) < 0.5
    assert values.flatten()[:3].tolist() == sample(1, 3, CPU).flatten().tolist()


def test_a_probe_tells_other_results_apart(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines whose kernels add in other orders refuse each other's pages, whatever their
    names.
    """
    config = ModelConfig.from_directory(tiny_model)
    own = Worker(tiny_model, EngineSettings(pages=8)).fingerprint
    digest = probe_digest(config, 16, CPU)
    mm = torch.mm

    def backwards(rows: Tensor, weight: Tensor, **more: Tensor) -> Tensor:
        return mm(rows.flip(1).contiguous(), weight.flip(0).contiguous(), **more)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "mm", backwards)
        other = Worker(tiny_model, EngineSettings(pages=8)).fingerprint

    assert own != other
    assert digest == probe_digest(config, 16, CPU) != probe_digest(config, 128, CPU)
