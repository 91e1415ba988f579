"""Rows of two engines mean the same only where everything that decides it is equal, without vLLM:
with stand-ins for what is imported of it.
"""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvrs.engines import fingerprint
from kvrs.errors import KvrsError


class FileMapper:
    """The stand-in for vLLM's own, which names its fields."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def from_offloading_spec(
        cls, root: str, spec: Any, chunks: int, parallel_agnostic: bool
    ) -> "FileMapper":
        tp = 1 if parallel_agnostic else spec.tp
        named = {"model_name": spec.model, "dtype": spec.dtype, "tp_size": tp}
        return cls(named | {"blocks_per_file": chunks})

    def get_run_config(self) -> dict[str, Any]:
        return dict(self._fields)


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    platform = SimpleNamespace(is_cpu=lambda: True)
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {"get_none_hash_seed": lambda: "seed"},
        "vllm.v1.kv_offload": {},
        "vllm.v1.kv_offload.file_mapper": {"FileMapper": FileMapper},
    }
    for name, members in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvrs.vllm.space", raising=False)
    # The server starts behind all that the test writes.
    monkeypatch.setattr(fingerprint, "STARTED_NS", time.time_ns() + 10**12)
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    return importlib.import_module("kvrs.vllm.space")


class Engine:
    """Configuration and spec of a vLLM whose rows can be shared."""

    def __init__(self, model: Path) -> None:
        self.spec = SimpleNamespace(
            model=str(model),
            dtype="bfloat16",
            tp=1,
            blocks_per_chunk=1,
            config=SimpleNamespace(kv_cache_layout="LBHNC", canonical_layout=False),
        )
        self.config = SimpleNamespace(
            weight_transfer_config=None,
            lora_config=None,
            speculative_config=None,
            load_config=SimpleNamespace(load_format="auto", download_dir=None),
            parallel_config=SimpleNamespace(
                world_size=1,
                nnodes_within_dp=1,
                distributed_executor_backend="mp",
                worker_extension_cls="",
            ),
            attention_config="FLASH_ATTN",
            cache_config=SimpleNamespace(
                prefix_caching_hash_algo="sha256",
                calculate_kv_scales=False,
                cache_dtype="auto",
                mamba_ssm_cache_dtype="auto",
            ),
            model_config=SimpleNamespace(
                revision=None,
                dtype="bfloat16",
                quantization=None,
                hf_overrides={},
                hf_config=SimpleNamespace(to_json_string=lambda: "{}"),
                max_model_len=4096,
                model_impl="auto",
                disable_sliding_window=False,
                is_hybrid=False,
                multimodal_config=None,
            ),
        )

    def fields(self, space: ModuleType) -> dict[str, Any]:
        space.remember(self.config)
        found: dict[str, Any] = space.fields_of(self.spec)
        return found


def written(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def test_the_same_model_in_two_directories_is_one_space(space: ModuleType, tmp_path: Path) -> None:
    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    assert Engine(first).fields(space) == Engine(second).fields(space)


def test_other_weights_are_another_space(space: ModuleType, tmp_path: Path) -> None:
    first, second = written(tmp_path / "a"), written(tmp_path / "b", b"Weights")
    assert Engine(first).fields(space) != Engine(second).fields(space)


def drafts(engine: Engine, method: str) -> SimpleNamespace:
    model = SimpleNamespace(model=engine.spec.model, revision=None)
    return SimpleNamespace(method=method, draft_model_config=model)


def test_all_bytes_of_weights_count(space: ModuleType, tmp_path: Path) -> None:
    """A version may differ in one number."""
    weights = bytearray(1 << 20)
    first = written(tmp_path / "a", bytes(weights))
    weights[500_001] = 1
    second = written(tmp_path / "b", bytes(weights))
    assert Engine(first).fields(space) != Engine(second).fields(space)


def test_weights_that_change_while_the_server_runs_are_not_shared(
    space: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be others than those that its workers have read."""
    monkeypatch.setattr(fingerprint, "STARTED_NS", time.time_ns() - 10**9)
    with pytest.raises(KvrsError, match="changed since this server started"):
        Engine(written(tmp_path / "model")).fields(space)


