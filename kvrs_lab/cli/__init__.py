"""The laboratory's commands, `kvrs lab`, which `kvrs` finds by an entry point."""

from collections.abc import Callable

import typer

from kvrs.cli.pages import examples as epilog_of
from kvrs_lab.cli import explaining, measuring, running
from kvrs_lab.cli.examples import EXAMPLES

app = typer.Typer(
    no_args_is_help=True,
    help="The laboratory: clusters on this machine, replays, simulations and reports.",
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Real clusters": (running.demo, running.up, measuring.replay, measuring.report),
    "Research": (measuring.simulate, measuring.compare, measuring.tune, explaining.explain),
}
for panel, commands in _PANELS.items():
    for command in commands:
        epilog = epilog_of(command.__name__, EXAMPLES)
        app.command(epilog=epilog, rich_help_panel=panel)(command)
