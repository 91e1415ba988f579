"""Remark on how many tokens and streams of the configured model an agent's checkpoint
store holds.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvrs.config.cluster import Backend
from kvrs.config.file import Config
from kvrs.errors import ConfigError
from kvrs.proxy.backends.model_files import find_model
from kvrs.proxy.backends.model_geometry import geometry_of, read_config

# Tokens that a typical stream reserves (its prompt and `max_tokens`), and the number of such
# streams below which a store counts as small.
_STREAM_TOKENS = 4096
_FEW_STREAMS = 8


def capacity_remark(config: Config) -> Iterator[str]:
    """Yield how much of the model's KV fits into an agent's store; nothing if no agent keeps KV, or
    the model has no files here.
    """
    if not config.agents_run or config.cluster.model is None:
        return
    if config.cluster.backend is Backend.VLLM:
        return  # No remark: agents of vLLM have no store, but share the rows in vLLM's own memory.
    if (directory := find_model(config.cluster.model)) is None:
        return
    path = directory / "config.json"
    try:
        geometry = geometry_of(path, read_config(path), config.cluster.engine.page_size_tokens)
    except ConfigError:  # No remark: another check reports this fault.
        return
    if config.cluster.backend is Backend.EMBEDDED:
        # The embedded engine keeps KV in 32 bits, whatever the model's files say.
        geometry = replace(geometry, dtype_bytes=4)
    size_bytes, token_bytes = config.backup.capacity_bytes, geometry.bytes_per_token
    tokens = size_bytes // token_bytes
    streams = tokens // _STREAM_TOKENS
    line = (
        f"backup.capacity_bytes: {size_bytes:,} hold {tokens:,} tokens of this model at an agent, "
        f"{streams:,} streams of {_STREAM_TOKENS:,}; a stream reserves its prompt and max_tokens, "
        "and one without room is unprotected"
    )
    if streams >= _FEW_STREAMS:
        yield f"note: {line}"
        return
    enough_bytes = _FEW_STREAMS * _STREAM_TOKENS * token_bytes
    yield f"warning: {line}; allowed: {enough_bytes:,} and more for {_FEW_STREAMS} such streams"
