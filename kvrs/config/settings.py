"""The base of every section of the YAML file, the YAML parser, and files that are private.

A setting has its unit in the name, its reason in the comment and its range in the field;
`kvrs/config/file.py` composes the sections and reports all mistakes of a file at once.
"""

import ipaddress
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvrs.config.hints import number_hint, pattern_in_words
from kvrs.errors import ConfigError, nearest
from kvrs.process.private_files import fault_of_mode

Found = TypeVar("Found")

# Key of the host that belongs to each key of a port; if that host is null, `host` counts.
HOST_OF_PORT = {
    "port": "host",
    "admin_port": "admin_host",
    "peer_port": "peer_host",
    "page_port": "host",
    "row_port": "host",
    "gossip_port": "gossip_host",
}

# Mark of a setting that only some engines (`Backend`) read, for a field's `json_schema_extra`:
# first files for other engines omit it, and its description says so.
ENGINES = "engines"
EMBEDDED: dict[str, Any] = {ENGINES: ["embedded"]}
DISTSERVE: dict[str, Any] = {ENGINES: ["distserve"]}
EMBEDDED_OR_DISTSERVE: dict[str, Any] = {ENGINES: ["embedded", "distserve"]}
VLLM: dict[str, Any] = {ENGINES: ["vllm"]}
STOCK: dict[str, Any] = {ENGINES: ["vllm", "sglang"]}

# Form of names of processes and nodes, which are also parts of paths and file names.
NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
_LONGEST_NAME = 253


