"""Section `speculation` of the configuration."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from pydantic import Field, field_validator

from kvrs.config.cluster import Backend, ClusterSettings
from kvrs.config.settings import Settings
from kvrs.protocol.instance import MOST_DRAFTS


class DraftSourceName(StrEnum):
    OFF = "off"
    DRAFT = "draft"


class SpeculationSettings(Settings):
    source: DraftSourceName = Field(default=DraftSourceName.OFF, strict=False)
    """Source of drafts: off, draft (a small model, at a restarted instance while its own model
    loads). Drafts change when tokens come, never which.
    """
    draft: str | None = None
    """Hugging Face directory of the small model, which has the tokenizer of `cluster.model`. null:
    if the model is generated, one that is generated with it.
    """
    pace: str | None = None
    """Name of a profile: the draft model's steps take that profile's time, and so does loading it
    at `cluster.engine.disk_bytes_per_s`.
    """
    depth: int = Field(default=4, ge=1, le=MOST_DRAFTS)
    """Drafts of one stream that a step verifies."""

    @field_validator("source", mode="before")
    @classmethod
    def _off_is_no_truth_value(cls, source: Any) -> Any:
        # YAML 1.1 reads the word `off` as false.
        return DraftSourceName.OFF if source is False else source


def faults_of_speculation(
    speculation: SpeculationSettings, cluster: ClusterSettings
) -> Iterator[str]:
    source, backend = speculation.source, cluster.backend
    if source is not DraftSourceName.OFF and backend is not Backend.EMBEDDED:
        yield (
            f"speculation.source: got {source.value!r} with backend {backend.value!r}; allowed: "
            f"'off', or backend 'embedded'"
        )
    if source is DraftSourceName.DRAFT and speculation.draft is None and cluster.model is not None:
        yield (
            "speculation.draft: missing with source 'draft'; allowed: a Hugging Face directory, or "
            "no `cluster.model`"
        )
