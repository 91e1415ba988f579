"""Parts of tensors are read by range, and a file whose header cannot be true is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvrs.errors import ConfigError
from kvrs_engine.elastic.shares import Share
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.loading import load_decoder
from kvrs_engine.engine.models.ranges import RangeReader, read_header
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
    weights = Weights(stored)
    reader, whole = RangeReader(weights), weights.take("matrix", (ROWS, WIDTH))
    first, last = sorted(data.draw(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS))))
    left, right = sorted(data.draw(st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH))))
    rows, columns = torch.empty(last - first, WIDTH), torch.empty(ROWS, right - left)

    reader.rows("matrix", (ROWS, WIDTH), range(first, last), rows)
    reader.columns("matrix", (ROWS, WIDTH), range(left, right), columns)
    reader.close()

    assert same_bytes(rows, whole[first:last])
    assert same_bytes(columns, whole[:, left:right])
    (size,) = {TYPES[kind] for kind in TYPES if str(kind) in _kind_of(stored)}
    assert reader.read_bytes == (rows.numel() + columns.numel()) * size


def _kind_of(stored: Path) -> str:
    kind = read_header(stored / "model.safetensors")["matrix"].kind
    return {"F32": "torch.float32", "BF16": "torch.bfloat16", "F16": "torch.float16"}[kind]


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
    config, weights = ModelConfig.from_directory(model), Weights(model)
    whole = load_decoder(config, weights, 64, torch.device("cpu"))
    blocks, reader, units = UnitBlocks(config, weights), RangeReader(weights), config.units_of_ranks
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


def _shift(header: dict[str, Any], start: int, stop: int) -> None:
    header["matrix"]["data_offsets"] = [start, stop]


SIZE = ROWS * WIDTH * 4
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "overlap": (lambda header: _shift(header, 4, 4 + SIZE), "lie one over the other"),
    "negative": (lambda header: _shift(header, -4, SIZE - 4), "entry is broken"),
    "too large": (lambda header: _shift(header, 1 << 40, (1 << 40) + SIZE), "allowed: within"),
    "backwards": (lambda header: _shift(header, 12 + SIZE, 12), "allowed: within"),
    "not its shape": (lambda header: header["matrix"].update(shape=[ROWS, 3]), "for shape"),
    "a text": (lambda header: header["matrix"].update(data_offsets="no"), "entry is broken"),
    "no kind": (lambda header: header["matrix"].update(dtype="F31"), "entry is broken"),
    "no entry": (lambda header: header.update(matrix=3), "entry is broken"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_header_that_cannot_be_true_is_refused(tmp_path: Path, name: str) -> None:
    """Naming the file and the tensor, before anything is read."""
    change, message = BROKEN[name]
    path = tmp_path / "model.safetensors"
    save_file({"before": torch.ones(3), "matrix": torch.ones(ROWS, WIDTH)}, path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    body = json.dumps(header).encode()
    path.write_bytes(len(body).to_bytes(8, "little") + body + whole[8 + length :])

    with pytest.raises(ConfigError, match=message) as refused:
        read_header(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the header is no JSON"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "a header of 1152921504606846976 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "no object"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "no JSON"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """Whatever length it claims, no more than the file has is read."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        read_header(path)


def test_a_file_that_has_become_shorter_is_named(stored: Path, tmp_path: Path) -> None:
    """Its header was true when it was read."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((stored / "model.safetensors").read_bytes())
    reader = RangeReader(Weights(tmp_path))
    into = torch.empty(1, WIDTH)
    reader.rows("matrix", (ROWS, WIDTH), range(1), into)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)

    with pytest.raises(ConfigError, match="ends before byte"):
        reader.rows("matrix", (ROWS, WIDTH), range(ROWS - 1, ROWS), into)
    with pytest.raises(ConfigError, match="ends before byte"):
        reader.columns("matrix", (ROWS, WIDTH), range(1), torch.empty(ROWS, 1))
    reader.close()
