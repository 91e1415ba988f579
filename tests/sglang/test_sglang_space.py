"""Pages of two servers mean the same only where everything that decides it is equal, and servers
whose pages cannot be known share nothing.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrs.engines import fingerprint
from kvrs.errors import KvrsError
from kvrs.sglang import space
from kvrs_testkit.sglang_arguments import server_arguments


@pytest.fixture(autouse=True)
def _started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts behind all that the test writes."""
    monkeypatch.setattr(fingerprint, "STARTED_NS", time.time_ns() + 10**12)


class MHATokenToKVPoolHost(SimpleNamespace):
    """The stand-in for HiCache's host memory of a plain model."""


class Server:
    """Arguments, storage and host memory of an SGLang whose pages can be shared."""

    def __init__(self, model: Path) -> None:
        self.version = "0.5.23"
        self.arguments = server_arguments(model)
        self.storage = SimpleNamespace(
            tp_rank=0,
            tp_size=2,
            pp_rank=0,
            pp_size=1,
            is_mla_model=False,
            attn_cp_size=1,
            dcp_size=1,
            should_split_heads=False,
        )
        self.pool: Any = MHATokenToKVPoolHost(
            layout="layer_first",
            page_size=64,
            dtype="torch.bfloat16",
            layer_num=32,
            start_layer=0,
            end_layer=32,
            head_num=8,
            head_dim=128,
        )

    def fields(self) -> dict[str, Any]:
        return space.fields_of(self.version, self.arguments, self.storage, self.pool)


def written(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def test_the_same_model_in_two_directories_is_one_space(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    assert Server(first).fields() == Server(second).fields()


def test_other_weights_are_another_space(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a"), written(tmp_path / "b", b"Weights")
    assert Server(first).fields() != Server(second).fields()


def test_weights_that_change_while_the_server_runs_are_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be others than those that it has read."""
    monkeypatch.setattr(fingerprint, "STARTED_NS", time.time_ns() - 10**9)
    with pytest.raises(KvrsError, match="changed since this server started"):
        Server(written(tmp_path / "model")).fields()


def setting(part: str, name: str, value: object) -> Callable[[Server], None]:
    return lambda server: setattr(getattr(server, part), name, value)


DIFFER: dict[str, Callable[[Server], None]] = {
    "version": lambda server: setattr(server, "version", "0.5.24"),
    "dtype of the model": setting("arguments", "dtype", "half"),
    "type of the KV cache": setting("arguments", "kv_cache_dtype", "fp8_e5m2"),
    "quantisation": setting("arguments", "quantization", "awq"),
    "implementation": setting("arguments", "model_impl", "transformers"),
    "longest prompt": setting("arguments", "context_length", 131072),
    "overrides": setting("arguments", "json_model_override_args", '{"rope": 2}'),
    "device": setting("arguments", "device", "cpu"),
    "dtype of pages": setting("pool", "dtype", "torch.float8_e4m3fn"),
    "tokens of a page": setting("pool", "page_size", 16),
    "layout": setting("pool", "layout", "page_first_direct"),
    "layers": setting("pool", "end_layer", 16),
    "heads": setting("pool", "head_num", 4),
    "TP rank": setting("storage", "tp_rank", 1),
    "TP size": setting("storage", "tp_size", 4),
    "PP rank": setting("storage", "pp_rank", 1),
    "PP size": setting("storage", "pp_size", 2),
}


@pytest.mark.parametrize("what", DIFFER)
def test_what_decides_the_bytes_of_a_page_is_a_part_of_its_space(tmp_path: Path, what: str) -> None:
    model = written(tmp_path / "model")
    usual, other = Server(model), Server(model)
    DIFFER[what](other)
    assert usual.fields() != other.fields()


class MLATokenToKVPoolHost(SimpleNamespace):
    """The stand-in for another kind of host memory."""


REFUSED: dict[str, Callable[[Server], None]] = {
    "MLA": setting("storage", "is_mla_model", True),
    "MLATokenToKVPoolHost": lambda server: setattr(server, "pool", MLATokenToKVPoolHost()),
    "LoRA": setting("arguments", "enable_lora", True),
    "names of LoRA": setting("arguments", "lora_paths", ["one=/one"]),
    "speculative_algorithm EAGLE": setting("arguments", "speculative_algorithm", "EAGLE"),
    "load_format dummy": setting("arguments", "load_format", "dummy"),
    "quantization_param_path": setting("arguments", "quantization_param_path", "/scales.json"),
    "enable_memory_saver": setting("arguments", "enable_memory_saver", True),
    "weight_cache_mode": setting("arguments", "weight_cache_mode", "client"),
    "on 2 nodes": setting("arguments", "nnodes", 2),
    "no context parallelism": setting("storage", "attn_cp_size", 2),
    "context parallelism, no": setting("storage", "dcp_size", 2),
    "no split": setting("storage", "should_split_heads", True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_pages_that_cannot_be_known_are_not_shared(tmp_path: Path, reason: str) -> None:
    server = Server(written(tmp_path / "model"))
    REFUSED[reason](server)
    with pytest.raises(KvrsError, match=reason):
        server.fields()
