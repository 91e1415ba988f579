"""Arguments of an SGLang server, for tests without SGLang."""

from pathlib import Path
from types import SimpleNamespace


def server_arguments(model: Path, **others: object) -> SimpleNamespace:
    """Those of a server of this model whose pages can be shared."""
    usual: dict[str, object] = {
        "model_path": str(model),
        "revision": None,
        "download_dir": None,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "quantization": None,
        "model_impl": "auto",
        "context_length": None,
        "device": "cuda",
        "json_model_override_args": "{}",
        "model_loader_extra_config": "{}",
        "enable_lora": None,
        "lora_paths": None,
        "speculative_algorithm": None,
        "load_format": "auto",
        "quantization_param_path": None,
        "nnodes": 1,
        "enable_memory_saver": False,
        "weight_cache_mode": "off",
    }
    return SimpleNamespace(**usual | others)
