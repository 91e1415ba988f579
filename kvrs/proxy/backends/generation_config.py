"""Defaults of a Hugging Face model for requests that name none, as stock engines take them from the
file `generation_config.json` beside its weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Of SGLang's chats (`ModelConfig.get_default_sampling_params`).
_SAMPLING = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


def default_max_tokens(directory: Path) -> int | None:
    """The most tokens of a chat's output without `max_tokens` (`get_max_tokens` of vLLM); None: as
    many as the context has room for.

    What the server was given on its command line (`--generation-config vllm`,
    `--override-generation-config`) cannot be seen.
    """
    most = _fields(directory).get("max_new_tokens")
    return most if isinstance(most, int) and not isinstance(most, bool) and most > 0 else None


def default_sampling(directory: Path) -> dict[str, float]:
    """The values of a chat's sampling fields that it does not name itself."""
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
