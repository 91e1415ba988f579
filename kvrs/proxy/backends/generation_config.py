"""Defaults of a Hugging Face model for requests that name none, as vLLM takes them from the file
`generation_config.json` beside its weights.
"""

import json
from pathlib import Path


def default_max_tokens(directory: Path) -> int | None:
    """The most tokens of a chat's output without `max_tokens` (`get_max_tokens` of vLLM); None: as
    many as the context has room for.

    What the server was given on its command line (`--generation-config vllm`,
    `--override-generation-config`) cannot be seen.
    """
    try:
        fields = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    most = fields.get("max_new_tokens") if isinstance(fields, dict) else None
    return most if isinstance(most, int) and not isinstance(most, bool) and most > 0 else None
