"""Commands that ask a running proxy."""

import os
from pathlib import Path
from typing import Annotated

import typer

import kvrs.cli.options as opt
from kvrs.config.file import load_config

AdminUrl = Annotated[
    str | None,
    typer.Option(
        help="The proxy's admin port; default: that of the configuration, on this machine"
    ),
]
AdminConfig = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of the proxy: its admin port, token and certificate"),
]
CheckedFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="YAML file; without it, the command line of the proxy, or the defaults"
    ),
]
CheckedUrl = Annotated[
    str | None, typer.Option(help="The proxy's admin port; default: that of the settings")
]
Once = Annotated[bool, typer.Option("--once", help="Print it once, for scripts")]


def accept(
    instance: Annotated[str, typer.Argument(help="Id of an instance that has the new model")],
    admin_url: AdminUrl = None,
    config: AdminConfig = None,
) -> None:
    """Accept an instance's model and weights as the right ones, at a proxy and its peers."""
    from kvrs.net.admin import AdminClient

    client = AdminClient.of(load_config(config, os.environ), os.environ, admin_url)
    client.accept(instance)
    print(f"{client.url}: the weights of {instance} are the right ones")


def top(
    admin_url: AdminUrl = None,
    config: AdminConfig = None,
    once: Once = False,
) -> None:
    """Show instances, agents, streams and events of a proxy every second; q or Ctrl-C ends it."""
    from kvrs.cli.top import run_top

    run_top(config, admin_url, once=once)


def doctor(
    config: CheckedFile = None,
    admin_url: CheckedUrl = None,
    as_json: opt.Json = False,
) -> None:
    """Check this machine, and the cluster if its proxy answers; print each problem and its fix."""
    from kvrs.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(config, admin_url, as_json=as_json))
