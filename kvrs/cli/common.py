"""The console that commands print to, options objects made from command parameters, and errors of
options that are numbers or choices.
"""

from collections.abc import Callable
from dataclasses import fields
from enum import EnumType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer
from pydantic import ValidationError
from rich.console import Console

from kvrs.cli.options import StockEngine
from kvrs.errors import ConfigError, nearest

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


def _choice_fault(option: str, given: str, choices: list[str]) -> ConfigError:
    is_stock = given in list(StockEngine)
    hint = f"; for {given}: kvrs proxy" if is_stock else nearest(given, choices)
    return ConfigError(f"{option}: got {given!r:.80}; allowed: {', '.join(choices)}{hint}")


def option_fault(error: typer.BadParameter) -> ConfigError | None:
    """Return the error of an option that is none of its choices, not a number or out of its range,
    with the value and what is allowed; None: the error has another cause.
    """
    option, cause = cast(Any, error.param), error.__cause__
    if not isinstance(cause, ValidationError):
        return None
    fault, kind = cause.errors()[0], option.type_descriptor.annotation
    if isinstance(kind, EnumType):
        return _choice_fault(
            option.opts[0], fault["input"], [str(each) for each in cast(Any, kind)]
        )
    allowed = _NUMBERS.get(kind)
    if allowed is None:
        return None
    if option.min is not None and option.max is not None:
        allowed += f" from {option.min} to {option.max}"
    elif option.min is not None:
        allowed += f", {option.min} or more"
    got = repr(fault["input"]) if fault["type"].endswith(("parsing", "size")) else fault["input"]
    return ConfigError(f"{option.opts[0]}: got {got:.80}; allowed: {allowed}")
