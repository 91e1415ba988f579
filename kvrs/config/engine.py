"""Section `cluster.engine` of the configuration. Imports no torch, so that the proxy can read the
file too.
"""

from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from kvrs.config.batch import BatchSettings


class EngineSettings(BatchSettings):
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu or cuda."""
    pace: str | None = None
    """Name of a profile: the engine sleeps so that each step takes that profile's time. Real tokens
    and KV, another GPU's clock.
    """
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the weights of the generated model."""

    @field_validator("page_size_tokens")
    @classmethod
    def _fills_vectors(cls, page_size_tokens: int) -> int:
        # Blocks of keys are made of whole pages and must fill whole SIMD vectors.
        if page_size_tokens & (page_size_tokens - 1):
            raise PydanticCustomError("page_size", "allowed: a power of two from 1 to 1024")
        return page_size_tokens
