"""Settings from environment variables: `KVRS_PROXY__PORT` is `proxy.port`."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from kvrs.config.document import parse_yaml, yaml_reason
from kvrs.config.settings import Settings, paths, section_of
from kvrs.config.source import Source
from kvrs.errors import ConfigError, nearest

_PREFIX = "KVRS_"
# Separator of a path's parts in a variable's name. Variables without it are no settings:
# KVRS_SECRET, and Kubernetes's variables for a service called kvrs (KVRS_PORT,
# KVRS_PROXY_SERVICE_HOST).
_NESTED = "__"


def override(source: Source, environ: Mapping[str, str], model: type[Settings]) -> None:
    """Put the value of each variable that names a setting of `model` into the document. Values are
    YAML; a list is given whole.

    Raises:
        ConfigError: variables that name no setting, or are not YAML.
    """
    found: dict[tuple[str, ...], tuple[str, Any]] = {}
    faults: list[str] = []
    for name, text in environ.items():
        if name.startswith(_PREFIX) and _NESTED in name.removeprefix(_PREFIX):
            try:
                found[_path(name, model)] = name, _parsed(name, text)
            except ConfigError as error:
                faults += error.faults
    if faults:
        raise ConfigError(faults)
    # Shorter paths first, so that a whole section is set before single keys of it.
    for path in sorted(found, key=len):
        name, value = found[path]
        _put(source, path, name, value)
        if not environ[name].strip():
            source.empty.add(path)


def unread(environ: Mapping[str, str], model: type[Settings]) -> Iterator[str]:
    """Yield a note for each variable that is no setting for want of a second underscore. Variables
    that Kubernetes sets for a service have an address as their value.
    """
    settings = paths(model, in_lists=False)
    names = {f"{_PREFIX}{path.replace('.', '_')}".upper(): path for path in settings}
    for name in names.keys() & environ.keys():
        parts = names[name].upper().split(".")
        if "://" not in environ[name]:
            setting = _PREFIX + _NESTED.join(parts if parts[1:] else [*parts, "KEY"])
            yield f"note: environment variable {name} is no setting; allowed: {setting}"


def _path(name: str, model: type[Settings]) -> tuple[str, ...]:
    """Return the path of the setting that a variable's name stands for."""
    section: type[Settings] | None = model
    done, path = _PREFIX, list[str]()
    for part in name.removeprefix(_PREFIX).split(_NESTED):
        if section is None:
            raise ConfigError(
                f"environment variable {name}: got {part!r} below "
                f"{done.removesuffix(_NESTED)}; allowed: nothing below it"
            )
        key, keys = part.lower(), sorted(section.model_fields)
        if key not in keys or part != part.upper():
            near = nearest(part, [each.upper() for each in keys], done)
            raise ConfigError(f"environment variable {name}: no setting{near}")
        path.append(key)
        section = section_of(section.model_fields[key].annotation, in_lists=False)
        done += part + _NESTED
    return tuple(path)


def _parsed(name: str, value: str) -> Any:
    try:
        return parse_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"environment variable {name}: {yaml_reason(error)}") from None


def _put(source: Source, path: tuple[str, ...], name: str, value: Any) -> None:
    if source.document is None:
        source.document = {}
    node = source.document
    for part in path[:-1]:
        if isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
    # Any other value is a fault of the file, which the check of the file finds.
    if isinstance(node, dict):
        node[path[-1]] = value
    for stale in [each for each in source.places if each[: len(path)] == path]:
        del source.places[stale]
    source.places[path] = source.variables[path] = name
