"""The base of every section of the YAML file, the faults of its values, and files that are private.

A setting has its unit in the name, its reason in the comment and its range in the field;
`kvrs/config/file.py` composes the sections and reports all mistakes of a file at once.
"""

import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kvrs.errors import ConfigError, nearest


def fault_of_mode(status: os.stat_result, user: int) -> str | None:
    """Return the reason why a file is not private to a user (a numeric id); None: it is private.

    The group may read a file of root, if the user is not root: a Kubernetes secret has the pod's
    `fsGroup`.
    """
    allowed = 0o640 if status.st_uid == 0 and user != 0 else 0o600
    if others := status.st_mode & 0o077 & ~allowed:
        return f"other users may use it (mode bits {others:03o}); allowed: {allowed:04o}"
    return None


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


_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_SIZE = re.compile(_NUMBER + r" ?([kKMGT])(i?)(B|bit)?(?:/s)?")
_TIME = re.compile(_NUMBER + r" ?(ms|s|min|m|h)")
_POWER = {"k": 3, "K": 3, "M": 6, "G": 9, "T": 12}
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
# Form of most names, as a regular expression; its group is what they have beside letters and
# digits.
_NAME_PATTERN = re.compile(r"\^\[A-Za-z0-9_\]\[A-Za-z0-9(.+)\]\*\$")


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
        message = _pattern_in_words(fault["ctx"]["pattern"]) or message
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
        return _number_hint(fault["input"], str(fault["loc"][-1]))
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


def _allowed_keys(path: tuple[str | int, ...], model: type[Settings]) -> list[str]:
    """Return the keys of the section in which `path` ends with an unknown key."""
    section: type[Settings] | None = model
    for part in path[:-1]:
        if isinstance(part, str):
            assert section is not None
            section = section_of(section.model_fields[part].annotation)
    assert section is not None
    return sorted(section.model_fields)


def _number_hint(text: str, key: str) -> str:
    """Return how to write a text as the number of a key, whose last part is its unit; empty: not
    known.
    """
    if (found := _SIZE.fullmatch(text)) is not None:
        number, letter, binary, unit = found.groups()
        written = f"{number}e{_POWER[letter]}"
        if binary or unit == "bit":
            scale = 1024 ** (_POWER[letter] // 3) if binary else 10 ** _POWER[letter]
            written = f"{float(number) * scale / (8 if unit == 'bit' else 1):.15g}"
        return f" (write {written}, without a unit)"
    if (found := _TIME.fullmatch(text)) is not None and key.endswith("_s"):
        return f" (write {float(found[1]) * _SECONDS[found[2]]:g}: {key} is in seconds)"
    return " (without quotes)" if re.fullmatch(r"[-+0-9.eE]+", text) else ""


def _pattern_in_words(pattern: str) -> str | None:
    """Return what a pattern of a name allows, in words; None: the pattern is of another form."""
    found = _NAME_PATTERN.fullmatch(pattern)
    return found and f"allowed: letters, digits and `{found[1]}`, first a letter, a digit or `_`"


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
