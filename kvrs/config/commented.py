"""YAML with a comment beside or above each value."""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvrs.config.settings import dump_yaml

WIDTH = 100

# Path of a value: the keys and list indices that lead to it from the top of the document.
KeyPath = tuple[str | int, ...]
Note = Callable[[KeyPath], str | None]


def commented_yaml(document: Mapping[str, Any], note: Note) -> str:
    """Write a document as YAML; `note` gives the comment of each path, or None."""
    blocks = ("\n".join(_section({key: value}, (), note)) for key, value in document.items())
    return "\n\n".join(blocks) + "\n"


def comment(text: str, indent: int = 0) -> list[str]:
    """Wrap a text as lines of YAML comment, at most `WIDTH` columns wide."""
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
    """Return the path as messages show it: `cluster.nodes.0.id`."""
    return ".".join(str(part) for part in path)


def flow(value: Any) -> str:
    """Write a value in one line of YAML."""
    text = dump_yaml([value], default_flow_style=True, width=1 << 30)
    return text.strip()[1:-1]


def _section(
    section: Mapping[str, Any], above: KeyPath, note: Note, indent: int = 0
) -> Iterator[str]:
    for key, value in section.items():
        path = (*above, key)
        below = [*_below(value, path, note, indent)]
        line = " " * indent + (f"{key}:" if below else f"{key}: {flow(value)}")
        text = note(path)
        if not text:
            yield line
        elif len(beside := f"{line}  # {text}") <= WIDTH:
            yield beside
        else:
            yield from (*comment(text, indent), line)
        yield from below


def _below(value: Any, path: KeyPath, note: Note, indent: int) -> Iterator[str]:
    """Yield the lines below a key; none, if the value stands beside the key."""
    if isinstance(value, dict):
        yield from _section(value, path, note, indent + 2)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            block = [*_section(item, (*path, index), note, indent + 2)]
            dash, start = " " * indent + "-", block[0].lstrip()
            if len(compact := f"{dash} {flow(item)}") <= WIDTH and "#" not in "".join(block):
                yield compact
            elif start.startswith("#"):
                yield from (dash, *block)
            else:
                yield from (f"{dash} {start}", *block[1:])
