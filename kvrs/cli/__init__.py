"""The command line. Each command checks its input, then calls the package that does the work.

A command imports its packages inside its function, so that `kvrs --version` and completion stay
fast. The laboratory's package adds its commands as a group (`extras.py`).
"""

import os
import sys
from typing import Annotated

import typer

import kvrs
from kvrs.cli import asking, configuring, extras, running
from kvrs.cli.common import console
from kvrs.cli.extras import Commands
from kvrs.cli.pages import docs, examples
from kvrs.config.sections import LogLevel
from kvrs.errors import ConfigError, KvrsError
from kvrs.process.logs import LEVEL_ENV_NAME, LEVELS

INTERRUPTED = 130  # Exit status after Ctrl-C, as shells use it.


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=kvrs.__doc__,
)
config_app = typer.Typer(no_args_is_help=True, help="Work with configuration files.")
for command in (
    running.proxy,
    running.agent,
    asking.accept,
    configuring.incidents,
    configuring.key,
    extras.profile,
    asking.top,
    asking.doctor,
):
    app.command(epilog=examples(command.__name__))(command)
app.command(epilog=examples("docs"), context_settings={"allow_extra_args": True})(docs)
for of_files in (
    configuring.check,
    configuring.show,
    configuring.init,
    configuring.schema,
):
    config_app.command(epilog=examples(f"config {of_files.__name__}"))(of_files)
app.add_typer(config_app, name="config")


def main() -> None:
    """Run the command line; expected errors are printed without a traceback, with status 2."""
    try:
        app()
    except KvrsError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            console.print("interrupted", style="yellow")
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvrs {kvrs.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version"),
    ] = False,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            help="Log level of this process and of those that it starts; also KVRS_LOG_LEVEL; "
            "default: info"
        ),
    ] = None,
) -> None:
    """Options of `kvrs` itself; `--version` has ended the process before any command runs."""
    if log_level is not None:
        os.environ[LEVEL_ENV_NAME] = log_level.value
    elif (asked := os.environ.get(LEVEL_ENV_NAME, "")).lower() not in ("", *LEVELS):
        fault = f"got {asked!r}; allowed: {', '.join(LEVELS)}"
        raise ConfigError(f"environment variable {LEVEL_ENV_NAME}: {fault}")
