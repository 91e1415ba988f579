"""A YAML document with the place of each value."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvrs.config.document import KeyPath, YamlLoader, compose, construct, shown_path, yaml_fault
from kvrs.errors import ConfigError

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
