"""The base of every section of the YAML file, and how YAML is read.

A section lives beside the code that reads it, with its unit in the name, its reason in the comment and its
range in the field; `kvrs.config` composes the sections and reports all faults of a file at once.
"""

import re
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen; unknown keys and wrong types are refused rather than coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Loader(yaml.SafeLoader):
    """As YAML 1.2 has it: `20e6` and `3.0e6` are numbers. PyYAML's own, of YAML 1.1, takes them for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    """The document as plain data. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
