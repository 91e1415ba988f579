"""The laboratory's commands, `kvrs lab`, which `kvrs` finds by an entry point."""

import typer

from kvrs.cli.examples import examples as epilog_of
from kvrs_lab.cli import explaining, measuring, running
from kvrs_lab.cli.examples import EXAMPLES

app = typer.Typer(
    no_args_is_help=True,
    help="The laboratory: clusters on this machine, replays, simulations and reports.",
)
for panel, commands in {
    "Real clusters": (running.demo, running.up, measuring.replay, measuring.report),
    "Research": (measuring.simulate, measuring.compare, measuring.tune, explaining.explain),
}.items():
    for command in commands:
        epilog = epilog_of(command.__name__, EXAMPLES)
        app.command(epilog=epilog, rich_help_panel=panel)(command)
