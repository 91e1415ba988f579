"""The YAML file's JSON schema and the meaning of each key, derived from the settings classes.

First configuration files, one for each backend.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from kvrs.config.cluster import Backend
from kvrs.config.document import KeyPath, comment, commented_yaml, parse_yaml
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


_HEADERS = {
    Backend.EMBEDDED: "kvrs with its embedded engine, on this machine: `kvrs lab up --config FILE` "
    "starts two nodes, each with a prefill and a decode instance, and a proxy.",
    Backend.VLLM: "kvrs in front of vLLM, one prefill and two decode instances that are already up "
    "(`kvrs docs vllm` has their command lines). Change hosts and ports, then run "
    "`kvrs proxy --config FILE`. The proxy serves the model that vLLM names; if the model's files "
    "are not on this machine, `kvrs doctor` says what that costs.",
    Backend.SGLANG: "kvrs in front of SGLang, two prefill and two decode servers that are already "
    "up (`kvrs docs sglang` has their command lines). Change hosts and ports, then run "
    "`kvrs proxy --config FILE`. The proxy serves the model that SGLang names; if the model's "
    "files are not on this machine, `kvrs doctor` says what that costs.",
    Backend.DISTSERVE: "kvrs in front of DistServe, two servers on this machine, without a GPU: "
    "`kvrs lab up --config FILE` (`kvrs docs distserve`). The environment variable DISTSERVE_HOME "
    "names the checkout.",
}
_REST = (
    "`kvrs config check FILE` reports the faults of this file. Keys that are not here have their "
    "defaults, which `kvrs config show FILE` prints."
)
_NODES = """
  - {id: n0, instances: [{id: p0, role: prefill}, {id: d0, role: decode}]}
  - {id: n1, instances: [{id: p1, role: prefill}, {id: d1, role: decode}]}
"""
_DOCUMENTS = {
    Backend.EMBEDDED: """
proxy: {port: 8000, admin_port: 8001}
cluster:
  model: null
  engine: {pages: 2048, max_model_len: 2048}
  nodes: NODES
policy: {name: auto}
backup: {mode: local}
""",
    Backend.VLLM: """
proxy: {port: 8000, admin_port: 8001, inexact: mark}
cluster:
  backend: vllm
  nodes:
  - id: n0
    instances:
    - {id: p0, role: prefill, host: 127.0.0.1, port: 8100}
    - {id: d0, role: decode, host: 127.0.0.1, port: 8200}
  - id: n1
    instances:
    - {id: d1, role: decode, host: 127.0.0.1, port: 8201}
policy: {name: auto}
""",
    Backend.SGLANG: """
proxy: {port: 8000, admin_port: 8001, inexact: mark}
cluster:
  backend: sglang
  nodes:
  - id: n0
    instances:
    - {id: p0, role: prefill, host: 127.0.0.1, port: 30000}
    - {id: d0, role: decode, host: 127.0.0.1, port: 30001}
  - id: n1
    instances:
    - {id: p1, role: prefill, host: 127.0.0.1, port: 30002}
    - {id: d1, role: decode, host: 127.0.0.1, port: 30003}
policy: {name: auto}
""",
    Backend.DISTSERVE: """
proxy: {port: 8000, admin_port: 8001}
cluster:
  backend: distserve
  distserve: {flags: []}
  model: null
  nodes: NODES
policy: {name: auto}
""",
}


def first_file(backend: Backend) -> str:
    """Return a commented first YAML file for a cluster with this backend."""
    document = parse_yaml(_DOCUMENTS[backend].replace(" NODES", _NODES.rstrip()))
    lines = [*comment(_HEADERS[backend]), *comment(_REST), ""]
    return "\n".join([*lines, commented_yaml(document, _of_sections_above)])


def _of_sections_above(path: KeyPath) -> str | None:
    return None if any(isinstance(part, int) for part in path) else description(path)
