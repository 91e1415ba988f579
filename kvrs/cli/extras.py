"""Commands of the other packages: found by name, and imported when they are used.

kvrs imports neither the engine nor the laboratory. The commands of the laboratory are listed here;
another distribution adds a command by an entry point of the group `kvrs.commands`, which has the
command's name and loads a `typer.Typer` with that command.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import typer
from typer.core import TyperGroup
from typer.main import get_group

from kvrs.errors import MissingExtraError, check_extras

GROUP = "kvrs.commands"

# Those of the application in `kvrs_lab.cli`.
OF_LAB = ("demo", "up", "replay", "simulate", "compare", "tune", "report", "explain")


class OfEngine(Protocol):
    """The functions of `kvrs_engine.cli`, which commands of kvrs call."""

    def profile(self, given: dict[str, Any]) -> Path:
        """Measure the embedded engine here, by the parameters of `kvrs profile`, and return the
        file of the table.
        """
        ...


def of_engine() -> OfEngine:
    """The engine's part of the command line.

    Raises:
        MissingExtraError: the engine is not installed.
    """
    check_extras("engine")
    engine: OfEngine = _imported("kvrs_engine", "engine")
    return engine


class Commands(TyperGroup):
    """The commands of kvrs, and those of other packages after them, imported when asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        for name in (*OF_LAB, *_registered()):
            self._add(name)
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._add(cmd_name)
        if cmd_name not in self.commands:
            self.list_commands(ctx)  # The error suggests names that are alike.
        return super().get_command(ctx, cmd_name)

    def _add(self, name: str) -> None:
        """Import a command of another package, if there is one of this name."""
        if name not in self.commands and (command := _command(name)) is not None:
            self.commands[name] = command


def _command(name: str) -> Any:
    """The command; where its package is not installed, one that says how to install it."""
    if name in OF_LAB:
        try:
            app = _imported("kvrs_lab", "lab").app
        except MissingExtraError as error:
            app = _without(name, error)
    elif (load := _registered().get(name)) is not None:
        app = load()
    else:
        return None
    return get_group(app).commands.get(name)


def _imported(package: str, extra: str) -> Any:
    try:
        return import_module(f"{package}.cli")
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtraError(
            f"not installed: {package}; to install: pip install 'kvrs[{extra}]'"
        ) from None


def _without(name: str, error: MissingExtraError) -> typer.Typer:
    def command() -> None:
        raise error

    app = typer.Typer()
    ignored = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, help=f"{error}.", context_settings=ignored)(command)
    return app


@cache
def _registered() -> dict[str, Callable[[], typer.Typer]]:
    """The commands of other distributions, each with the function that loads it."""
    from importlib.metadata import entry_points

    return {point.name: point.load for point in entry_points(group=GROUP)}
