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
    """As YAML 1.2 has it: `20e6` and `3.0e6` are numbers (YAML 1.1 takes them for text), and a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    """The document as plain data. Raises yaml.YAMLError, also for what only looks like a number or a date."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()
