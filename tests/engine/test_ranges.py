"""Parts of tensors are read by range, and a file whose header cannot be true is refused."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvrs.errors import ConfigError
from kvrs_engine.elastic.shares import Share
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.loading import load_decoder
from kvrs_engine.engine.models.unit_blocks import UnitBlocks, assemble
from kvrs_engine.engine.models.weights import Weights
from kvrs_testkit.examples import examples

pytestmark = pytest.mark.engine

ROWS, WIDTH = 12, 20
TYPES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@pytest.fixture(scope="module", params=TYPES, ids=str)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stored")
    matrix = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    tensors = {"before": torch.ones(3), "matrix": matrix.to(request.param)}
    save_file(tensors, directory / "model.safetensors")
    return directory


@examples(30)
@given(data=st.data())
def test_ranges_are_those_of_the_whole_tensor_and_no_byte_more_is_read(
    stored: Path, data: st.DataObject
) -> None:
    """Rows and columns, widened as the whole one is."""
    reader, whole = Weights(stored), Weights(stored).take("matrix", (ROWS, WIDTH))
    first, last = sorted(
        data.draw(st.lists(st.integers(0, ROWS), min_size=2, max_size=2, unique=True))
    )
    left, right = sorted(
        data.draw(st.lists(st.integers(0, WIDTH), min_size=2, max_size=2, unique=True))
    )
    rows, columns = torch.empty(last - first, WIDTH), torch.empty(ROWS, right - left)

    reader.rows("matrix", (ROWS, WIDTH), range(first, last), rows)
    reader.columns("matrix", (ROWS, WIDTH), range(left, right), columns)
    reader.close()

    assert same_bytes(rows, whole[first:last])
    assert same_bytes(columns, whole[:, left:right])
    size = TYPES[load_file(stored / "model.safetensors")["matrix"].dtype]
    assert reader.read_bytes == (rows.numel() + columns.numel()) * size


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 2070, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 140,
        "num_experts": 5,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
        "num_experts_per_tok": 2,
    },
}


@pytest.fixture(params=["tiny model", *EXPERTS])
def model(
    request: pytest.FixtureRequest, tiny_model: Path, random_model: Callable[..., Path]
) -> Path:
    if request.param == "tiny model":
        return tiny_model
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 300, "head_dim": 16}
    return random_model(request.param, **sizes, **EXPERTS[request.param])


def test_units_read_by_range_are_those_of_a_decoder_that_read_all(model: Path) -> None:
    """Blocks of every unit, put together, compute with the same numbers; the bytes that are read
    are those of the units.
    """
    config, reader = ModelConfig.from_directory(model), Weights(model)
    whole = load_decoder(config, Weights(model), 64, torch.device("cpu"))
    blocks, units = UnitBlocks(config, reader), config.units_of_ranks
    wanted = [unit for unit in units.all() if units.bytes_of(unit)]
    places, size = blocks.places(wanted)
    memory = torch.zeros(size, dtype=torch.uint8)
    read = {unit: blocks.block(unit, memory, place) for unit, place in places.items()}
    for unit, block in read.items():
        blocks.read(unit, reader, block)
        assert block.weight_bytes == units.bytes_of(unit)
    reader.close()

    share = Share.whole(config.grain, config.layers)
    ours = assemble(whole, share, config, read.__getitem__)

    assert reader.read_bytes == units.total_bytes
    for mine, theirs in zip(ours.layers, whole.layers, strict=True):
        assert same_bytes(mine.attention.qkv.matrix, theirs.attention.qkv.matrix)
        for one, other in (
            *zip(mine.mlp.up.weights, theirs.mlp.up.weights, strict=True),
            *zip(mine.attention.output.weights, theirs.attention.output.weights, strict=True),
            *zip(mine.mlp.down.weights, theirs.mlp.down.weights, strict=True),
        ):
            assert same_bytes(one, other)
    assert ours.head is not None
    assert whole.head is not None
    assert same_bytes(ours.head.matrix, whole.head.matrix)


def test_of_tensors_that_are_cut_into_units_nothing_stays(model: Path) -> None:
    """Without a collection of cycles, which processes put off while they load."""
    taken: dict[str, weakref.ref[Tensor]] = {}

    class Noted(Weights):
        def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
            tensor = super().take(name, shape)
            taken[name] = weakref.ref(tensor)
            return tensor

    config = ModelConfig.from_directory(model)
    gc.disable()
    try:
        decoder = load_decoder(config, Noted(model), 64, torch.device("cpu"))
        left = {name for name, tensor in taken.items() if tensor() is not None}
    finally:
        gc.enable()

    assert decoder.head is not None
    assert not {name for name in left if "proj" in name or "lm_head" in name}


def _shift(header: dict[str, Any], start: int, stop: int) -> None:
    header["matrix"]["data_offsets"] = [start, stop]


SIZE = ROWS * WIDTH * 4
BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "overlap": lambda header: _shift(header, 4, 4 + SIZE),
    "too large": lambda header: _shift(header, 1 << 40, (1 << 40) + SIZE),
    "not its shape": lambda header: header["matrix"].update(shape=[ROWS, 3]),
    "another type": lambda header: header["matrix"].update(dtype="I32"),
    "no tensor": lambda header: header.pop("before") and header.pop("matrix"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_header_that_cannot_be_true_is_refused(tmp_path: Path, name: str) -> None:
    """The file is named, also where it has become another one since its tensors were listed."""
    path = tmp_path / "model.safetensors"
    save_file({"before": torch.ones(3), "matrix": torch.ones(ROWS, WIDTH)}, path)
    reader = Weights(tmp_path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    BROKEN[name](header)
    body = json.dumps(header).encode()
    path.unlink()
    path.write_bytes(len(body).to_bytes(8, "little") + body + whole[8 + length :])

    with pytest.raises(ConfigError) as refused:
        reader.rows("matrix", (ROWS, WIDTH), range(1), torch.empty(1, WIDTH))
    assert str(path) in str(refused.value)
