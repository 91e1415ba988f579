"""The YAML configuration file as one frozen object, checked completely before anything starts.

Each section has a module of its own in this package, and `sections.py` composes them. This module
checks them, also across sections, and reports every mistake as one line with path, value and
allowed range.

A YAML document with the place of each value.

Settings from environment variables: `KVRS_PROXY__PORT` is `proxy.port`.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from kvrs.config.across_sections import faults_across_sections
from kvrs.config.backup import AgentSettings
from kvrs.config.cluster import Backend, InstanceSettings
from kvrs.config.document import (
    KeyPath,
    YamlLoader,
    compose,
    construct,
    dump_yaml,
    parse_yaml,
    shown_path,
    yaml_fault,
    yaml_reason,
)
from kvrs.config.presets import SystemPreset
from kvrs.config.sections import Sections
from kvrs.config.security import SecuritySettings
from kvrs.config.settings import Settings, faults_of, netloc, paths, read_private, section_of
from kvrs.errors import ConfigError, nearest
from kvrs.protocol.secrets import MIN_SECRET_BYTES

# Environment variables whose values are never shown, and so may not stand in a configuration.
SECRETS = frozenset(
    (
        *("KVRS_SECRET", "KVRS_ADMIN_TOKEN", "KVRS_KEYS"),
        *("KVRS_VLLM_API_KEY", "KVRS_SGLANG_API_KEY"),
    )
)
_VARIABLE = re.compile(r"\$?\$\{([^}]*)\}")
_PATH = re.compile(r"[a-z_]+(\.\w+)*(?=:)", re.ASCII)  # Path at the beginning of a fault's line.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NOWHERE = object()
_FLOW_HINT = " (within { } a value with ${NAME} must stand in quotes, or on a line of its own)"
_TAB_HINT = " (tabs are not allowed before a key: indent by spaces)"


@dataclass(slots=True)
class Source:
    """A configuration that is not checked yet, with the place of each value."""

    name: str  # Name of the file, or of what replaces it.
    document: Any = None
    # File and line of each value and section, by path: `kvrs.yaml:3`.
    places: dict[KeyPath, str] = field(default_factory=dict)
    # Environment variable that has overridden a value, by path.
    variables: dict[KeyPath, str] = field(default_factory=dict)
    # Paths of settings whose environment variable is empty.
    empty: set[KeyPath] = field(default_factory=set)

    def value(self, path: KeyPath) -> Any:
        """Return the value at a path; None: there is no value."""
        return _at(self.document, path) if _holds(self.document, path) else None

    def place_of(self, path: KeyPath) -> str | None:
        """Return the file and line of a value, or of the section or list around it; None: there is
        no value.
        """
        if not _holds(self.document, path):
            return None
        whole = (path[:length] for length in range(len(path), 0, -1))
        return next((self.places[each] for each in whole if each in self.places), self.name)

    def located(self, fault: str) -> str:
        """Add to a fault, which starts with its path, the environment variable or the file and
        line, and the id of the list item.
        """
        for path, variable in self.variables.items():
            if fault.startswith((f"{shown_path(path)}:", f"{shown_path(path)}.")):
                if path in self.empty:
                    fault = fault.replace(": got None; ", ": is empty; ", 1)
                return f"environment variable {variable}: {fault}"
        if fault.startswith("environment variable "):
            return fault
        shown = "" if (found := _PATH.match(fault)) is None else found[0]
        path = tuple(int(part) if part.isdecimal() else part for part in shown.split("."))
        named = self._with_ids(path) if shown else ""
        return f"{self._file_of(path)}: {named}{fault[len(shown) :]}"

    def _file_of(self, path: KeyPath) -> str:
        """Return the file and line of a value, or of the section around it."""
        while path and not _holds(self.document, path):
            path = path[:-1]
        place = self.place_of(path) if path else None
        name = Path(self.name).name
        if place is None or not place.startswith(f"{name}:"):
            return self.name if place is None else place
        return self.name + place.removeprefix(name)

    def _with_ids(self, path: KeyPath) -> str:
        """Return the path as text, with the id of the innermost list item behind its index."""
        parts = [str(part) for part in path]
        for depth in range(len(path), 0, -1):
            if isinstance(path[depth - 1], int):
                item = _at(self.document, path[:depth])
                if isinstance(item, dict) and isinstance(item.get("id"), str):
                    parts[depth - 1] += f" ({item['id']})"
                break
        return ".".join(parts)


def read_source(path: Path, environ: Mapping[str, str] | None = None) -> Source:
    """Read a YAML file. With an environment, variables replace `${NAME}` and `${NAME:-default}` in
    values.

    Raises:
        ConfigError: unreadable, not YAML, or an unset variable.
    """
    try:
        return _parse(path.read_text(encoding="utf-8"), path, environ)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error)  # The text includes the faulty line of the file.
        hint = _FLOW_HINT if "${" in reason else _TAB_HINT if r"'\t'" in reason else ""
        raise ConfigError(f"{yaml_fault(error, path)}{hint}") from None


def lay_over(source: Source, below: Source) -> None:
    """Add the values of `below` that `source` lacks: sections are merged, lists are not."""
    if source.document is not None and not isinstance(source.document, Mapping):
        return  # Not a mapping: the check of the document reports that.
    source.document = merged(below.document, source.document)
    source.places = {**below.places, **source.places}


def merged(below: Any, above: Any) -> Any:
    """Return `above` with the values of `below` that it lacks: sections are merged, lists
    are not.
    """
    if isinstance(below, Mapping) and above is None:  # A section without keys is null in YAML.
        return below
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


def leaves(document: Any, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value of everything but sections and lists of sections."""
    if isinstance(document, Mapping) and document:
        for key, value in document.items():
            yield from leaves(value, (*above, key))
    elif isinstance(document, list) and any(isinstance(item, Mapping) for item in document):
        for index, item in enumerate(document):
            yield from leaves(item, (*above, index))
    else:
        yield above, document


