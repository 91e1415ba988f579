"""Section `cluster.engine`, the part that the scheduler reads."""

from pydantic import Field

from kvrs.config.settings import Settings


class BatchSettings(Settings):
    page_size_tokens: int = Field(default=16, ge=1, le=1024)
    """Tokens of a KV page; a power of two."""
    pages: int = Field(default=2048, ge=2, le=1 << 24)
    """KV pages of one instance."""
    max_batch_tokens: int = Field(default=256, ge=1, le=1 << 20)
    """Tokens computed per step: decode first, then chunks of prefill."""
    max_running: int = Field(default=64, ge=1, le=1 << 16)
    """Sequences that own pages at a time."""
    max_model_len: int = Field(default=2048, ge=2, le=1 << 24)
    """Tokens of prompt and output together."""
