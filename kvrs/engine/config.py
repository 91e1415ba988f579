"""Section `cluster.engine` of the configuration. Imports no torch, so that the proxy can read the file too."""

from typing import Literal

from pydantic import Field

from kvrs.scheduling.config import BatchSettings


class EngineSettings(BatchSettings):
    device: Literal["cpu", "cuda"] = "cpu"
    pace: str | None = None  # Name of a profile whose clock the engine keeps, by sleeping (DESIGN section 1).
    seed: int = Field(default=0, ge=0, lt=1 << 63)  # Of the weights of the generated model.
