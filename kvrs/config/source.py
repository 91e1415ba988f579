"""A YAML document with the place at which each of its values stands."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvrs.config.commented import KeyPath
from kvrs.config.settings import YamlLoader, construct
from kvrs.errors import ConfigError


@dataclass(slots=True)
class Source:
    """A configuration before it is checked."""

    name: str  # Of the file.
    document: Any = None
    # Of values and of sections: `kvrs.yaml:3`.
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place_of(self, path: KeyPath) -> str | None:
        """Where a value, or the section or list that holds it, stands; None: nowhere."""
        if not _holds(self.document, path):
            return None
        whole = (path[:length] for length in range(len(path), 0, -1))
        return next((self.places[each] for each in whole if each in self.places), self.name)


def read_source(path: Path) -> Source:
    """Read a YAML file.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        return _parse(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(error).split())}"]) from None


def leaves(document: Any, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is no section and no list of sections, with its path."""
    if isinstance(document, Mapping) and document:
        for key, value in document.items():
            yield from leaves(value, (*above, key))
    elif isinstance(document, list) and any(isinstance(item, Mapping) for item in document):
        for index, item in enumerate(document):
            yield from leaves(item, (*above, index))
    else:
        yield above, document


def _parse(text: str, path: Path) -> Source:
    loader = YamlLoader(text)
    try:
        root = construct(loader.get_single_node)
        source = Source(str(path))
        if root is not None:
            source.places |= _places(root, path.name, (), set())
            source.document = construct(lambda: loader.construct_document(root))
        return source
    finally:
        loader.dispose()


def _places(
    node: yaml.Node, name: str, path: KeyPath, seen: set[int]
) -> Iterator[tuple[KeyPath, str]]:
    if id(node) in seen:  # An alias: a document of aliases of aliases is small, its paths are not.
        return
    seen.add(id(node))
    yield path, f"{name}:{node.start_mark.line + 1}"
    match node:
        case yaml.MappingNode():
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    yield from _places(value, name, (*path, key.value), seen)
        case yaml.SequenceNode():
            for index, item in enumerate(node.value):
                yield from _places(item, name, (*path, index), seen)
        case _:
            pass


def _holds(document: Any, path: KeyPath) -> bool:
    """Whether a document has a value at the path."""
    for part in path:
        match document, part:
            case dict(), str() if part in document:
                document = document[part]
            case list(), int() if part < len(document):
                document = document[part]
            case _:
                return False
    return True
