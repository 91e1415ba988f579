"""YAML documents as text: parsed to plain data, with faults by line, and written, with a comment
beside or above each value.
"""

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import yaml

Found = TypeVar("Found")

WIDTH = 100

# Path of a value: the keys and list indices that lead to it from the top of the document.
KeyPath = tuple[str | int, ...]
Note = Callable[[KeyPath], str | None]


class _Constructor(yaml.constructor.SafeConstructor):
    """Constructor of plain data that refuses repeated keys, as YAML 1.2 does. A whole number may
    have an exponent.
    """

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        value: float = super().construct_yaml_float(node)
        is_whole = "e" in node.value.lower() and value.is_integer()
        return int(value) if is_whole else value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


# The stubs know constructors of loaders only.
_Constructor.add_constructor(  # type: ignore[type-var]
    "tag:yaml.org,2002:float", _Constructor.construct_yaml_float
)


class _YamlLoader(_Constructor, yaml.SafeLoader):
    """YAML loader in Python, whose errors quote the faulty line."""


class _LibyamlLoader(_Constructor, yaml.composer.Composer, yaml.CSafeLoader):
    """YAML loader that parses in C, several times as fast. Nodes are composed in Python, which
    raises an error if they are nested too deeply.
    """

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        yaml.composer.Composer.__init__(self)


class _YamlDumper(yaml.CSafeDumper):
    """YAML writer that quotes texts which the loader would read as numbers."""


YamlLoader = _YamlLoader | _LibyamlLoader

# Read `20e6` and `3.0e6` as numbers, as YAML 1.2 does; in YAML 1.1 they are text.
for _kind in (_YamlLoader, _LibyamlLoader, _YamlDumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def parse_yaml(text: str) -> Any:
    """Parse a document to plain data. Raises yaml.YAMLError, also for values that only look like a
    number or a date.
    """
    loader, root = compose(text)
    return None if root is None else construct(lambda: loader.construct_document(root))


def compose(text: str) -> tuple[YamlLoader, yaml.Node | None]:
    """Return the root node of a document, and the loader that makes plain data of it. Raises
    yaml.YAMLError.
    """
    with suppress(yaml.YAMLError):
        return construct(lambda: _composed(_LibyamlLoader(text)))
    return construct(lambda: _composed(_YamlLoader(text)))


def _composed(loader: YamlLoader) -> tuple[YamlLoader, yaml.Node | None]:
    return loader, loader.get_single_node()


def dump_yaml(document: Any, **style: Any) -> str:
    """Write a document as YAML, which `parse_yaml` reads back as equal, with keys in the same
    order.
    """
    text: str = yaml.dump(document, Dumper=_YamlDumper, sort_keys=False, **style)
    return text


def construct(read: Callable[[], Found]) -> Found:
    """Return the result of a loader; every error that a document can cause is a yaml.YAMLError."""
    try:
        return read()
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from None
    except (LookupError, TypeError, AttributeError):
        # PyYAML does not check a value whose tag stands in the document: `!!timestamp x`, `!!set
        # [x]`.
        raise yaml.YAMLError("a value is not of the type that its tag names") from None


def yaml_fault(error: Exception, name: object) -> str:
    """Return one line about text that is not YAML: the name of its file, with the line of the fault
    if it is known, and what is wrong.
    """
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    place = str(name) if mark is None else f"{name}:{mark.line + 1}"
    return f"{place}: {yaml_reason(error)}"


def yaml_reason(error: Exception) -> str:
    """Return in one line what is wrong with text that is not YAML, without the name that the parser
    gives the text.
    """
    reason = " ".join(str(error).split()).replace(' in "<unicode string>", ', " at ")
    return f"not valid YAML: {reason}"


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
