"""The namespace of an engine's rows. Two engines share rows only if all fields of the namespace are
equal; an engine with an unknown field shares nothing.
"""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvrs.engines import proof
from kvrs.engines.fingerprint import weights_of
from kvrs.errors import KvrsError

# Version of what the bytes of a row mean; engines with different versions share no rows.
FORMAT = 1
# Settings of vLLM's cache that change the bytes of a row but not its size.
_CACHE = (
    *("cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode"),
    *("kv_cache_dtype_skip_layers", "block_size"),
)

# Configurations that vLLM has shown to kvrs in this process; the engine's own is the last.
_configs: list[Any] = []


def remember(vllm_config: Any) -> None:
    _configs.append(vllm_config)


def served_name() -> str:
    """Return the first `--served-model-name`, or without one the model's name."""
    return str(_configs[-1].model_config.served_model_name)


def fields_of(spec: Any) -> dict[str, Any]:
    """Return the fields of the namespace of this engine's rows. Raises KvrsError: what the rows
    mean is unknown, or may change.
    """
    if not _configs:
        raise KvrsError("kv_connector: allowed: KvrsOffloading, in kvrs.vllm.offloading")
    config = _configs[-1]
    if reason := _unknown(config):
        raise KvrsError(f"rows of this engine are not shared: {reason}")
    # Unless the layout is canonical, the degree of parallelism is a field too: such a row has one
    # part for each worker.
    fields = FileMapper.from_offloading_spec(
        "", spec, spec.blocks_per_chunk, parallel_agnostic=bool(spec.config.canonical_layout)
    ).get_run_config()
    model, cache = config.model_config, config.cache_config
    name = fields.pop("model_name")
    return {
        **fields,
        "format": FORMAT,
        "vllm": vllm.__version__,
        "weights": weights_of(name, model.revision, config.load_config.download_dir),
        "model_config": _digest(model.hf_config.to_json_string()),
        # RoPE of long contexts chooses its factors by this length, which changes the KV.
        "max_model_len": model.max_model_len,
        "model_dtype": str(model.dtype),
        "model_impl": str(model.model_impl),
        "quantization": str(model.quantization),
        "overrides": repr(model.hf_overrides),
        "sliding_window": str(model.disable_sliding_window),
        "images": repr(getattr(model.multimodal_config, "mm_processor_kwargs", None)),
        "attention": repr(config.attention_config),
        # Settings only: the adapters' files are in the keys, by their digests.
        "adapters": repr(config.lora_config),
        "drafts": _drafts(config.speculative_config),
        "cache": {each: str(getattr(cache, each, None)) for each in _CACHE},
        "layout": str(spec.config.kv_cache_layout),
        "device": _device(),
        "hash_algorithm": str(config.cache_config.prefix_caching_hash_algo),
        "hash_seed": str(get_none_hash_seed()),
    }


def number_type(spec: Any) -> Any:
    config = _configs[-1]
    dtype = str(config.cache_config.cache_dtype)
    return proof.number_type(len(spec.config.groups), dtype, config.model_config.dtype)


def _unknown(config: Any) -> str | None:
    """Return the reason why the meaning of this engine's rows is unknown; None: it is known."""
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") != "0":
        return "VLLM_SERVER_DEV_MODE lets weights be changed; allowed: 0"
    if config.weight_transfer_config is not None:
        return "weight_transfer_config lets weights be changed; allowed: none"
    if config.model_config.is_hybrid:
        return "restored state of a hybrid model is not shown to be exact; allowed: attention alone"
    parallel = config.parallel_config
    if parallel.worker_extension_cls:
        return "worker_extension_cls may change weights; allowed: none"
    if getattr(parallel, "nnodes_within_dp", 1) != 1 or not (
        parallel.world_size == 1 or str(parallel.distributed_executor_backend) in {"mp", "uni"}
    ):
        return "its workers may be on several nodes; allowed: one node, executor mp or uni"
    if (load := str(config.load_config.load_format)) not in {"auto", "safetensors", "hf"}:
        return f"load_format {load}; allowed: auto, safetensors, hf"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales takes scales from the first prompts; allowed: false"
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256"):
        return f"prefix_caching_hash_algo {algorithm}; allowed: sha256, sha256_cbor"
    return None


def _drafts(config: Any) -> str:
    """Return the draft model of speculative decoding, whose KV is part of each row."""
    if config is None or config.method.startswith("ngram") or config.method == "suffix":
        return "none"
    model = config.draft_model_config
    return f"{config.method} {weights_of(model.model, model.revision)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _device() -> str:
    """Return the kind of device: it determines the attention backend, and so the layout of KV."""
    if not current_platform.is_cpu():
        return f"{current_platform.get_device_name()} {current_platform.get_device_capability()}"
    text = Path("/proc/cpuinfo").read_text()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    used = [name for name in ("avx2", "avx512f", "amx_tile") if name in flags.split()]
    return " ".join([platform.machine(), *used])
