"""The console that commands print to, and options objects made from command parameters."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from kvrs.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

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