def test_files_of_a_hub_s_cache_are_known_by_its_digests(space: ModuleType, tmp_path: Path) -> None:
    """Also where this server has just fetched them."""
    found = []
    for name in ("a", "b", "other"):
        model, blobs = tmp_path / name / "snapshots" / "1", tmp_path / name / "blobs"
        model.mkdir(parents=True)
        blobs.mkdir()
        for file in ("config.json", "model.safetensors"):
            blob = "other" if name == "other" and file != "config.json" else file[:5] * 8
            (blobs / blob).write_bytes(b"")
            (model / file).symlink_to(blobs / blob)
        found.append(Engine(model).fields(space))
    assert found[0] == found[1] != found[2]


def test_a_model_s_name_is_its_snapshot_in_the_hub_s_cache(
    space: ModuleType, tmp_path: Path
) -> None:
    """The same name may be another version on another server."""
    found = []
    for version in ("1", "2"):
        model = tmp_path / version / "models--kvrs--tiny"
        snapshot = model / "snapshots" / version
        snapshot.mkdir(parents=True)
        (model / "blobs").mkdir()
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(version)
        for file in ("config.json", "model.safetensors"):
            (model / "blobs" / f"{file} {version}").write_bytes(b"")
            (snapshot / file).symlink_to(model / "blobs" / f"{file} {version}")
        engine = Engine(Path("kvrs/tiny"))
        engine.config.load_config.download_dir = str(tmp_path / version)
        found.append(engine.fields(space))
    assert found[0] != found[1]
    assert found[0]["weights"] != found[1]["weights"]


def test_drafts_without_a_model_are_no_part_of_the_space(space: ModuleType, tmp_path: Path) -> None:
    model = written(tmp_path / "model")
    usual, other = Engine(model), Engine(model)
    other.config.speculative_config = drafts(other, "ngram")
    assert usual.fields(space) == other.fields(space)


def test_weights_of_drafts_are_a_part_of_the_space(space: ModuleType, tmp_path: Path) -> None:
    model, found = written(tmp_path / "model"), []
    for name in ("a", "b"):
        engine = Engine(model)
        engine.config.speculative_config = drafts(engine, "eagle")
        path = written(tmp_path / name, name.encode())
        engine.config.speculative_config.draft_model_config.model = str(path)
        found.append(engine.fields(space))
    assert found[0] != found[1]


DIFFER: dict[str, Callable[[Engine], None]] = {
    "dtype": lambda engine: setattr(engine.spec, "dtype", "fp8"),
    "parallelism": lambda engine: setattr(engine.spec, "tp", 2),
    "blocks per chunk": lambda engine: setattr(engine.spec, "blocks_per_chunk", 8),
    "layout": lambda engine: setattr(engine.spec.config, "kv_cache_layout", "BLHNC"),
    "dtype of the model": lambda engine: setattr(engine.config.model_config, "dtype", "half"),
    "quantisation": lambda engine: setattr(engine.config.model_config, "quantization", "awq"),
    "overrides": lambda engine: engine.config.model_config.hf_overrides.update(rope=2),
    "attention": lambda engine: setattr(engine.config, "attention_config", "FLASHINFER"),
    "longest prompt": lambda engine: setattr(engine.config.model_config, "max_model_len", 131072),
    "configuration": lambda engine: setattr(
        engine.config.model_config.hf_config, "to_json_string", lambda: "{'rope': 2}"
    ),
    "state of Mamba": lambda engine: setattr(
        engine.config.cache_config, "mamba_ssm_cache_dtype", "half"
    ),
    "adapters": lambda engine: setattr(engine.config, "lora_config", "LoRAConfig(rank=8)"),
    "revision of drafts": lambda engine: setattr(
        engine.config, "speculative_config", drafts(engine, "eagle")
    ),
    "type of the KV cache": lambda engine: setattr(
        engine.config.cache_config, "cache_dtype", "fp8_e5m2"
    ),
    "layers without quantised KV": lambda engine: setattr(
        engine.config.cache_config, "kv_cache_dtype_skip_layers", ["3"]
    ),
    "implementation": lambda engine: setattr(
        engine.config.model_config, "model_impl", "transformers"
    ),
    "sliding window": lambda engine: setattr(
        engine.config.model_config, "disable_sliding_window", True
    ),
    "images": lambda engine: setattr(
        engine.config.model_config,
        "multimodal_config",
        SimpleNamespace(mm_processor_kwargs={"max_pixels": 1024}),
    ),
    "hash": lambda engine: setattr(
        engine.config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"
    ),
}


