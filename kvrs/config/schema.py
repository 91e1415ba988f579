"""The YAML file's JSON schema and the meaning of each key, derived from the settings classes."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from kvrs.config.document import KeyPath
from kvrs.config.file import Config
from kvrs.config.settings import ENGINES, Settings, section_of

DOCS_PAGE = re.compile(r"docs/(guide|research)/(([a-z-]+)\.md(?:#[a-z]+)?)")

_NAMES = {
    "embedded": "the embedded engine",
    "distserve": "DistServe",
    "vllm": "vLLM",
    "sglang": "SGLang",
}


@cache
def json_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of the YAML file, with the meaning of each key."""
    schema = Config.model_json_schema()
    schema["title"] = "Configuration of kvrs"
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for model in _models(Config):
        described = schema if model is Config else schema["$defs"][model.__name__]
        for key, given in described["properties"].items():
            given["description"] = _meaning(model, key)
    return schema


@cache
def description(path: KeyPath) -> str | None:
    """Return the meaning of a key, as the schema and comments show it; None: no such key."""
    section: type[Settings] | None = Config
    text = None
    for part in path:
        if isinstance(part, int):
            text = None
            continue
        field = None if section is None else section.model_fields.get(part)
        if section is None or field is None:
            return None
        text = with_commands(_meaning(section, part))
        section = section_of(field.annotation)
    return text


def with_commands(text: str) -> str:
    """Replace each path of a documentation page by the command that prints the page, because an
    installation has no checkout.
    """
    return DOCS_PAGE.sub(lambda page: f"kvrs docs {page[3]}", text)


def is_read_by(path: KeyPath, backend: str) -> bool:
    """Return whether this engine, or a proxy in front of it, reads the value at the path."""
    section: type[Settings] | None = Config
    for part in path:
        if isinstance(part, str) and section is not None:
            if backend not in (_engines(section, part) or [backend]):
                return False
            section = section_of(section.model_fields[part].annotation)
    return True


def _engines(model: type[Settings], key: str) -> list[str]:
    """Return the engines that alone read a key; empty: all do."""
    extra = model.model_fields[key].json_schema_extra
    engines = extra.get(ENGINES) if isinstance(extra, dict) else None
    return [str(each) for each in engines] if isinstance(engines, list) else []


def _meaning(model: type[Settings], key: str) -> str:
    """Return the meaning of a key, and before it the engines that alone read it, if not all do."""
    names = [_NAMES[each] for each in _engines(model, key)]
    mark = f"Only for {' and '.join(names)}. " if names else ""
    return mark + _descriptions(model)[key]


def _models(model: type[Settings]) -> Iterator[type[Settings]]:
    """Yield the class of a section and the classes of all sections within it."""
    yield model
    for field in model.model_fields.values():
        if (section := section_of(field.annotation)) is not None:
            yield from _models(section)


def _descriptions(model: type[Settings]) -> dict[str, str]:
    """Return, by field of a class and its bases, the docstring below the field as one line."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Settings) and base is not Settings:
            found |= _docstrings(base)
    return found


@cache
def _docstrings(model: type[Settings]) -> dict[str, str]:
    # Parsed only on demand: pydantic's `use_attribute_docstrings` would parse the source of every
    # class whenever a process starts.
    (tree,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found
