"""Presets, the YAML files beside this module: a preset gives the settings that a configuration file
lacks.
"""

from enum import StrEnum
from itertools import takewhile
from pathlib import Path


class SystemPreset(StrEnum):
    ANCHORTP = "anchortp"
    BEST = "best"
    KEVLARFLOW = "kevlarflow"
    KVRS = "kvrs"
    LUMEN = "lumen"
    RAIDSERVE = "raidserve"

    @property
    def path(self) -> Path:
        return Path(__file__).parent / f"{self.value}.yaml"

    @property
    def summary(self) -> str:
        """The first paragraph of the file's comment: what the preset has of its paper."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return " ".join(line[2:] for line in takewhile(lambda line: line.startswith("# "), lines))

    @property
    def line(self) -> str:
        return f"preset {self.value}: {self.summary}"
