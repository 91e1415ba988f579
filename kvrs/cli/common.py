"""The console that commands print to, options objects made from command parameters, and errors of
options that are numbers.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer
from pydantic import ValidationError
from rich.console import Console

from kvrs.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}

console = Console(stderr=True, highlight=False)


def filled(kind: type[Options], given: dict[str, Any], **rest: Any) -> Options:
    """Make an options object of class `kind` from the command parameters with the names of its
    fields, and from `rest`.
    """
    same = {field.name: given[field.name] for field in fields(kind) if field.name in given}
    return kind(**(same | rest))


def faults_in(check: Callable[[], object]) -> list[str]:
    """Call a check, and return the faults of the ConfigError that it raises; empty: it
    raises none.
    """
    try:
        check()
    except ConfigError as error:
        return error.faults
    return []


def say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def number_fault(error: typer.BadParameter) -> ConfigError | None:
    """Return the error of an option that is not a number or is out of its range, with the value and
    the range; None: the error has another cause.
    """
    option, cause = cast(Any, error.param), error.__cause__
    if not isinstance(cause, ValidationError):
        return None
    allowed = _NUMBERS.get(option.type_descriptor.annotation)
    if allowed is None:
        return None
    if option.min is not None and option.max is not None:
        allowed += f" from {option.min} to {option.max}"
    elif option.min is not None:
        allowed += f", {option.min} or more"
    (fault,) = cause.errors()
    got = repr(fault["input"]) if fault["type"].endswith(("parsing", "size")) else fault["input"]
    return ConfigError(f"{option.opts[0]}: got {got:.80}; allowed: {allowed}")
