"""Presets, the YAML files beside this module: a preset gives the settings that a configuration file
lacks.
"""

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
