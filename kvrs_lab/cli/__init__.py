"""The laboratory's commands, `kvrs lab`, which `kvrs` finds by an entry point."""

import typer

from kvrs.cli.examples import examples as epilog_of
from kvrs_lab.cli import explaining, measuring, running
from kvrs_lab.cli.examples import EXAMPLES

app = typer.Typer(
    no_args_is_help=True,
    help="The laboratory: clusters on this machine, replays, simulations and reports.",
)
for command in (
    running.demo,
    running.up,
    measuring.replay,
    measuring.simulate,
    measuring.compare,
    measuring.tune,
    measuring.report,
    explaining.explain,
):
    app.command(epilog=epilog_of(command.__name__, EXAMPLES))(command)
