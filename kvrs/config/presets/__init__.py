"""Presets: base configurations under a file, as YAML files beside this module."""

from enum import StrEnum
from pathlib import Path


class SystemPreset(StrEnum):
    BEST = "best"
    KEVLARFLOW = "kevlarflow"
    KVRS = "kvrs"
    LUMEN = "lumen"
    RAIDSERVE = "raidserve"

    @property
    def path(self) -> Path:
        return Path(__file__).parent / f"{self.value}.yaml"
