"""The JSON schema of the YAML file, and what each key means, of the settings classes."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from kvrs.config.commented import KeyPath
from kvrs.config.file import Config
from kvrs.config.settings import ENGINES, Settings, resolved

DOCS_PAGE = re.compile(r"docs/(guide|research)/(([a-z-]+)\.md(?:#[a-z]+)?)")

_NAMES = {
    "embedded": "the embedded engine",
    "distserve": "DistServe",
    "vllm": "vLLM",
    "sglang": "SGLang",
}


@cache
def json_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of the YAML file, with what each key means."""
    schema = Config.model_json_schema()
    schema["title"] = "Configuration of kvrs"
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for model in _models(Config):
        described = schema if model is Config else schema["$defs"][model.__name__]
        for key, text in _descriptions(model).items():
            given = described["properties"][key]
            given["description"] = " ".join((*_mark(given), text))
    return schema


@cache
def description(path: KeyPath) -> str | None:
    """The meaning of a key; None: there is no such key."""
    schema = json_schema()
    node, text = schema, None
    for part in path:
        if isinstance(part, int):
            node, text = resolved(schema, node.get("items", {})), None
            continue
        given = node.get("properties", {}).get(part)
        if given is None:
            return None
        node, text = resolved(schema, given), with_commands(given["description"])
    return text


def with_commands(text: str) -> str:
    """Names of pages as the commands that print them, which an installation has."""
    return DOCS_PAGE.sub(lambda page: f"kvrs docs {page[3]}", text)


def engines_of(path: KeyPath) -> list[str]:
    """The engines that alone read a key, or a section above it; empty: all of them."""
    schema = json_schema()
    node = schema
    for part in path:
        if isinstance(part, int):
            node = resolved(schema, node["items"])
            continue
        given = node["properties"][part]
        if ENGINES in given:
            found: list[str] = given[ENGINES]
            return found
        node = resolved(schema, given)
    return []


def _mark(given: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence before the meaning of a key that only some engines read."""
    if names := [_NAMES[each] for each in given.get(ENGINES, ())]:
        yield f"Only for {' and '.join(names)}."


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The classes of a section and of all sections in it."""
    yield model
    for each in _settings_in(field.annotation for field in model.model_fields.values()):
        yield from _models(each)


def _settings_in(annotations: Any) -> Iterator[type[Settings]]:
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, Settings):
            yield annotation
        else:  # A list of sections, or a section or null.
            yield from _settings_in(getattr(annotation, "__args__", ()))


def _descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of a class and of its bases, as one line each."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Settings) and base is not Settings:
            found |= _docstrings(base)
    return found


@cache
def _docstrings(model: type[Settings]) -> dict[str, str]:
    # Read here and not by pydantic's `use_attribute_docstrings`, which parses the source of every
    # class at each start of each process.
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
