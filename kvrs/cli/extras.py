"""Commands of other packages, found by entry points and imported on use.

kvrs imports neither the engine nor the laboratory. A distribution adds a command or a group by an
entry point of the group `kvrs.commands`, which has the command's name and loads a `typer.Typer`,
such as `kvrs lab`.

`kvrs profile` measures the prefill and decode times of an engine.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_group

import kvrs.cli.options as opt
from kvrs.cli.common import console, option_fault, say
from kvrs.errors import ConfigError, MissingExtraError, check_extras

GROUP = "kvrs.commands"

# Commands of the laboratory that are looked for without its name (`kvrs lab`).
MOVED = ("demo", "up", "replay", "report", "simulate", "compare", "tune", "explain")

# By package: the extra of the distribution that installs it.
_EXTRAS = {"kvrs_engine": "engine", "kvrs_lab": "lab"}
_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}


def profile_engine(given: dict[str, Any]) -> Path:
    """Measure the embedded engine here, with the parameters of `kvrs profile`, and return the path
    of the table.

    Raises:
        MissingExtraError: the engine is not installed.
    """
    check_extras("engine")
    try:
        path: Path = import_module("kvrs_engine.cli").profile(given)
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return path


class Commands(TyperGroup):
    """The commands of kvrs, then those of other packages, which are imported only when they are
    called.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        for name in _registered():
            self._add(name)
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in MOVED:
            raise ConfigError(f"kvrs {cmd_name} is kvrs lab {cmd_name}")
        self._add(cmd_name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if (fault := option_fault(error)) is None:
                raise
            raise fault from None

    def _add(self, name: str) -> None:
        """Import a command of another package; do nothing if no package has a command of
        this name.
        """
        load = _registered().get(name)
        if name in self.commands or load is None:
            return
        try:
            app = load()
        except ModuleNotFoundError as error:
            app = _without(name, _missing(error))
        group = get_group(app)
        command: Any = group if len(group.commands) > 1 else group.commands[name]
        command.name = name
        self.commands[name] = command


def _missing(error: ModuleNotFoundError) -> MissingExtraError:
    """Make the error that a package of kvrs is not installed. Raises `error` itself if the missing
    module is not kvrs's.
    """
    if error.name not in _EXTRAS:
        raise error
    package = error.name
    return MissingExtraError(
        f"not installed: {package}; to install: pip install 'kvrs[{_EXTRAS[package]}]'"
    )


def _without(name: str, error: MissingExtraError) -> typer.Typer:
    def command() -> None:
        raise error

    app = typer.Typer()
    app.command(name, help=escape(f"{error}."), context_settings=_ANY_ARGUMENTS)(command)
    return app


@cache
def _registered() -> dict[str, Callable[[], typer.Typer]]:
    """Return the functions that load the commands of other packages, by the command's name."""
    from importlib.metadata import entry_points

    return {point.name: point.load for point in entry_points(group=GROUP)}


def profile(
    context: typer.Context,
    out: opt.ProfileOut,
    url: opt.ProfiledUrl = None,
    model: opt.Model = None,
    device: Annotated[
        opt.Device, typer.Option(help="Embedded engine: device that computes")
    ] = opt.Device.CPU,
    longest_tokens: opt.LongestTokens = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Embedded engine: largest decode batch")
    ] = 16,
    max_batch_tokens: opt.MaxBatchTokens = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per point; the median counts")] = 3,
) -> None:
    """Measure the embedded engine on this machine or, with --url, prefills of a running vLLM."""
    given = locals()
    if url is not None:
        engine_only = ("device", "max_batch", "max_batch_tokens")
        sources = {each: context.get_parameter_source(each) for each in engine_only}
        asked = [key for key, source in sources.items() if source and source.name == "COMMANDLINE"]
        if asked:
            option = f"--{asked[0].replace('_', '-')}"
            raise ConfigError(f"{option}: given beside --url; allowed: for the embedded engine")
        _profile_vllm(url, out, model, longest_tokens, repeats)
        return
    say(f"profile: {profile_engine(given)}")


def _profile_vllm(
    url: str,
    out: Path,
    model: Path | None,
    longest_tokens: int | None,
    repeats: int,
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvrs.proxy.backends.vllm_profile import VllmProfileOptions, run_vllm_profile

    options = VllmProfileOptions(
        url=url,
        out=out,
        model=None if model is None else str(model),
        longest_tokens=longest_tokens,
        repeats=repeats,
    )
    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("prompts", total=None)
        written = run_vllm_profile(
            options,
            os.environ,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    say(f"profile: {written}; profiles.prefill takes this path")
