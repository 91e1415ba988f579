"""Section `speculation` of the configuration."""

from enum import StrEnum
from typing import Any

from pydantic import Field, field_validator

from kvrs.config.settings import Settings


class DraftSourceName(StrEnum):
    OFF = "off"
    LOOKUP = "lookup"


class DraftTime(StrEnum):
    RELOAD = "reload"
    ALWAYS = "always"


class SpeculationSettings(Settings):
    source: DraftSourceName = Field(default=DraftSourceName.OFF, strict=False)
    """Where drafts come from: off, lookup (what followed the last time that a stream's last tokens
    stood in it). They change when tokens come, never which.
    """
    when: DraftTime = Field(default=DraftTime.RELOAD, strict=False)
    """reload: while another instance is being started again; always."""
    depth: int = Field(default=4, ge=1, le=64)
    """Drafts of a stream that one step verifies."""

    @field_validator("source", mode="before")
    @classmethod
    def _off_is_no_truth_value(cls, source: Any) -> Any:
        # YAML 1.1 reads the word `off` as false.
        return DraftSourceName.OFF if source is False else source