class Settings(BaseModel):
    """Frozen; unknown keys and wrong types are refused rather than coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, document: Any) -> Any:
        # Null keys are dropped: YAML reads a section whose keys are all commented out as null.
        if not isinstance(document, dict):
            return document
        return {key: each for key, each in document.items() if each is not None or _keeps(cls, key)}


def _keeps(model: type[Settings], key: Any) -> bool:
    """Return whether null is a value of the key; False: the key is a section, which null leaves
    empty.
    """
    field = model.model_fields.get(key)
    kind = None if field is None else field.annotation
    return not (isinstance(kind, type) and issubclass(kind, Settings))


def _host(text: str) -> str:
    if is_numeric(text):
        return text
    labels = text.removesuffix(".").split(".")
    is_name = all(map(_LABEL.fullmatch, labels)) and len(text) <= _LONGEST_NAME
    # A last label of digits is an incomplete address, since no name ends in a number.
    if not is_name or labels[-1].isdigit():
        raise PydanticCustomError("host", "allowed: an IP address or a host name")
    return text


Host = Annotated[str, AfterValidator(_host)]


def is_numeric(host: str) -> bool:
    """Return whether the host is an IP address; False: it is a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only processes of the same machine reach the host; the only name of this kind
    is `localhost`.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def netloc(host: str, port: int) -> str:
    """Join host and port for a URL, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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


def faults_of(error: ValidationError, model: type[Settings], *section: str) -> list[str]:
    """Return one line per mistake: the path, which begins with `section`, the value, and the
    allowed values.
    """
    return [_line(fault, model, section) for fault in error.errors(include_url=False)]


def _line(fault: Any, model: type[Settings], section: tuple[str, ...]) -> str:
    path = ".".join(map(str, (*section, *fault["loc"]))) or "the file"
    if fault["type"] == "extra_forbidden":
        allowed = _allowed_keys(fault["loc"], model)
        near = _nearest_key(str(fault["loc"][-1]), allowed, model)
        return f"{path}: unknown key; allowed: {', '.join(allowed)}{near}"
    if fault["type"] == "missing":
        return f"{path}: missing"
    message = reason_of(fault)
    if fault["type"] in ("model_type", "model_attributes_type"):
        message = "allowed: a section"
    elif fault["type"] == "string_pattern_mismatch":
        message = pattern_in_words(fault["ctx"]["pattern"]) or message
    says = f"{message[0].lower()}{message[1:]}{_range(fault, model)}{_hint(fault)}"
    return f"{path}: got {echoed(fault['input'])}; {says}"


def reason_of(fault: Any) -> str:
    """Return a mistake's reason as its check gave it, without pydantic's name for its kind."""
    reason: str = fault["msg"]
    return reason.removeprefix("Value error, ")


def echoed(value: Any) -> str:
    """Return a value as a message shows it: a section or a list only by its kind, since its
    contents would bury the message.
    """
    match value:
        case dict():
            return "a section"
        case list():
            return "a list"
        case _:
            return repr(value)


def _nearest_key(key: str, allowed: list[str], model: type[Settings]) -> str:
    """Return the hint at a key like an unknown one, or of the same name in another section."""
    sections = (path.rpartition(".")[::2] for path in paths(model))
    elsewhere = next((above for above, name in sections if name == key), None)
    return nearest(key, allowed) or (nearest(key, [key], f"{elsewhere}.") if elsewhere else "")


def paths(model: type[Settings], above: str = "", *, in_lists: bool = True) -> Iterator[str]:
    """Yield the path of each key of a section, sections included; `in_lists`: also keys of items of
    lists, without an index.
    """
    for key, field in model.model_fields.items():
        yield above + key
        if (section := section_of(field.annotation, in_lists=in_lists)) is not None:
            yield from paths(section, f"{above}{key}.", in_lists=in_lists)


def _hint(fault: Any) -> str:
    """Return the hint that a text should be a number, or that YAML has read an unquoted text as a
    truth value or a number; empty: neither.
    """
    if fault["type"] in ("int_type", "float_type") and isinstance(fault["input"], str):
        return number_hint(fault["input"], str(fault["loc"][-1]))
    if fault["type"] != "string_type":
        return ""
    match fault["input"]:
        case bool():
            return " (no, off, yes and the like are truth values: quote it)"
        case int() | float():
            return " (quote it)"
        case _:
            return ""


_OF_NUMBERS = frozenset(
    (
        *("int_type", "int_from_float", "float_type", "finite_number"),
        *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    )
)
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _range(fault: Any, model: type[Settings]) -> str:
    """Return the whole range of a number, of which the fault's message names one bound at most;
    empty: it has one bound, which the message names, or none.
    """
    section: type[Settings] | None = model
    field = None
    for part in (part for part in fault["loc"] if isinstance(part, str)):
        field = None if section is None else section.model_fields.get(part)
        section = None if field is None else section_of(field.annotation)
    if fault["type"] not in _OF_NUMBERS or field is None:
        return ""
    bounds = [
        f"{word} {bound}"
        for name, word in _BOUNDS.items()
        for each in field.metadata
        if (bound := getattr(each, name, None)) is not None
    ]
    is_named = len(bounds) == 1 and fault["type"].startswith(("greater", "less"))
    return f" (allowed: {', '.join(bounds)})" if bounds and not is_named else ""


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


def _allowed_keys(path: tuple[str | int, ...], model: type[Settings]) -> list[str]:
    """Return the keys of the section in which `path` ends with an unknown key."""
    section: type[Settings] | None = model
    for part in path[:-1]:
        if isinstance(part, str):
            assert section is not None
            section = section_of(section.model_fields[part].annotation)
    assert section is not None
    return sorted(section.model_fields)


def section_of(annotation: Any, *, in_lists: bool = True) -> type[Settings] | None:
    """Return the class of a section by a field's type: the section itself, an optional section or a
    list of sections; None: no section.
    """
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    if get_origin(annotation) is list and not in_lists:
        return None
    found = (section_of(each, in_lists=in_lists) for each in get_args(annotation))
    return next((each for each in found if each is not None), None)


def read_private(path: str, source: str) -> bytes:
    """Read a file that other users cannot read.

    Raises:
        ConfigError: other users can read it, or it cannot be read; `source` names it.
    """
    try:
        with Path(path).open("rb") as file:
            if fault := fault_of_mode(os.fstat(file.fileno()), os.geteuid()):
                raise ConfigError(f"{source}: {fault}")
            return file.read()
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from None