def _parse(text: str, path: Path, environ: Mapping[str, str] | None) -> Source:
    loader, root = compose(text)
    source = Source(str(path))
    if root is not None:
        walk = _Walk(loader, path.name, environ)
        walk.visit(root, ())
        if walk.faults:
            raise ConfigError([f"{path}: {fault}" for fault in walk.faults])
        source.places = walk.places
        source.document = construct(lambda: loader.construct_document(root))
    return source


class _Walk:
    """Finds the place of each node of a document, and replaces variables in its values."""

    def __init__(self, loader: YamlLoader, name: str, environ: Mapping[str, str] | None) -> None:
        self.places: dict[KeyPath, str] = {}
        self.faults: list[str] = []
        self._loader = loader
        self._name = name
        self._environ = environ
        self._seen: set[int] = set()

    def visit(self, node: yaml.Node, path: KeyPath) -> None:
        # Visited before, through an alias: a small document of nested aliases can have countless
        # paths.
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        self.places[path] = f"{self._name}:{node.start_mark.line + 1}"
        match node:
            case yaml.MappingNode():
                for key, value in node.value:
                    if isinstance(key, yaml.ScalarNode):
                        self.visit(value, (*path, key.value))
            case yaml.SequenceNode():
                for index, item in enumerate(node.value):
                    self.visit(item, (*path, index))
            case yaml.ScalarNode() if self._environ is not None and "${" in node.value:
                self._replace(node, path, self._environ)
            case _:
                pass

    def _replace(self, node: yaml.ScalarNode, path: KeyPath, environ: Mapping[str, str]) -> None:
        names: list[str] = []
        try:
            node.value = _VARIABLE.sub(lambda found: _value(found, environ, names), node.value)
        except ConfigError as error:
            self.faults += [f"{shown_path(path)}: {fault}" for fault in error.faults]
            return
        if names:
            self.places[path] += f", {', '.join(names)}"
        # An unquoted value gets the type of its replacement: `port: ${PORT}` is a number.
        if not node.style:
            implicit = (True, False)
            node.tag = self._loader.resolve(yaml.ScalarNode, node.value, implicit)  # type: ignore[no-untyped-call]  # yaml has no types here.


def _value(found: re.Match[str], environ: Mapping[str, str], names: list[str]) -> str:
    """Return the replacement of a `${...}`, and add the variable's name to `names`."""
    if found[0].startswith("$$"):
        return found[0][1:]
    name, given, default = found[1].partition(":-")
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"got {found[0]!r}; allowed: ${{NAME}}, ${{NAME:-default}}, or $${{")
    if name in SECRETS:
        raise ConfigError(f"got {found[0]!r}, which is a secret; allowed: no secret in settings")
    names.append(name)
    if not (value := environ.get(name, "")) and given:
        return default
    if name not in environ:
        raise ConfigError(
            f"environment variable {name} is not set; allowed: a value, or ${{{name}:-default}}"
        )
    return value


def _holds(document: Any, path: KeyPath) -> bool:
    """Return whether the document has a value at the path."""
    return not path or _at(document, path, _NOWHERE) is not _NOWHERE


def _at(document: Any, path: KeyPath, otherwise: Any = None) -> Any:
    """Return the value at a path; without a value, `otherwise`."""
    for part in path:
        match document, part:
            case dict(), str() if part in document:
                document = document[part]
            case list(), int() if part < len(document):
                document = document[part]
            case _:
                return otherwise
    return document


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


ENV_NAME = "KVRS_SECRET"
ADMIN_ENV_NAME = "KVRS_ADMIN_TOKEN"


