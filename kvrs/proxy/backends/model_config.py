"""Files beside a Hugging Face model's weights: the shape of its KV, and defaults of its requests.

Shape of a Hugging Face model's KV, from its `config.json`, for engines that do not report it.

Default values of a Hugging Face model's request fields: stock engines read them from
`generation_config.json` beside its weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrs.errors import ConfigError
from kvrs.protocol.geometry import KvGeometry

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def read_geometry(model: str, page_size_tokens: int) -> KvGeometry:
    """Return the shape of a page of the model's KV, with `page_size_tokens` tokens per page.

    Raises:
        ConfigError: the file is missing, or lacks a field.
    """
    path = Path(model) / "config.json"
    return geometry_of(path, read_config(path), page_size_tokens)


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of a `config.json`; for a multimodal model, the fields of its language
    model.

    Raises:
        ConfigError: the file is missing, or is not an object.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cluster.model: {path}: {error.strerror}; allowed: a Hugging Face directory"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cluster.model: {path}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"cluster.model: {path}: not an object")
    inner = fields.get("text_config") or {}
    if not isinstance(inner, dict):
        raise ConfigError(
            f"cluster.model: {path}: text_config is {inner!r:.80}; allowed: an object"
        )
    return fields | inner


def geometry_of(path: Path, fields: dict[str, Any], page_size_tokens: int) -> KvGeometry:
    """Derive the shape of the KV from the fields of the file at `path`. Raises ConfigError: a field
    is missing.
    """
    heads = _count(path, fields, "num_attention_heads")
    head_dim = (
        _count(path, fields, "head_dim")
        if fields.get("head_dim")
        else _count(path, fields, "hidden_size") // heads
    )
    dtype = fields.get("torch_dtype") or fields.get("dtype") or "float32"
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ConfigError(
            f"cluster.model: {path}: torch_dtype is {dtype!r}; allowed: {', '.join(_DTYPE_BYTES)}"
        )
    return KvGeometry(
        layers=_count(path, fields, "num_hidden_layers"),
        kv_heads=_count(path, fields, "num_key_value_heads", heads),
        head_dim=head_dim,
        dtype_bytes=_DTYPE_BYTES[dtype],
        page_size_tokens=page_size_tokens,
    )


def _count(path: Path, fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"cluster.model: {path}: {name} is {value!r}; allowed: a number above 0")
    return value


# Fields of a chat whose default values SGLang takes from the model
# (`ModelConfig.get_default_sampling_params`).
_SAMPLING = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


def default_max_tokens(directory: Path) -> int | None:
    """Return the output limit of a chat without `max_tokens` (vLLM's `get_max_tokens`); None: the
    rest of the context.

    The server's command line (`--generation-config vllm`, `--override-generation-config`) is not
    visible here.
    """
    most = _fields(directory).get("max_new_tokens")
    return most if isinstance(most, int) and not isinstance(most, bool) and most > 0 else None


def default_sampling(directory: Path) -> dict[str, float]:
    """Return the default values of a chat's sampling fields; empty: the model has none."""
    fields = _fields(directory)
    given = {name: fields.get(name) for name in _SAMPLING}
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _fields(directory: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
