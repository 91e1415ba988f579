"""The base of every section of the YAML file.

A section lives beside the code that reads it, with its unit in the name, its reason in the comment and its
range in the field; `kvrs.config` composes the sections and reports all faults of a file at once.
"""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen; unknown keys and wrong types are refused rather than coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
