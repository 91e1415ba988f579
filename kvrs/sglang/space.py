"""The namespace of a server's pages. Two servers share pages only if all fields of the namespace
are equal; a server with an unknown field shares nothing.

SGLang's own keys are chained digests of token ids, the request's `extra_key` and `cache_salt`, and
an adapter's id instead of its files.
"""

from typing import Any

from kvrs.engines.fingerprint import weights_of
from kvrs.errors import KvrsError

# Version of what the bytes of a page mean; servers with different versions share no pages.
FORMAT = 1
# Server arguments that change the bytes of a page but not its size.
_ARGUMENTS = (
    *("dtype", "kv_cache_dtype", "quantization", "model_impl", "context_length"),
    *("json_model_override_args", "model_loader_extra_config", "device"),
)
_POOL = (
    *("layout", "page_size", "dtype", "layer_num", "start_layer", "end_layer"),
    *("head_num", "head_dim"),
)
_RANKS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "is_mla_model")
# SGLang's host memory class for models whose layers all have keys and values of each head.
_PLAIN_POOL = "MHATokenToKVPoolHost"


def fields_of(version: str, arguments: Any, storage: Any, pool: Any) -> dict[str, Any]:
    """Return the fields of the namespace of this server's pages, from SGLang's version, the
    server's arguments, HiCache's configuration (`storage`) and its host memory (`pool`).

    Raises:
        KvrsError: the meaning of this server's pages is unknown, or may change.
        OSError: a file of the model cannot be read.
    """
    if reason := _unknown(arguments, storage, pool):
        raise KvrsError(f"pages of this server are not shared: {reason}")
    weights = weights_of(arguments.model_path, arguments.revision, arguments.download_dir)
    return {
        "format": FORMAT,
        "sglang": version,
        "weights": weights,
        **{name: str(getattr(arguments, name)) for name in _ARGUMENTS},
        "pool": {name: str(getattr(pool, name)) for name in _POOL},
        "ranks": {name: str(getattr(storage, name)) for name in _RANKS},
    }


def _unknown(arguments: Any, storage: Any, pool: Any) -> str | None:
    """Return the reason why the meaning of this server's pages is unknown; None: it is known."""
    if storage.is_mla_model or type(pool).__name__ != _PLAIN_POOL:
        return f"its memory is a {type(pool).__name__}; allowed: {_PLAIN_POOL}, no MLA, no hybrid"
    if arguments.enable_lora or arguments.lora_paths:
        return "its keys have names of LoRA adapters, not their files; allowed: no --enable-lora"
    if arguments.speculative_algorithm is not None:
        return f"speculative_algorithm {arguments.speculative_algorithm}; allowed: none"
    if arguments.load_format not in {"auto", "safetensors"}:
        return f"load_format {arguments.load_format}; allowed: auto, safetensors"
    if arguments.quantization_param_path is not None:
        return "quantization_param_path; allowed: scales within the model's files"
    if arguments.enable_memory_saver:
        return "enable_memory_saver lets weights be given back; allowed: false"
    if arguments.weight_cache_mode != "off":
        return f"weight_cache_mode {arguments.weight_cache_mode}; allowed: off"
    if arguments.nnodes != 1:
        return f"its ranks are on {arguments.nnodes} nodes; allowed: 1"
    if storage.attn_cp_size != 1 or storage.dcp_size != 1 or storage.should_split_heads:
        return "parts of a page are on several ranks; allowed: no context parallelism, no split"
    return None
