"""Commands that neither start a process nor ask one: the incidents of an event log, an API key."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

import kvrs.cli.options as opt
from kvrs.cli.common import console
from kvrs.config.document import flow
from kvrs.config.tenants import check_name, key_hash


def incidents(
    log: Annotated[Path, typer.Argument(help="A proxy's event log (proxy.event_log)")],
    instance: Annotated[
        str | None, typer.Argument(help="Only incidents of this instance or agent")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only incidents from this time in UTC on: '2026-11-30 03:57'")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Describe the incidents of an event log, list their decisions, and decide them again."""
    from kvrs.cli.incidents import show_incidents

    raise typer.Exit(0 if show_incidents(log, instance, since, as_json=as_json) else 1)


def key(tenant: Annotated[str, typer.Argument(help="Name of the tenant")]) -> None:
    """Make an API key, printed only once, and the line of security.key_file that accepts it."""
    check_name(tenant)
    made = f"kvrs-{secrets.token_urlsafe(32)}"
    console.print("for the client, it is stored nowhere:", style="dim", highlight=False)
    print(made, flush=True)
    console.print("for security.key_file:", style="dim", highlight=False)
    print(f"{flow(tenant)}: {{keys: [{key_hash(made.encode()).hex()}]}}")