class Config(Sections):
    """The sections of a file, also checked across them."""

    def url_of(self, process: InstanceSettings | AgentSettings) -> str:
        """Return the URL of an instance's or agent's port for kvrs's own protocol."""
        if isinstance(process, AgentSettings):
            return self.inner_url(process.host, process.port)
        return self.inner_url(process.host, process.port)

    def inner_url(self, host: str, port: int) -> str:
        scheme = "http" if self.security.tls is None else "https"
        return f"{scheme}://{netloc(host, port)}"


def parse_config(document: Any) -> Config:
    """Check a parsed YAML document, and return it as a configuration.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        config = Config.model_validate({} if document is None else document)
    except ValidationError as error:
        raise ConfigError(faults_of(error, Config)) from None
    if faults := list(faults_across_sections(config)):
        raise ConfigError(faults)
    return config


def load_config(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    preset: SystemPreset | None = None,
) -> Config:
    """Read and check a YAML file; without a file, the defaults. The preset gives settings that the
    file lacks.

    With an environment, its variables replace `${NAME}` and override settings
    (docs/guide/configuration.md). Files written by kvrs are read without an environment.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds faults.
    """
    return checked(load_source(path, environ, preset))


def load_source(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    preset: SystemPreset | None = None,
    backend: Backend | None = None,
) -> Source:
    """Read a YAML file without checking it, with the place of each value. `backend` replaces the
    file's; a preset's drafts and ranks are for the embedded engine.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or variables name no setting.
    """
    source = Source("defaults") if path is None else read_source(path, environ)
    if preset is not None:
        below = read_source(preset.path)
        if (backend or source.value(("cluster", "backend"))) not in (None, Backend.EMBEDDED):
            for section in ("speculation", "cluster"):
                below.document.pop(section, None)
        lay_over(source, below)
    if environ is not None:
        override(source, environ, Config)
    return source


def checked(source: Source) -> Config:
    """Check a document, and return it as a configuration; each fault names the place of its value.

    Raises:
        ConfigError: with one line per fault.
    """
    try:
        return parse_config(source.document)
    except ConfigError as error:
        raise ConfigError([source.located(fault) for fault in error.faults]) from None


def dump_config(config: Config) -> str:
    """Write a configuration as YAML, which `parse_config` reads back as an equal object."""
    return dump_yaml(config.model_dump(mode="json"))


def config_digest(config: Config) -> str:
    """Return 16 hex digits that are the same for equal configurations, whatever their files look
    like.
    """
    return hashlib.sha256(msgspec.json.encode(config.model_dump(mode="json"))).hexdigest()[:16]


def read_secret(security: SecuritySettings, environ: Mapping[str, str]) -> bytes:
    """Read the first of the cluster's shared secrets, the only one that processes use for new
    messages; raises like `read_secrets`.
    """
    return read_secrets(security, environ)[0]


def read_secrets(security: SecuritySettings, environ: Mapping[str, str]) -> list[bytes]:
    """Read the cluster's shared secrets from `security.secret_file` or the environment's
    KVRS_SECRET, one per line.

    The first is used; the others are accepted too, so that a secret can be rotated.

    Raises:
        ConfigError: no secret, a secret that is too short, or a file that other users can read.
    """
    return _read_lines("a secret", "secret_file", security.secret_file, ENV_NAME, environ)


def read_admin_tokens(security: SecuritySettings, environ: Mapping[str, str]) -> list[bytes]:
    """Read the admin port's tokens, of which a client needs one, from `security.admin_token_file`
    or the environment's KVRS_ADMIN_TOKEN, one per line; empty: no token needed.

    Raises:
        ConfigError: a token that is too short, or a file that other users can read.
    """
    if security.admin_token_file is None and ADMIN_ENV_NAME not in environ:
        return []
    return _read_lines(
        "a token", "admin_token_file", security.admin_token_file, ADMIN_ENV_NAME, environ
    )


def _read_lines(
    what: str, key: str, path: str | None, variable: str, environ: Mapping[str, str]
) -> list[bytes]:
    if path is None:
        source = f"environment variable {variable}"
        if not (text := environ.get(variable, "").encode()):
            state = "is empty" if variable in environ else "is not set"
            raise ConfigError(
                f"{source} {state}; allowed: {what} of at least {MIN_SECRET_BYTES} bytes, such as "
                f"`openssl rand -hex 32` prints, or its file in security.{key}"
            )
    else:
        source = f"security.{key}: {path}"
        text = read_private(path, source)
    secrets = [line.strip() for line in text.strip().split(b"\n")]
    for secret in secrets:
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{source}: {what} of {len(secret)} bytes; allowed: at least {MIN_SECRET_BYTES}"
            )
    return secrets
