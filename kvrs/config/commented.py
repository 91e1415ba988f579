"""YAML with a comment beside or above each value."""

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from kvrs.config.settings import dump_yaml

WIDTH = 100

# The keys and the list indices from the top of the document to a value.
KeyPath = tuple[str | int, ...]
Note = Callable[[KeyPath], str | None]


def commented_yaml(document: Mapping[str, Any], note: Note) -> str:
    """A document as YAML, with what `note` returns for a value as its comment."""
    blocks = ["\n".join(_entry(key, value, (key,), note)) for key, value in document.items()]
    return "\n\n".join(blocks) + "\n"


def comment(text: str, indent: int = 0) -> list[str]:
    """A text as lines of comment, each at most `WIDTH` columns wide."""
    start = " " * indent + "# "
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=start,
        break_long_words=False,
        break_on_hyphens=False,
    )


def shown_path(path: KeyPath) -> str:
    """The path in the form of messages about configuration files: `cluster.nodes.0.id`."""
    return ".".join(str(part) for part in path)


def flow(value: Any) -> str:
    """A value in one line."""
    text = dump_yaml([value], default_flow_style=True, width=float("inf"))
    return text.strip()[1:-1]


def _section(section: Mapping[str, Any], path: KeyPath, indent: int, note: Note) -> list[str]:
    lines = []
    for key, value in section.items():
        lines += _entry(key, value, (*path, key), note, indent)
    return lines


def _entry(key: str, value: Any, path: KeyPath, note: Note, indent: int = 0) -> list[str]:
    nested = _nested(value, path, indent, note)
    line = " " * indent + (f"{key}:" if nested else f"{key}: {flow(value)}")
    return [*_annotated(line, note(path), indent), *nested]


def _nested(value: Any, path: KeyPath, indent: int, note: Note) -> list[str]:
    """The lines below a key; none where the value stands beside it."""
    if isinstance(value, dict) and value:
        return _section(value, path, indent + 2, note)
    lines = []
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            lines += _item(item, (*path, index), indent, note)
    return lines


def _item(item: Any, path: KeyPath, indent: int, note: Note) -> list[str]:
    block = _section(item, path, indent + 2, note)
    compact = " " * indent + f"- {flow(item)}"
    if len(compact) <= WIDTH and not any("#" in line for line in block):
        return [compact]
    if block[0].lstrip().startswith("#"):
        return [" " * indent + "-", *block]
    return [" " * indent + "- " + block[0].lstrip(), *block[1:]]


def _annotated(line: str, text: str | None, indent: int) -> list[str]:
    if not text:
        return [line]
    if len(beside := f"{line}  # {text}") <= WIDTH:
        return [beside]
    return [*comment(text, indent), line]
