"""Section `speculation` of the configuration."""

from enum import StrEnum
from typing import Any

from pydantic import Field, field_validator

from kvrs.config.settings import Settings
from kvrs.protocol.speculation import MOST_DRAFTS


class DraftSourceName(StrEnum):
    OFF = "off"
    LOOKUP = "lookup"
    DRAFT = "draft"


class DraftTime(StrEnum):
    RELOAD = "reload"
    ALWAYS = "always"


class SpeculationSettings(Settings):
    source: DraftSourceName = Field(default=DraftSourceName.OFF, strict=False)
    """Where drafts come from: off, lookup (what followed the last time that a stream's last tokens
    stood in it), draft (a small model at an instance that is being started again, while its own
    model loads). They change when tokens come, never which.
    """
    when: DraftTime = Field(default=DraftTime.RELOAD, strict=False)
    """Times of lookup. reload: while another instance is being started again; always."""
    draft: str | None = None
    """Hugging Face directory of the small model; it has the tokenizer of `cluster.model`."""
    depth: int = Field(default=4, ge=1, le=MOST_DRAFTS)
    """Drafts of a stream that one step verifies."""

    @field_validator("source", mode="before")
    @classmethod
    def _off_is_no_truth_value(cls, source: Any) -> Any:
        # YAML 1.1 reads the word `off` as false.
        return DraftSourceName.OFF if source is False else source
