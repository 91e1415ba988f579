"""Settings from environment variables: `KVRS_PROXY__PORT` is `proxy.port`."""

import re
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import yaml

from kvrs.config.commented import KeyPath
from kvrs.config.settings import Settings, parse_yaml, resolved
from kvrs.config.source import Source
from kvrs.errors import ConfigError

_PREFIX = "KVRS_"
# Between the parts of a path. A variable without it is no setting: KVRS_SECRET, and what Kubernetes
# sets for a service called kvrs (KVRS_PORT, KVRS_PROXY_SERVICE_HOST).
_NESTED = "__"
_INDEX = re.compile(r"[0-9]{1,9}")


def override(
    source: Source,
    environ: Mapping[str, str],
    model: type[Settings],
    defaults: Mapping[str, Any],
) -> None:
    """Put the values of all variables into a document.

    A value is YAML. A list is given whole, or by index: the items below it are then those of the
    file or else of `defaults`, and the index after the last one adds one.

    Raises:
        ConfigError: variables name no setting, or are no YAML.
    """
    named = [
        each for each in environ if each.startswith(_PREFIX) and _NESTED in each[len(_PREFIX) :]
    ]
    if not named:
        return  # To make the schema takes most of the time of reading a file.
    schema = model.model_json_schema()
    faults: list[str] = []
    found: list[tuple[KeyPath, str]] = []
    for name in named:
        try:
            found.append((_path(name, schema), name))
        except ConfigError as error:
            faults += error.faults
    # Shorter paths first: a list as a whole comes before one of its items.
    for path, name in sorted(found, key=lambda each: [(len(str(p)), str(p)) for p in each[0]]):
        try:
            _put(source, path, name, _parsed(name, environ[name]), defaults)
            if not environ[name].strip():
                source.empty.add(path)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)


def _path(name: str, schema: dict[str, Any]) -> KeyPath:
    """The path of the setting that a variable names."""
    node, done = schema, _PREFIX
    path: list[str | int] = []
    for part in name[len(_PREFIX) :].split(_NESTED):
        if "properties" in node:
            keys = sorted(node["properties"])
            if (key := part.lower()) not in keys or part != part.upper():
                near = get_close_matches(key, keys, n=1, cutoff=0)[0]
                raise ConfigError(
                    f"environment variable {name}: no setting; the nearest one is "
                    f"{done}{near.upper()}"
                )
            path.append(key)
            node = resolved(schema, node["properties"][key])
        elif "items" in node and _INDEX.fullmatch(part):
            path.append(int(part))
            node = resolved(schema, node["items"])
        else:
            allowed = "an index, as 0" if "items" in node else "nothing below it"
            raise ConfigError(
                f"environment variable {name}: got {part!r} below "
                f"{done.removesuffix(_NESTED)}; allowed: {allowed}"
            )
        done += part + _NESTED
    return tuple(path)


def _parsed(name: str, value: str) -> Any:
    try:
        return parse_yaml(value)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"environment variable {name}: not valid YAML: {reason}") from None


def _put(source: Source, path: KeyPath, name: str, value: Any, defaults: Mapping[str, Any]) -> None:
    if source.document is None:
        source.document = {}
    node, default = source.document, defaults
    for depth, (part, below) in enumerate(pairwise(path), start=1):
        default = _child(default, part)
        if isinstance(below, int) and isinstance(node, dict) and node.get(part) is None:
            node[part] = deepcopy(default) if isinstance(default, list) else []
            source.places[path[:depth]] = "default"
        node = _section(node, part, name)
    match node, path[-1]:
        case dict(), str() as key:
            node[key] = value
        case list(), int() as index:
            _section(node, index, name)
            node[index] = value
        case _:  # A fault of the file, found by its check.
            pass
    for stale in [each for each in source.places if each[: len(path)] == path]:
        del source.places[stale]
    source.places[path] = name
    source.variables[path] = name


def _section(node: Any, part: str | int, name: str) -> Any:
    """The value at `part` of a section or list, put there as an empty section if it is missing."""
    match node, part:
        case dict(), str():
            if node.get(part) is None:
                node[part] = {}
            return node[part]
        case list(), int():
            if part > len(node):
                raise ConfigError(
                    f"environment variable {name}: got item {part} of a list of {len(node)}; "
                    f"allowed: 0 to {len(node)}"
                )
            if part == len(node):
                node.append({})
            return node[part]
        case _:
            return None


def _child(default: Any, part: str | int) -> Any:
    match default, part:
        case dict(), str():
            return default.get(part)
        case list(), int() if part < len(default):
            return default[part]
        case _:
            return None