@pytest.mark.parametrize("what", DIFFER)
def test_what_decides_the_bytes_of_a_row_is_a_part_of_its_space(
    space: ModuleType, tmp_path: Path, what: str
) -> None:
    model = written(tmp_path / "model")
    usual, other = Engine(model), Engine(model)
    DIFFER[what](other)
    assert usual.fields(space) != other.fields(space)


def test_the_version_of_vllm_is_a_part_of_the_space(
    space: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written(tmp_path / "model")
    before = Engine(model).fields(space)
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.33.0")
    assert Engine(model).fields(space) != before


def test_only_the_canonical_layout_is_the_same_for_any_number_of_workers(
    space: ModuleType, tmp_path: Path
) -> None:
    model = written(tmp_path / "model")
    one, two = Engine(model), Engine(model)
    two.spec.tp = 2
    for engine in (one, two):
        engine.spec.config.canonical_layout = True
    assert one.fields(space) == two.fields(space)


def test_the_seed_of_hashes_is_a_part_of_the_space(
    space: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written(tmp_path / "model")
    before = Engine(model).fields(space)
    monkeypatch.setattr(space, "get_none_hash_seed", lambda: "another")
    assert Engine(model).fields(space) != before


UNKNOWN: dict[str, Callable[[Engine], None]] = {
    "weight_transfer": lambda engine: setattr(engine.config, "weight_transfer_config", {}),
    "worker_extension_cls": lambda engine: setattr(
        engine.config.parallel_config, "worker_extension_cls", "rl.Worker"
    ),
    "hybrid": lambda engine: setattr(engine.config.model_config, "is_hybrid", True),
    "load_format dummy": lambda engine: setattr(engine.config.load_config, "load_format", "dummy"),
    "calculate_kv_scales": lambda engine: setattr(
        engine.config.cache_config, "calculate_kv_scales", True
    ),
    "several nodes": lambda engine: setattr(engine.config.parallel_config, "nnodes_within_dp", 2),
    "executor mp or uni": lambda engine: vars(engine.config.parallel_config).update(
        world_size=2, distributed_executor_backend="ray"
    ),
    "xxhash": lambda engine: setattr(
        engine.config.cache_config, "prefix_caching_hash_algo", "xxhash"
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_known_shares_nothing_and_is_named(
    space: ModuleType, tmp_path: Path, what: str
) -> None:
    engine = Engine(written(tmp_path / "model"))
    UNKNOWN[what](engine)
    with pytest.raises(KvrsError, match=what):
        engine.fields(space)


def test_a_server_whose_weights_may_be_changed_shares_nothing(
    space: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with pytest.raises(KvrsError, match="VLLM_SERVER_DEV_MODE"):
        Engine(written(tmp_path / "model")).fields(space)


def test_a_model_without_weights_shares_nothing(space: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(KvrsError, match=r"no \*\.safetensors"):
        Engine(tmp_path).fields(space)
