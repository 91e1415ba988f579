"""Default values of a Hugging Face model's request fields: stock engines read them from
`generation_config.json` beside its weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
